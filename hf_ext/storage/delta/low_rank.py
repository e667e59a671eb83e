"""Finds the low-rank part of a matrix's change, as a product of two matrices of small integers.

The change of a full fine-tune is partly of low rank, that of a merged LoRA completely. Taking such a part out of the difference
costs the factors and saves bits of every value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hf_ext.errors import MissingDependencyError
from hf_ext.storage.native import FLOATS, WIDTHS, _native, as_numbers
from hf_ext.storage.prefetch import check_awaited

try:
    import torch
except ImportError as error:
    raise MissingDependencyError(
        "Compressing at levels 2 and 3 needs PyTorch, which is not installed: pip install torch, or compress with level=1."
    ) from error

MAX_RANK = 64  # each component adds a product to the decoding of every value
MAX_RANK_OF_ALL = {2: MAX_RANK, 3: 256}  # by level, for changes that are completely of low rank
OVERSAMPLING = 8
LEAST = 64  # smaller numbers of rows or columns are not worth it
MAX_EXPONENT = 100
ROUNDS = {2: 3, 3: 6}  # by level: rounds of fitting the factors of changes that are completely of low rank
FINEST = 7  # limit of a spacing's exponent below the largest: otherwise a few values would outweigh all others
STEPS = 2  # of conjugate gradients, for the rows and for the columns, in each round
PIECE = 1 << 18  # values whose spacing is computed at once
BAND = 64  # rows that are fitted together, few enough for the cache
NEARLY_ALL = 1e-4  # a share of the energy below which single precision does not resolve the rest
TINY = 1e-300  # replaces 0 in divisors
EXACT = 2**53  # up to here, double precision represents every sum of products
GRID_SAMPLE = 4096  # values from which the spacing of a tensor's values is estimated
GAUSSIAN_BITS = 0.5 * math.log2(2 * math.pi * math.e)  # entropy of a Gaussian number with a standard deviation of one step

#: Bits of the mantissa, and exponent of the smallest normal number, of each float type.
MANTISSA = {"F32": 23, "F16": 10, "BF16": 7, "F64": 52}
LEAST_EXPONENT = {"F32": -126, "F16": -14, "BF16": -126, "F64": -1022}


class Factors(NamedTuple):
    """The change rows · columns · 2^-exponent, in the form that the C++ extension takes."""

    rows: np.ndarray  # int32, rows × rank
    columns: np.ndarray  # int32, rank × columns
    exponent: int


class Components(NamedTuple):
    """The leading singular components of a change. They stay factored until the rank is known."""

    values: np.ndarray
    basis: torch.Tensor  # rows × width, orthonormal columns
    reduced: torch.Tensor  # width × columns: the change in this basis
    turn: torch.Tensor  # width × components, orthonormal columns: the components in this basis
    energy: float  # sum of the squares of the whole change

    @property
    def lengths(self) -> tuple[int, int]:
        return self.basis.shape[0], self.reduced.shape[1]

    def left(self, rank: int) -> torch.Tensor:
        """Returns the left singular vectors: rows × rank, orthonormal columns."""
        return self.basis @ self.turn[:, :rank]

    def right(self, rank: int) -> torch.Tensor:
        """Returns the right singular vectors: rank × columns, orthonormal rows."""
        return (self.turn[:, :rank].T @ self.reduced) / torch.from_numpy(self.values[:rank, None]).float()

    def energy_left(self, rank: int) -> float:
        """Returns the energy that components beyond this rank have."""
        return max(self.energy - float(np.square(self.values[:rank]).sum()), 0.0)


def changes(data: np.ndarray, prediction: np.ndarray, dtype: str, length: int, level: int) -> list[Factors]:
    """Returns low-rank changes that may bring a base closer to a tensor, to be tried one by one.

    Args:
        data: bytes of the tensor, a matrix with rows of `length` values.
        prediction: bytes of the base, of the same type and size.
        level: 2 or 3, see `encode_raw`.
    """
    values = data.size // WIDTHS[dtype]
    change = np.empty((values // length, length), np.float32)
    energies = np.empty(len(change))
    _native.subtract(data, prediction, FLOATS[dtype], length, change, energies)
    sample = data.reshape(values, -1)[:: 1 + values // GRID_SAMPLE].reshape(-1)
    with np.errstate(over="ignore"):  # float64 values may be too far apart to be squared
        grid = float(np.exp2(2.0 * spacing(as_numbers(sample, dtype), dtype)).mean()) / 12
    return candidates(change, energies, grid, lambda: spacings(data, dtype).reshape(change.shape), level)


def candidates(
    change: np.ndarray, energies: np.ndarray, grid: float, spacings: Callable[[], np.ndarray], level: int
) -> list[Factors]:
    """Returns low-rank approximations of a change, as integers.

    Args:
        change: float32, rows × columns, finite.
        energies: sum of the squares of each row.
        grid: mean variance of the rounding of the tensor's values to their type.
        spacings: returns the exponents of the distances of each value of the tensor to the next of its type.
        level: 2 or 3, see `encode_raw`.
    """
    touched = np.flatnonzero(energies)
    if min(change.shape) < LEAST or len(touched) < LEAST or not np.isfinite([grid, energies.sum()]).all():
        return []
    rows = slice(None) if len(touched) == len(change) else touched
    part = torch.from_numpy(change[rows])
    components = decompose(part, float(energies.sum()), MAX_RANK_OF_ALL[level], level - 1)
    best = best_rank(components, grid)
    if best == 0:
        return []
    is_all = components.energy_left(best) < max(4 * grid * part.numel(), NEARLY_ALL * components.energy)
    results = []
    for rank, halvings in search(best if is_all else min(best, MAX_RANK), is_all, level):
        root = torch.from_numpy(np.sqrt(components.values[:rank]))
        left, right = components.left(rank) * root, components.right(rank) * root[:, None]
        rest = components.energy_left(rank) / part.numel() + grid
        if is_all:
            left, right = fit(part, torch.from_numpy(spacings()[rows]), left, right, ROUNDS[level])
            rest = grid
        for finer in halvings:
            factors = quantize(left, right, rest, finer)
            if factors is not None:
                all_rows = np.zeros((len(change), rank), np.int32)
                all_rows[rows] = factors.rows
                results.append(factors._replace(rows=all_rows))
    return results


def fit(
    change: torch.Tensor, exponents: torch.Tensor, left: torch.Tensor, right: torch.Tensor, rounds: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fits a product of the same rank to a change by weighted least squares, alternating between rows and columns. The weight
    of a value follows from its spacing (2^exponent), which limits how exactly the value is known."""
    weights = (2 * (exponents.max() - exponents).clamp(max=FINEST)).float().exp2()
    left, right = left.double(), right.double()
    for _ in range(rounds):
        left = solve(weights, change, left, right)
        right = solve(weights.T, change.T, right.T, left.T).T
    return left, right


