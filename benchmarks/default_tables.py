"""Write csrc/delta/default_tables.h and geometric_tables.h: the default symbol frequencies of every delta.

    python benchmarks/default_tables.py --base BASE --fine-tune FINE_TUNE

Counts symbols over the matrices of one fine-tune in float32, float16 and bfloat16, with equal weight, and over the base's own
weights for the table of values that have no base. The tables for the gaps and sizes of few changes follow from a formula. All
tables are part of the file format (docs/fm_delta_format.md). After a release, they change only with the format's version.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from hf_ext import _native

DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
TABLES, SYMBOLS, ALONE, ESCAPE, TOTAL = 33, 64, 32, 62, 2048
LINEAR, TAIL = 24, 48
TAIL_START, TAIL_BITS = (0, 8, 24, 56, 120, 248, 504), (3, 4, 5, 6, 7, 8, 10)
GEOMETRIC = 12  # tables


def count(tensor: torch.Tensor, base: torch.Tensor | None, dtype: torch.dtype) -> np.ndarray:
    values, twin = (None if t is None else t.to(dtype).contiguous().view(torch.uint8).numpy() for t in (tensor, base))
    predicted = 0 if twin is None else tensor.numel()
    counts = _native.count_symbols(values, twin, DTYPES[dtype], tensor.shape[-1], predicted)
    return np.frombuffer(counts, np.uint64).reshape(TABLES, SYMBOLS).astype(float)


def mirrored(symbol: int) -> int:
    """Returns the symbol of -1 - s, which is as probable as s wherever the sign carries no information."""
    return 2 * LINEAR - 1 - symbol if symbol < TAIL else symbol ^ 1


def frequencies(counts: np.ndarray) -> np.ndarray:
    """Scales one table to TOTAL; a symbol too rare for a slot gets none, the escape always has one."""
    share = counts / max(counts.sum(), 1e-9) * TOTAL
    result = np.where(share >= 0.07, np.maximum(np.round(share), 1), 0).astype(int)
    result[ESCAPE] = max(result[ESCAPE], 1)
    while (left := TOTAL - result.sum()) != 0:
        largest = result.argmax()
        result[largest] += left if left > 0 else max(left, -max(1, result[largest] // 8))
    return result


def geometric(bits: float) -> np.ndarray:
    """Probabilities of the symbols of a number that is geometrically distributed: one more takes `bits` bits more. A hundredth
    is spread four times as wide, because real numbers have longer tails."""
    probability = np.zeros(SYMBOLS)
    for share, rate in ((0.99, bits), (0.01, bits / 4)):
        beyond = 2 ** (-rate * np.arange(LINEAR + 1))  # that a number is at least so large
        probability[LINEAR:TAIL] += share * -np.diff(beyond)
        for tail, (start, width) in enumerate(zip(TAIL_START, TAIL_BITS)):
            probability[TAIL + 2 * tail] += share * 2 ** (-rate * (LINEAR + start)) * (1 - 2 ** (-rate * 2**width))
    return probability


def write_header(path: Path, comment: str, name: str, tables: list[np.ndarray]) -> None:
    rows = ["{" + ", ".join(map(str, frequencies(counts))) + "}" for counts in tables]
    path.write_text(
        f"// Made by benchmarks/default_tables.py: {comment}\n"
        "#pragma once\n\n#include <array>\n#include <cstdint>\n\nnamespace hf_ext::delta {\n\n// clang-format off\n"
        f"inline constexpr std::array<std::array<uint16_t, 64>, {len(tables)}> {name} = {{{{\n    "
        + ",\n    ".join(rows)
        + ",\n}};\n// clang-format on\n\n}  // namespace hf_ext::delta\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkpoint folder of the base model")
    parser.add_argument("--fine-tune", type=Path, required=True, help="checkpoint folder of a full fine-tune of it")
    parser.add_argument("--out", type=Path, default=Path("csrc/delta"), help="folder to write into")
    args = parser.parse_args()
    base, tuned = (load_file(folder / "model.safetensors") for folder in (args.base, args.fine_tune))
    twins = {name: next((base[key] for key in base if name.endswith(key)), None) for name in tuned}
    total = np.zeros((TABLES, SYMBOLS))
    for dtype in DTYPES:
        counts = np.zeros((TABLES, SYMBOLS))
        for name, tensor in tuned.items():
            if tensor.ndim == 2 and twins[name] is not None and twins[name].shape == tensor.shape:
                counts += count(tensor, twins[name], dtype) + count(twins[name], None, dtype)
        total += counts / counts.sum()
    # Residuals are rounded down, so s and -1 - s differ only where the step is a whole unit: there s and -s correspond.
    for table in range(16, TABLES - 1):
        total[table] = (total[table] + total[table][[mirrored(s) for s in range(SYMBOLS - 2)] + [ESCAPE, 63]]) / 2
    each = "for each table the frequencies of its 64 symbols, which add up to 2048."
    write_header(args.out / "default_tables.h", each, "DEFAULT_TABLES", list(total))
    tables = [geometric(2 ** ((i - 4) / 2)) for i in range(GEOMETRIC)]
    write_header(args.out / "geometric_tables.h", "frequencies as in default_tables.h.", "GEOMETRIC_TABLES", tables)


if __name__ == "__main__":
    main()
