"""Types of the C++ extension (csrc/binding.cpp).

`dtype` is the code of a float type: 1 float32, 2 float16, 3 bfloat16, 4 float64. Buffers are contiguous and hold little-endian
values. Invalid arguments raise TypeError, damaged data raises ValueError.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

Buffer: TypeAlias = bytes | bytearray | memoryview | np.ndarray
Factors: TypeAlias = tuple[Buffer, Buffer, int]  # rows (int32), columns (int32), exponent
Target: TypeAlias = tuple[int, Buffer, Buffer, Buffer | None, float, Buffer | None, float, Buffer]

# ---- FM-Delta ----

def encode(
    tensor: Buffer,
    base: Buffer | None,
    dtype: int,
    row_length: int,
    base_values: int,
    threads: int = 1,
    candidates: tuple[Factors, ...] = (),
    /,
) -> bytes:
    """Returns the body of a compressed tensor: the smallest that any of the candidates gives, or none of them."""

def encode_coarse(
    tensor: Buffer,
    base: Buffer,
    dtype: int,
    row_length: int,
    base_values: int,
    threads: int,
    settings: tuple[float, float, Factors | None],
    /,
) -> tuple[bytes, int]:
    """Returns a body that restores the first `base_values` values approximately, and the number of those that have a change of
    their own beside the low-rank one. The settings are the step, the least change in steps, and the low-rank change."""

def decode(body: Buffer, arguments: tuple[Buffer, Buffer | None, int, int, int, int], /) -> None:
    """Fills a tensor. `arguments` are (tensor, base, dtype, row_length, base_values, threads), as for `encode`."""

def list_changes(body: Buffer, base: Buffer, dtype: int, row_length: int, threads: int = 1, /) -> tuple[bytes, bytes] | None:
    """Returns where a tensor differs from its base: places (uint32, increasing), and its values there (uint16).

    Returns None if the body does not list them: only bodies of 16-bit floats do, where few values changed.
    """

def factors(body: Buffer, dtype: int, values: int, row_length: int, base_values: int, /) -> tuple[bytes, bytes, int] | None:
    """Returns the factors of the low-rank change in a body: rows (int32; 0 where a row did not change), columns (int32) and
    exponent. Returns None if the body has none. Requires no base."""

def layout(
    body: Buffer, dtype: int, values: int, row_length: int, base_values: int, /
) -> tuple[int, float, int, int, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
    """Returns what a body holds beside its entropy-coded numbers: the fields of `Layout` (csrc/delta/codec.h). The order is
    plane, step, exponent, wide; rows (uint32), scales of rows and of columns (int16), frequencies (uint16), classes, factors of
    rows and of columns, counts (int32), blocks (int64)."""

def exchange(tensor: Buffer, places: Buffer, others: Buffer, row_length: int, rows: Buffer, /) -> None:
    """Exchanges values of a tensor of 16-bit numbers with others, and sets the bytes of their rows in `rows` to 1.

    Done twice, it changes nothing in the tensor.
    """

def cast(source: Buffer, from_dtype: int, target: Buffer, to_dtype: int, /) -> None:
    """Fills `target` with the values of `source`, rounded to nearest even."""

def codes_to_numbers(kind: int, codes: Buffer, base: Buffer, numbers: Buffer, /) -> None:
    """Fills `numbers` (uint16) with a number for each code in the bytes of quantized weights and of their base."""

def numbers_to_codes(kind: int, numbers: Buffer, base: Buffer, codes: Buffer, /) -> None:
    """Inverts `codes_to_numbers`."""

def subtract(tensor: Buffer, base: Buffer, dtype: int, row_length: int, change: Buffer, energies: Buffer, /) -> None:
    """Fills `change` (float32) with tensor - base, or 0 where that is not finite, and `energies` (float64) with the sum of the
    squares of each row."""

def fit_rows(
    tensor: Buffer,
    base: Buffer,
    dtype: int,
    row_length: int,
    top: int,
    most: int,
    by_columns: bool,
    fixed: Buffer,
    inverse: Buffer,
    own: Buffer,
    steps: int,
    threads: int = 1,
    /,
) -> None:
    """Improves the rows' factors `own` (float32, rows × rank) of a product that approximates tensor - base, by steps of
    conjugate gradients for weighted least squares; with `by_columns`, the columns' factors.

    A value weighs 4 to the power of how far the exponent of its spacing is below `top`, limited to 0 and `most` (at most 60).
    `fixed` has the other side's factors (float32, length × rank; with `by_columns` perhaps those of every n-th row only),
    `inverse` about the inverse of their Gram matrix."""

def count_symbols(
    tensor: Buffer, base: Buffer | None, dtype: int, row_length: int, base_values: int, threads: int = 1, /
) -> bytes:
    """Returns how often each symbol occurs in each table: 33 × 64 counts (uint64)."""

def default_tables() -> tuple[bytes, bytes]:
    """Returns the default frequencies (uint16): 33 tables of 64 symbols, and 12 for geometrically distributed numbers."""

# ---- EMR-Merging ----

def elect(
    dtype: int, base: Buffer, tasks: tuple[Buffer, ...], elected: Buffer, masks: Buffer, sums: Buffer, threads: int = 1, /
) -> None:
    """Fills `elected`, the tasks' `masks` one after another, and their `sums` (9 float64 per task); see csrc/emr/emr.h."""

def modulate(
    dtype: int, base: Buffer, elected: Buffer, mask: Buffer | None, scale: float, out: Buffer, threads: int = 1, /
) -> None:
    """Fills `out` with a task's tensor."""

def retarget(targets: tuple[Target, ...], threads: int = 1, /) -> int:
    """Overwrites the tensors of one task with those of another, either all of them or none.

    A target is (dtype, base, elected, mask, scale, new mask, new scale, tensor). Returns the number of targets, or the index of
    the first target whose tensor does not hold the first task's values.
    """

# ---- Long work ----

def check_with(function: Callable[[], None], /) -> None:
    """Sets a function to call about ten times a second from every thread that encodes, decodes or elects. It stops that work by
    raising, as a signal handler does in the main thread."""

# ---- Instruction sets ----

def instruction_sets() -> tuple[str, ...]:
    """Returns the instruction sets that this processor supports, the fastest last."""

def use(name: str, /) -> str:
    """Selects an instruction set, for tests and benchmarks. Returns the one that was selected before."""