def solve(weights: torch.Tensor, targets: torch.Tensor, start: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Returns, for each row of the targets (rows × columns), the coefficients of the factors (rank × columns) with the least
    weighted error. Conjugate gradients start from `start` (rows × rank), preconditioned as if a row's weights were equal."""
    inverse = torch.linalg.pinv(factors @ factors.T, hermitian=True)
    solved = []
    for weight, target, near in zip(*(values.split(BAND) for values in (weights, targets, start))):
        check_awaited()
        solved.append(descend(weight.double(), target.double(), near, factors, inverse))
    return torch.cat(solved)


def descend(
    weights: torch.Tensor, targets: torch.Tensor, solution: torch.Tensor, factors: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """Runs STEPS steps of conjugate gradients for `solve`."""
    scale = 1 / weights.mean(1, keepdim=True)
    rest = (weights * (targets - solution @ factors)) @ factors.T
    direction = steepest = scale * (rest @ inverse)
    energy = (rest * steepest).sum(1, keepdim=True)
    for _ in range(STEPS):
        image = (weights * (direction @ factors)) @ factors.T
        step = energy / (direction * image).sum(1, keepdim=True).clamp(min=TINY)
        solution = solution + step * direction
        rest = rest - step * image
        steepest = scale * (rest @ inverse)
        before, energy = energy, (rest * steepest).sum(1, keepdim=True)
        direction = steepest + energy / before.clamp(min=TINY) * direction
    return solution


def search(rank: int, is_all: bool, level: int) -> list[tuple[int, Sequence[int]]]:
    """Returns the ranks to try, each with the step sizes to try: how often the squared step of the factors is halved, starting
    from the best one for a rest of white noise.

    A change that is completely of low rank leaves hardly any rest. Each value is then predicted exactly or is off by one step,
    and finer factors make the latter rarer.
    """
    if is_all:
        return [(rank, [4, 8] if level == 2 else range(0, 14, 2))]
    if level == 2:
        return [(rank, [0])]
    return [(near, [-1, 0, 1]) for near in sorted({rank * 3 // 4, rank, rank * 5 // 4}) if near]


def spacing(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns, for each value, the exponent (int16) of the distance to the next value of its type. Values that are not finite
    get the largest exponent of the others."""
    finite = np.isfinite(values)
    magnitude = np.abs(np.where(finite, values, 0))
    magnitude[~finite] = magnitude.max(initial=0)
    return (np.frexp(np.maximum(magnitude, 2.0 ** LEAST_EXPONENT[dtype]))[1] - 1 - MANTISSA[dtype]).astype(np.int16)


def spacings(data: np.ndarray, dtype: str) -> np.ndarray:
    """Returns `spacing` of all values of a tensor, computed piece by piece."""
    result = np.empty(data.size // WIDTHS[dtype], np.int16)
    for start in range(0, len(result), PIECE):
        check_awaited()
        part = data[start * WIDTHS[dtype] : (start + PIECE) * WIDTHS[dtype]]
        result[start : start + PIECE] = spacing(as_numbers(part, dtype), dtype)
    return result


def decompose(change: torch.Tensor, energy: float, rank: int, power_iterations: int = 1) -> Components:
    """Computes a randomized singular value decomposition (Halko, Martinsson, Tropp, arXiv 0909.4061) with a fixed seed.

    A single power iteration needs no orthogonal basis between its steps: what single precision loses is below the noise.
    """
    rows, columns = change.shape
    width = min(rank + OVERSAMPLING, rows, columns)
    basis = change @ torch.randn(columns, width, generator=torch.Generator().manual_seed(0))
    for iteration in range(power_iterations):
        check_awaited()
        image = change.T @ (torch.linalg.qr(basis).Q if iteration else basis)
        check_awaited()
        basis = change @ image
    check_awaited()
    basis = torch.linalg.qr(basis).Q
    reduced = basis.T @ change
    wide = reduced.double()
    squares, turn = torch.linalg.eigh(wide @ wide.T)
    values = squares.clamp(min=0).sqrt().flip(0)[:rank]
    values = values[values > 1e-6 * values[0]]
    return Components(values.numpy(), basis, reduced, turn.flip(1)[:, : len(values)].float(), energy)


def best_rank(components: Components, grid: float) -> int:
    """Returns the rank at which factors and rest together take the fewest bits, if the rest is white noise; 0 if none pays."""
    rows, columns = components.lengths
    count, values = rows * columns, components.values
    if not len(values):
        return 0
    ranks = np.arange(1, len(values) + 1)
    rest = np.maximum(components.energy - np.square(values).cumsum(), 0) / count + grid
    share, square = _steps(values.cumsum(), ranks, rest, rows, columns)
    bits = count / 2 * (np.log2(rest) - np.log2(1 - share))
    for length in (rows, columns):
        per_factor = np.log2(values[:, None] / (length * square[None, :])) / 2 + GAUSSIAN_BITS
        bits += length * np.triu(np.maximum(per_factor, 1)).sum(0)
    bits[share >= 0.5] = np.inf
    best = int(bits.argmin())
    return best + 1 if bits[best] < count / 2 * math.log2(components.energy / count + grid) else 0


def quantize(left: torch.Tensor, right: torch.Tensor, rest: float, finer: int = 0) -> Factors | None:
    """Rounds the factors of a product (rows × rank times rank × columns) to integers, with the step that takes the fewest bits.
    Returns None if no step gives exact sums.

    Args:
        rest: variance of what the product leaves of a value, including the rounding of its type.
        finer: number of times that the squared step is halved.
    """
    left, right = left.double(), right.double()
    (rows, rank), columns = left.shape, right.shape[1]
    most = rank * float(left.abs().max()) * float(right.abs().max())
    square = float(_steps(float(left.square().sum()), rank, rest, rows, columns)[1])
    if not (0 < square < math.inf and 0 < most < math.inf):
        return None
    exponent = min(round(-math.log2(square)) + finer, math.floor(math.log2(EXACT / most)) - 1)
    if abs(exponent) > MAX_EXPONENT:
        return None
    left, right = ((factors * 2 ** (exponent / 2)).round().int().contiguous() for factors in (left, right))
    return Factors(left.numpy(), right.numpy(), exponent)


def _steps(values, rank, rest, rows: int, columns: int):
    """Returns the number of factors per value, and the squared step of the factors that takes the fewest bits. `values`, `rank`
    and `rest` are numbers, or arrays with an entry for each rank.

    Rounding the factors adds x · rest to the variance of a value, which costs the value log2(1 + x) / 2 bits. Halving the step
    costs each factor one bit. The sum is least where x / (1 + x) is the share.
    """
    share = np.minimum(rank * (rows + columns) / (rows * columns), 0.5)
    return share, 12 * rest * share / (1 - share) / (values * (1 / rows + 1 / columns))
