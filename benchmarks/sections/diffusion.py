"""Measure FM-Delta on a UNet of the size of Stable Diffusion 1.5's: a section of benchmarks/fm_delta.py.

No such fine-tune is available offline. The base has random weights. The changes resemble those of the real fine-tune, matrix
by matrix, as in sections/scale.py. A convolution is a matrix with a row for each output channel.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from measuring import fresh, load_and_read, print_table, size_of
from sections.scale import measure_spectra, measured, trained

from hf_ext.fm_delta import compress_checkpoint, verify

SD15 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
RUNS = 3


def write_unets(args: argparse.Namespace, base: Path, tuned: Path) -> int:
    """Writes a base and a fine-tune of it in fp16; returns the number of parameters."""
    spectra, _ = measure_spectra(args.pairs / args.tasks[0])
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = UNet2DConditionModel(**SD15).half()
    model.save_pretrained(base)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    with torch.no_grad():
        for number, weight in enumerate(matrices):
            like = spectra[number * len(spectra) // len(matrices)]
            weight.copy_(trained(weight.float().flatten(1), like, generator).reshape(weight.shape))
        for vector in (weight for weight in model.parameters() if weight.dim() == 1):
            vector.add_(torch.randn(vector.shape, generator=generator) * 1e-3)
    model.save_pretrained(tuned)
    return sum(weight.numel() for weight in model.parameters())


def load(folder: Path, dtype: torch.dtype) -> None:
    load_and_read(folder, UNet2DConditionModel, torch_dtype=dtype)


def require_same(folder: Path, other: Path) -> None:
    model, expected = (UNet2DConditionModel.from_pretrained(path) for path in (folder, other))
    if any(not torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True)):
        raise SystemExit("the compressed model loads with other weights")


def diffusion(args: argparse.Namespace) -> dict:
    """Measures time and memory of each step, in processes of their own: medians of runs in turns."""
    with tempfile.TemporaryDirectory() as scratch:
        base, tuned, packed = (Path(scratch) / name for name in ("base", "tuned", "packed"))
        parameters = fresh(write_unets, args, base, tuned)
        actions: dict[str, tuple] = {
            "compress": (compress_checkpoint, tuned, base, packed),
            "verify": (verify, packed),
            "from_pretrained, compressed": (load, packed, torch.float16),
            "from_pretrained, plain": (load, tuned, torch.float16),
            "from_pretrained to fp32, compressed": (load, packed, torch.float32),
            "from_pretrained to fp32, plain": (load, tuned, torch.float32),
        }
        turns = [{what: fresh(measured, *action) for what, action in actions.items()} for _ in range(RUNS)]
        fresh(require_same, packed, tuned)
        original, size = (size_of(folder, "*.safetensors") / 1e6 for folder in (tuned, packed))
    results = {what: [statistics.median(values) for values in zip(*(turn[what] for turn in turns))] for what in actions}
    rows = [[what, f"{seconds:.2f}", f"{peak:.0f}"] for what, (seconds, peak) in results.items()]
    title = f"UNet of {parameters / 1e6:.0f} M parameters, {original:.0f} MB in fp16, drawn like {args.tasks[0]}; "
    print_table(f"{title}compressed {100 * size / original:.1f} %", ["step", "seconds", "memory beyond mapped files, MB"], rows)
    return results | {"parameters": parameters, "size": size / original}
