"""Measure the size of experts' weights in one tensor beside that of one tensor for each expert: a section of
benchmarks/fm_delta.py. The weights are random; some rows and columns are larger than others."""

import argparse

import torch
from measuring import print_table
from sections.pairs import Pair, bits, compress_checked, ours

EXPERTS, ROWS, COLUMNS, RANK = 64, 512, 512, 8


def experts(args: argparse.Namespace) -> dict:
    """Returns bits per parameter in bf16, as {change: {form: bits}}."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(EXPERTS, *shape, generator=generator)

    def uneven() -> torch.Tensor:
        return normal(ROWS, COLUMNS) * (0.3 * (normal(ROWS, 1) + normal(1, COLUMNS))).exp()

    base = (0.02 * uneven()).bfloat16().float()
    cases = {
        "dense change": (base + 1e-3 * uneven(), base),
        "merged LoRA": (base + 3e-4 * normal(ROWS, RANK) @ normal(RANK, COLUMNS), base),
        "without a base": (base, None),
    }
    results = {}
    for change, (tensor, twin) in cases.items():
        x, prior = bits(tensor, "bf16"), None if twin is None else bits(twin, "bf16")

        def pair(index: object, shape: tuple[int, ...], x=x, prior=prior) -> Pair:
            return Pair("", x[index].reshape(shape), None if prior is None else prior[index].reshape(shape), dense=True)

        forms = {
            "one tensor": [pair(..., (EXPERTS, ROWS, COLUMNS))],
            "a tensor for each expert": [pair(i, (ROWS, COLUMNS)) for i in range(EXPERTS)],
            "a row for each expert": [pair(..., (EXPERTS, ROWS * COLUMNS))],
        }
        results[change] = {
            form: 8 * sum(map(len, compress_checked(ours(), pairs, "bf16"))) / tensor.numel() for form, pairs in forms.items()
        }
    rows = [[change, *(f"{size:.3f}" for size in sizes.values())] for change, sizes in results.items()]
    title = f"bf16, {EXPERTS} experts of {ROWS}×{COLUMNS}: bits per parameter"
    print_table(title, ["", *results["dense change"]], rows)
    return results
