"""Measure what one optimizer step costs as a delta of quantized weights, as servers in fp8, int4, nvfp4 or mxfp4 hold them.

    pip install compressed-tensors torchao zstandard
    python benchmarks/quantized_steps.py --lm lm

``lm`` is the folder that benchmarks/language_model.py makes. The steps are real ones of SmolLM2-135M, rounded to bf16. All
matrices but the embedding are quantized, by the libraries that serving stacks use: Transformers (fp8, a scale for each block
of 64 × 64), compressed-tensors (int4, groups of 32), and torchao (mxfp8, mxfp4, nvfp4).

It compares, for these weights and their scales: payloads of FM-Delta, one for each tensor that changed; the bytes XOR those of
the step before, in one zstd -1 frame for each tensor; and payloads of the bf16 weights, for servers that quantize themselves.
Every method must restore the same bytes. Times are CPU seconds on one thread.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import zstandard
from measuring import one_thread, print_table, run_sections
from safetensors.torch import load_file
from sections.steps import RATES, Tensors

from hf_ext import storage

GROUP = 32


def fp8(weight: torch.Tensor) -> Tensors:
    """Blocks as in DeepSeek's checkpoints, but of 64 × 64, which divide SmolLM2's matrices."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=(64, 64), scale_fmt=None)
    return Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"weight": weight})


def int4(weight: torch.Tensor, group: int = GROUP) -> Tensors:
    from compressed_tensors.compressors import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
    groups = weight.unflatten(1, (-1, group))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    values = quantize(weight, scale, zero_point, args, dtype=torch.int8)
    return {"weight_packed": pack_to_int32(values, 4), "weight_scale": scale.bfloat16()}


def nvfp4(weight: torch.Tensor) -> Tensors:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(weight.abs().max())
    block_scales, values = nvfp4_quantize(weight, 16, scale)
    return {"weight": values.view(torch.uint8), "weight_scale": block_scales, "weight_scale_2": scale}


def mx(weight: torch.Tensor, dtype: torch.dtype) -> Tensors:
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, values = to_mx(weight, dtype, GROUP)
    return {"weight": values if dtype == torch.float8_e4m3fn else values.view(torch.uint8), "weight_scale": scales}


QUANTIZERS: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "fp8": fp8,
    "mxfp8": lambda weight: mx(weight, torch.float8_e4m3fn),
    "int4": int4,
    "nvfp4": nvfp4,
    "mxfp4": lambda weight: mx(weight, torch.float4_e2m1fn_x2),
}


def quantized(weights: Tensors, name: str) -> Tensors:
    parts = {key: QUANTIZERS[name](weight) for key, weight in weights.items()}
    return {f"{key}.{part}": tensor.contiguous() for key, tensors in parts.items() for part, tensor in tensors.items()}


def load(args: argparse.Namespace, rate: str, end: str) -> Tensors:
    """Returns the weights that are quantized, before ("0") or after a step."""
    weights = load_file(args.lm / f"step-{rate}" / end / "model.safetensors")
    return {name: weight for name, weight in weights.items() if weight.ndim == 2 and "embed" not in name}


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def ours(tensor: torch.Tensor, base: torch.Tensor) -> bytes:
    return b"" if np.array_equal(raw(tensor), raw(base)) else storage.encode(tensor, base, level=1)


def apply(blob: bytes, live: torch.Tensor) -> None:
    if blob:
        storage.apply(blob, live)


def xor(tensor: torch.Tensor, base: torch.Tensor) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(raw(tensor) ^ raw(base))


def xor_apply(blob: bytes, live: torch.Tensor) -> None:
    data = raw(live)
    data ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint8)


def measure(base: Tensors, step: Tensors, encode: Callable, apply: Callable) -> tuple[float, float]:
    """Returns kB, and the CPU seconds to encode and apply a step."""
    live = {name: tensor.clone() for name, tensor in base.items()}
    start = time.process_time()
    blobs = {name: encode(step[name], tensor) for name, tensor in base.items()}
    for name, tensor in live.items():
        apply(blobs[name], tensor)
    seconds = time.process_time() - start
    if any(not np.array_equal(raw(live[name]), raw(tensor)) for name, tensor in step.items()):
        raise SystemExit("the step does not come back")
    return sum(map(len, blobs.values())) / 1e3, seconds


def sizes(args: argparse.Namespace) -> dict:
    results: dict = {}
    rows = []
    for rate in RATES:
        before, after = (load(args, rate, end) for end in ("0", "1"))
        for name in ("bf16", *QUANTIZERS):
            base, step = (weights if name == "bf16" else quantized(weights, name) for weights in (before, after))
            pairs = [(raw(base[key]), raw(step[key])) for key in base]
            changed = sum(int((one != other).sum()) for one, other in pairs) / sum(one.size for one, _ in pairs)
            with one_thread():
                figures = [measure(base, step, *way) for way in ((ours, apply), (xor, xor_apply))]
            results[f"{rate} {name}"] = {"changed": changed, "ours": figures[0], "xor": figures[1]}
            cells = [f"{cell:.{digits}f}" for figure in figures for cell, digits in zip(figure, (1, 2))]
            rows.append([rate, name, f"{sum(one.size for one, _ in pairs) / 1e6:.0f}", f"{100 * changed:.4f} %", *cells])
    header = ["learning rate", "format", "MB", "bytes that change", "ours: kB", "s", "XOR, zstd -1: kB", "s"]
    print_table("One step of the quantized matrices of SmolLM2-135M", header, rows)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, required=True, help="folder that benchmarks/language_model.py makes")
    run_sections(parser, {"sizes": sizes})
