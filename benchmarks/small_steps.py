"""Measure what one optimizer step costs as a delta: bits per parameter, and how fast it is encoded and applied in place.

    python benchmarks/small_steps.py
    python benchmarks/small_steps.py --lm lm

Without options, the steps are random changes to the matrices of all-MiniLM-L6-v2 in bf16, like those of AdamW at small learning
rates: 1.1, 2.9 and 7.6 % of the values change. With --lm, they are real steps of SmolLM2-135M; ``lm`` is the folder that
benchmarks/language_model.py makes.

The entropy is that of the changes of ordered integers given the base's exponent, as if their distribution were known. Training
stacks today send zstd -1 on the XOR with the base. Every method must restore the same bits.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zstandard
from fine_tunes import minilm
from measuring import one_thread, print_table, run_sections, timed
from safetensors.torch import load_file

from hf_ext import storage

SHARES = (0.011, 0.029, 0.076)
RATES = ("1e-6", "3e-6", "1e-5")
Tensors = dict[str, torch.Tensor]


def drawn_step(base: Tensors, share: float) -> Tensors:
    """Returns the base after a step that changes this share of the values. Master weights lie anywhere between the values that
    round to the base's. Each moves by up to the learning rate."""
    generator = torch.Generator().manual_seed(0)
    masters, moves = {}, {}
    for name, tensor in base.items():
        spacing = torch.exp2(torch.floor(torch.log2(tensor.float().abs().clamp(min=1e-30))) - 7)
        masters[name] = tensor.float() + spacing * (torch.rand(tensor.shape, generator=generator) - 0.5) * 0.998
        moves[name] = torch.randn(tensor.shape, generator=generator).clamp(-1, 1)
    low, high = 1e-9, 1e-2
    while high / low > 1.001:
        rate = (low * high) ** 0.5
        step = {name: (masters[name] + rate * moves[name]).bfloat16() for name in base}
        low, high = (rate, high) if changed(base, step) < share else (low, rate)
    return step


def changed(base: Tensors, step: Tensors) -> float:
    """Returns the share of values whose bits differ."""
    return sum(int((bits(base[name]) != bits(step[name])).sum()) for name in base) / values(base)


def values(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16).ravel()


def entropy(base: Tensors, step: Tensors) -> float:
    """Bits per parameter."""
    total = 0.0
    for name in base:
        before, after = (bits(tensors[name]).astype(np.int32) for tensors in (base, step))
        ordered = [np.where(x & 0x8000, 0xFFFF - x, x | 0x8000) for x in (before, after)]
        exponent = np.maximum(before >> 7 & 0xFF, 1)
        for each in np.unique(exponent):
            counts = np.unique((ordered[1] - ordered[0])[exponent == each], return_counts=True)[1]
            total -= float((counts * np.log2(counts / counts.sum())).sum())
    return total / values(base)


def zstd_encode(tensor: torch.Tensor, base: torch.Tensor, level: int = 1) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(bits(tensor) ^ bits(base))


def zstd_apply(blob: bytes, live: torch.Tensor) -> None:
    live_bits = bits(live)
    live_bits ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint16)


WAYS: dict[str, tuple[Callable, Callable]] = {
    "ours": (lambda tensor, base: storage.encode(tensor, base, level=1), storage.apply),
    "XOR, zstd -1": (zstd_encode, zstd_apply),
}


def measure(base: Tensors, step: Tensors, runs: int) -> dict:
    """Bits per parameter, and GB of original per second on one thread, by way and in each round."""
    size, results = 2 * values(base) / 1e9, {way: {"encode": [], "apply": []} for way in WAYS}
    for _ in range(runs):
        for way, (encode, apply) in WAYS.items():
            blobs, live = {}, {name: tensor.clone() for name, tensor in base.items()}

            def encode_all(blobs=blobs, encode=encode):
                blobs.update({name: encode(step[name], base[name]) for name in base})

            def apply_all(blobs=blobs, live=live, apply=apply):
                for name, tensor in live.items():
                    apply(blobs[name], tensor)

            results[way]["encode"].append(size / timed(encode_all))
            results[way]["apply"].append(size / timed(apply_all))
            results[way]["bits"] = 8 * sum(map(len, blobs.values())) / values(base)
            if any(not np.array_equal(bits(live[name]), bits(step[name])) for name in base):
                raise SystemExit(f"{way} does not give back the step")
    return results


def steps(args: argparse.Namespace) -> dict:
    """Measures all steps, drawn and real."""
    matrices = {name: x.bfloat16() for name, x in load_file(minilm() / "model.safetensors").items() if x.ndim == 2}
    pairs: dict[str, Callable[[], tuple[Tensors, Tensors]]] = {
        f"drawn, {100 * share:.1f} %": lambda share=share: (matrices, drawn_step(matrices, share)) for share in SHARES
    }
    for rate in RATES if args.lm else ():
        folders = [args.lm / f"step-{rate}" / end / "model.safetensors" for end in ("0", "1")]
        pairs[f"SmolLM2, lr {rate}"] = lambda folders=folders: (load_file(folders[0]), load_file(folders[1]))
    results, rows = {}, []
    for name, load in pairs.items():
        base, step = load()
        least = entropy(base, step)
        with one_thread():
            results[name] = {"changed": changed(base, step), "entropy": least} | measure(base, step, args.runs)
        row = [name, f"{100 * results[name]['changed']:.2f} %", f"{least:.4f}"]
        for way in WAYS:
            figures = results[name][way]
            row += [f"{figures['bits']:.4f} ({figures['bits'] / least:.2f} ×)"]
            row += [f"{statistics.median(figures[what]):.2f}" for what in ("encode", "apply")]
        rows.append(row)
    header = ["step", "changed", "entropy", *(cell for way in WAYS for cell in (way, "encode", "apply"))]
    print_table("Bits per parameter; GB of original per second, one thread", header, rows)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, help="folder that benchmarks/language_model.py makes")
    run_sections(parser, {"steps": steps})
