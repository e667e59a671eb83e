"""Finds the low-rank part of a matrix's change, as a product of two matrices of small integers.

The change of a full fine-tune is partly of low rank, that of a merged LoRA completely. Taking such a part out of the difference
costs the factors and saves bits of every value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hf_ext.errors import MissingDependencyError
from hf_ext.storage.native import FLOATS, WIDTHS, _native, as_numbers
from hf_ext.storage.prefetch import check_awaited
from hf_ext.storage.safetensors_file import torch_dtype

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
FEW = 8  # components that a first look at a sample of the rows is for
ROWS_PER_COMPONENT = 12  # of that sample
MAX_EXPONENT = 100
PASSES = {2: 1, 3: 2}  # by level: power iterations over the whole matrix
ROUNDS = {2: 2, 3: 6}  # by level: rounds of fitting the factors of changes that are completely of low rank
FINEST = 7  # limit of a spacing's exponent below the largest: otherwise a few values would outweigh all others
STEPS = 2  # of conjugate gradients, for the rows and for the columns, in each round
LAST_STEPS = 4  # of conjugate gradients for the rows, once the columns are fitted
ROWS_PER_FACTOR = 64  # at least, of the sample on which the columns are fitted
PIECE = 1 << 18  # values whose change is computed at once
SAMPLE = {2: 1 << 22, 3: 1 << 23}  # by level: values from which the factors of the columns are fitted
MOST = 1 << 23  # values of the largest sample of rows
BAND = 1 << 18  # values that are fitted together, few enough for the cache
TINY = 1e-300  # replaces 0 in divisors
LEAST_SAVED = 0.01  # of the bits that the whole change takes
MOST_ENERGY = 1e30  # of a change whose squares single precision can add up
NEARLY_ALL = 1e-4  # a share of the energy below which single precision does not resolve the rest
EXACT = 2**53  # up to here, double precision represents every sum of products
STEP_SAMPLE = 1 << 16  # values on which steps of the factors are compared
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


class Grid(NamedTuple):
    """The rounding of a tensor's values to their type."""

    variances: np.ndarray  # of the rounding errors of values of different magnitudes
    shares: np.ndarray  # of all values

    @classmethod
    def of(cls, spacings: np.ndarray) -> Grid:
        """Describes the rounding of values with these exponents of their spacings."""
        exponents, counts = np.unique(spacings, return_counts=True)
        return cls(np.exp2(2.0 * exponents) / 12, counts / len(spacings))

    @property
    def mean(self) -> float:
        return float(self.variances @ self.shares)

    def bits(self, variance):
        """Returns how many bits a value takes that is predicted with an error of this variance, beside a constant. The variance
        is a number or an array."""
        return np.log2(np.add.outer(variance, self.variances) + TINY) @ self.shares / 2


class Change:
    """The difference between a matrix and its prediction, computed anew whenever some of its rows are needed.

    Args:
        data: bytes of the matrix, with rows of `length` values.
        prediction: bytes of the prediction, of the same type and size.
    """

    def __init__(self, data: np.ndarray, prediction: np.ndarray, dtype: str, length: int):
        self.dtype = dtype
        self._values, self._predictions = (array.reshape(-1, length * WIDTHS[dtype]) for array in (data, prediction))
        self.shape = len(self._values), length

    def rows(self, rows: slice | np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """Returns the change of some rows (float32, 0 where it is not finite) and the sum of the squares of each."""
        check_awaited()
        values, predictions = (np.ascontiguousarray(array[rows]) for array in (self._values, self._predictions))
        change, energies = np.empty((len(values), self.shape[1]), np.float32), np.empty(len(values))
        _native.subtract(values, predictions, FLOATS[self.dtype], self.shape[1], change, energies)
        return torch.from_numpy(change), energies

    def bands(self) -> Iterator[slice]:
        """Yields the ranges of rows that all together make the matrix, each of about PIECE values."""
        step = max(1, PIECE // self.shape[1])
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))

    def sample(self, values: int) -> np.ndarray:
        """Returns the indices of random rows of at most this many values, always the same ones."""
        count = min(max(1, values // self.shape[1]), self.shape[0])
        return np.sort(np.random.default_rng(0).choice(self.shape[0], count, replace=False, shuffle=False))

    def pair(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the values in some rows in their own type, and their predictions as float32."""
        values, predictions = (
            torch.from_numpy(array[rows]).view(torch_dtype(self.dtype)) for array in (self._values, self._predictions)
        )
        return values, predictions.float()

    def numbers(self, rows: slice | np.ndarray) -> np.ndarray:
        """Returns the matrix's values themselves in some rows, float64 for F64 and float32 for the other types."""
        return as_numbers(np.ascontiguousarray(self._values[rows]).reshape(-1), self.dtype).reshape(-1, self.shape[1])


class Components(NamedTuple):
    """The leading singular components of a change. They stay factored until the rank is known."""

    values: np.ndarray
    basis: torch.Tensor  # columns × width, orthonormal columns
    reduced: torch.Tensor  # rows × width: the change in this basis
    turn: torch.Tensor  # width × components, orthonormal columns: the components in this basis
    energy: float  # sum of the squares of the whole change
    touched: int  # rows that changed

    def left(self, rank: int) -> torch.Tensor:
        """Returns the left singular vectors: rows × rank, orthonormal columns."""
        return self.reduced @ (self.turn[:, :rank] / torch.from_numpy(self.values[:rank]).float())

    def right(self, rank: int) -> torch.Tensor:
        """Returns the right singular vectors: rank × columns, orthonormal rows."""
        return self.turn[:, :rank].T @ self.basis.T

    def energy_left(self, rank: int) -> float:
        """Returns the energy that components beyond this rank have."""
        return max(self.energy - float(np.square(self.values[:rank]).sum()), 0.0)


def changes(data: np.ndarray, prediction: np.ndarray, dtype: str, length: int, level: int) -> list[Factors]:
    """Returns low-rank changes that may bring a base closer to a tensor, to be tried one by one.

    A sample of the rows shows whether any can pay. Beside the sample, at most 2^23 values, memory holds the factors and a few
    bands of rows.

    Args:
        data: bytes of the tensor, a matrix with rows of `length` values.
        prediction: bytes of the base, of the same type and size.
        level: 2 or 3, see `encode_raw`.
    """
    change = Change(data, prediction, dtype, length)
    rows, columns = change.shape
    if min(rows, columns) < LEAST or MOST // columns < LEAST:
        return []
    values = rows * columns
    sample = data.reshape(values, -1)[:: 1 + values // GRID_SAMPLE].reshape(-1)
    with np.errstate(over="ignore"):  # float64 values may be too far apart to be squared
        grid = Grid.of(spacing(as_numbers(sample, dtype), dtype))
    start = glance(change, grid, MAX_RANK_OF_ALL[level]) if math.isfinite(grid.mean) else None
    components = None if start is None else decompose(change, start, PASSES[level])
    if components is None:
        return []
    best = best_rank(components.values, components.energy, (components.touched, columns), grid)
    if best == 0:
        return []
    count = components.touched * columns
    is_all = components.energy_left(best) < max(4 * grid.mean * count, NEARLY_ALL * components.energy)
    results: list[Factors] = []
    for rank, halvings in search(best if is_all else min(best, MAX_RANK), is_all, dtype, level):
        root = torch.from_numpy(np.sqrt(components.values[:rank])).float()
        left, right = components.left(rank) * root, components.right(rank) * root[:, None]
        rest = components.energy_left(rank) / count + grid.mean
        if is_all:
            left, right = fit(change, left, right, level)
            rest = grid.mean
        if is_all and level == 2 and WIDTHS[dtype] == 2:
            halvings = [best_step(change, left, right, rest, halvings)]
        quantized = [quantize(left, right, rest, finer) for finer in halvings]
        # Those that would be finer than exact sums allow are the same.
        results += {factors.exponent: factors for factors in quantized if factors is not None}.values()
    return results


def glance(change: Change, grid: Grid, most: int) -> torch.Tensor | None:
    """Returns the leading right singular vectors of a sample of rows (columns × width) with a few more for good measure, or
    None if the sample shows that no component pays.

    Args:
        grid: the rounding of the tensor's values to their type.
        most: limit of the rank.
    """
    rows, columns = change.shape
    width = FEW
    while True:
        width = min(width, most)
        part, energies = change.rows(change.sample(min(ROWS_PER_COMPONENT * (width + OVERSAMPLING) * columns, MOST)))
        sampled, touched, energy = len(part), int(np.count_nonzero(energies)), float(energies.sum())
        scale = rows / sampled
        shape = round(touched * scale), columns
        if not 0 < energy < MOST_ENERGY:
            return None
        noise = torch.randn(columns, min(width + OVERSAMPLING, touched), generator=torch.Generator().manual_seed(0))
        basis = torch.linalg.qr(part.T @ (part @ noise)).Q
        reduced = (part @ basis).double()
        values, turn = singular(reduced.T @ reduced)
        basis = basis @ turn
        found = whole_values(values, energy, touched, shape)
        rank = best_rank(found, energy * scale, shape, grid)
        if rank == 0:
            return None
        if rank + OVERSAMPLING // 2 < basis.shape[1] or width == most or sampled == rows and basis.shape[1] == touched:
            return basis[:, : rank + OVERSAMPLING]
        width *= 4


def whole_values(values: np.ndarray, energy: float, sampled: int, shape: tuple[int, int]) -> np.ndarray:
    """Estimates the leading singular values of a matrix from those of a sample of its rows, as far as these stand out of white
    noise (Benaych-Georges, Nadakuditi, arXiv 1103.2221).

    Args:
        energy: sum of the squares of the sample.
        sampled: number of rows in the sample.
        shape: of the whole matrix.
    """
    rows, columns = shape
    freedom = max((sampled - len(values)) * (columns - len(values)), 1)
    noise = max(energy - float(np.square(values).sum()), 1e-9 * energy) / freedom
    half = (np.square(values) / noise - sampled - columns) / 2
    root = np.square(half) - sampled * columns
    signal = (half + np.sqrt(root.clip(min=0)))[(half > 0) & (root > 0)] * rows / sampled
    return np.sqrt(noise * (signal + rows) * (signal + columns) / signal)


def singular(gram: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Returns the singular values of a matrix, falling, and its right singular vectors (float32), from its Gram matrix. Tiny
    ones are left out."""
    squares, turn = torch.linalg.eigh(gram)
    values = squares.clamp(min=0).sqrt().flip(0).numpy()
    values = values[values > 1e-6 * values[0]]
    return values, turn.flip(1)[:, : len(values)].float()


def fit(change: Change, left: torch.Tensor, right: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fits a product of the same rank to a change by weighted least squares, alternating between rows and columns. The weight
    of a value follows from its spacing, which limits how exactly the value is known.

    The columns' factors are fitted on a sample of the rows. All rows then improve them.
    """
    (columns, rank), precision = right.T.shape, torch.float32 if WIDTHS[change.dtype] == 2 else torch.float64
    left, right = left.to(precision), right.to(precision)
    rows = change.sample(min(max(SAMPLE[level], ROWS_PER_FACTOR * rank * columns), MOST))
    numbers = change.numbers(rows)
    largest = float(np.abs(numbers, where=np.isfinite(numbers), out=np.zeros_like(numbers)).max())
    top = max(largest, 2.0 ** LEAST_EXPONENT[change.dtype])
    part, weights, some = change.rows(rows)[0], weigh(numbers, change.dtype, top), left[torch.from_numpy(rows)]
    del numbers
    step = max(1, BAND // columns)
    sampled, whole = ([slice(at, at + step) for at in range(0, count, step)] for count in (len(rows), change.shape[0]))

    def of_sample() -> Iterator[Weighted]:
        return (Weighted(part[band], weights[band], some[band]) for band in sampled)

    def of_all() -> Iterator[Weighted]:
        return (Weighted(change.rows(band)[0], weigh(change.numbers(band), change.dtype, top), left[band]) for band in whole)

    for _ in range(ROUNDS[level]):
        fit_rows(of_sample(), right, STEPS)
        right = fit_columns(of_sample, right)
    if len(rows) < change.shape[0]:
        del part, weights, some
        fit_rows(of_all(), right, STEPS)
        right = fit_columns(of_all, right)
    fit_rows(of_all(), right, LAST_STEPS)
    return left, right


class Weighted(NamedTuple):
    """A band of rows of a change."""

    change: torch.Tensor  # rows × columns
    weights: torch.Tensor  # rows × columns
    left: torch.Tensor  # rows × rank: their factors


def fit_rows(bands: Iterator[Weighted], right: torch.Tensor, steps: int) -> None:
    """Brings the factors of rows, in place, nearer to the least weighted error."""
    gram = right @ right.T
    for change, weights, left in bands:
        check_awaited()
        weights = weights.to(left.dtype)

        def descent(direction: torch.Tensor, weights: torch.Tensor = weights) -> torch.Tensor:
            return (direction @ right).mul_(weights) @ right.T

        rest = (change - left @ right).mul_(weights) @ right.T
        left.copy_(descend(rest, descent, left, weights.mean(1, keepdim=True), gram, steps))


def fit_columns(bands: Callable[[], Iterator[Weighted]], right: torch.Tensor) -> torch.Tensor:
    """Returns factors of the columns (rank × columns) that are nearer to the least weighted error than `right`."""

    def descent(direction: torch.Tensor) -> torch.Tensor:
        image = torch.zeros_like(direction)
        for _, weights, left in bands():
            check_awaited()
            image += (left @ direction.T).mul_(weights).T @ left
        return image

    rest, total, gram = torch.zeros_like(right.T), torch.zeros_like(right[0]), right.new_zeros(len(right), len(right))
    count = 0
    for change, weights, left in bands():
        check_awaited()
        rest += (change - left @ right).mul_(weights).T @ left
        total += weights.sum(0)
        count += len(left)
        gram += left.T @ left
    return descend(rest, descent, right.T, (total / count)[:, None], gram, STEPS).T


def descend(
    rest: torch.Tensor,
    descent: Callable[[torch.Tensor], torch.Tensor],
    solution: torch.Tensor,
    scale: torch.Tensor,
    gram: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """Runs conjugate gradients for independent problems of weighted least squares, one for each row of the solution.

    The problems are preconditioned as if the weights of each were equal.

    Args:
        rest: the negative gradient at the solution.
        descent: returns how much of the gradient a step takes away.
        solution: to start from.
        scale: mean weight of each problem.
        gram: of the factors, without weights.
        steps: at most as many as the rank are of use.
    """
    inverse = torch.linalg.pinv(gram.double(), hermitian=True).to(rest.dtype)
    tiny = torch.finfo(rest.dtype).tiny
    direction = steepest = rest @ inverse / scale
    energy = (rest * steepest).sum(1, keepdim=True)
    for step in range(min(steps, len(gram)), 0, -1):
        image = descent(direction)
        length = energy / (direction * image).sum(1, keepdim=True).clamp(min=tiny)
        solution = solution + length * direction
        if step > 1:
            rest = rest - length * image
            steepest = rest @ inverse / scale
            before, energy = energy, (rest * steepest).sum(1, keepdim=True)
            direction = steepest + energy / before.clamp(min=tiny) * direction
    return solution


def weigh(numbers: np.ndarray, dtype: str, top: float) -> torch.Tensor:
    """Returns the weights of values whose spacing limits how exactly they are known: 1 for those like `top`, more for smaller
    ones (float32)."""
    least = max(2.0 ** LEAST_EXPONENT[dtype], top * 2.0**-FINEST)
    magnitudes = torch.from_numpy(np.abs(numbers)).nan_to_num_(top, top).clamp_(least, top)
    # Without its mantissa, a value is its spacing times a constant.
    mask = -1 << (52 if dtype == "F64" else 23)
    powers = magnitudes.view(torch.int64 if dtype == "F64" else torch.int32).bitwise_and_(mask).view(magnitudes.dtype)
    return (top / powers).square_().float()


def search(rank: int, is_all: bool, dtype: str, level: int) -> list[tuple[int, Sequence[int]]]:
    """Returns the ranks to try, each with the step sizes to try: how often the squared step of the factors is halved, starting
    from the best one for a rest of white noise.

    A change that is completely of low rank leaves hardly any rest. Each value is then predicted exactly or is off by one step,
    and finer factors make the latter rarer.
    """
    if is_all and level == 2:
        return [(rank, range(1, 10, 2) if WIDTHS[dtype] == 2 else [4, 7])]
    if is_all:  # fitted with weights, more components may pay than it seemed
        return [(near, range(0, 14, 2)) for near in (rank, rank * 3 // 2 + 1)]
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


def decompose(change: Change, start: torch.Tensor, passes: int) -> Components | None:
    """Computes the leading singular components by power iterations over bands of rows, from some vectors near the right
    singular ones (columns × width). Returns None if squares of the change are not finite."""
    for _ in range(passes):
        image = torch.zeros_like(start)
        for band in change.bands():
            part = change.rows(band)[0]
            image += part.T @ (part @ start)
        if not image.isfinite().all():
            return None
        start = torch.linalg.qr(image).Q
    width = start.shape[1]
    reduced, gram = torch.empty(change.shape[0], width), torch.zeros(width, width, dtype=torch.float64)
    energy, touched = 0.0, 0
    for band in change.bands():
        part, energies = change.rows(band)
        near = reduced[band] = part @ start
        gram += near.double().T @ near.double()
        energy, touched = energy + float(energies.sum()), touched + int(np.count_nonzero(energies))
    if not energy < MOST_ENERGY:
        return None
    values, turn = singular(gram)
    return Components(values, start, reduced, turn, energy, touched)


def best_rank(values: np.ndarray, energy: float, shape: tuple[int, int], grid: Grid) -> int:
    """Returns the rank at which factors and rest together take the fewest bits, if the rest is white noise; 0 if none pays: if
    it does not save a share of LEAST_SAVED.

    Args:
        values: the leading singular values of the change, falling.
        energy: sum of the squares of the whole change.
        shape: of the change.
        grid: the rounding of the tensor's values to their type.
    """
    rows, columns = shape
    count = rows * columns
    if not len(values) or not count:
        return 0
    ranks = np.arange(1, len(values) + 1)
    rest = np.maximum(energy - np.square(values).cumsum(), 0) / count
    share, square = _steps(values.cumsum(), ranks, rest + grid.mean, rows, columns)
    bits = count * (grid.bits(rest) - np.log2(1 - share) / 2)
    for length in (rows, columns):
        per_factor = np.log2(values[:, None] / (length * square[None, :])) / 2 + GAUSSIAN_BITS
        bits += length * np.triu(np.maximum(per_factor, 1)).sum(0)
    bits[share >= 0.5] = np.inf
    best = int(bits.argmin())
    most = count * grid.bits(energy / count)
    return best + 1 if most - bits[best] > LEAST_SAVED * (most - count * grid.bits(0.0)) else 0


def best_step(change: Change, left: torch.Tensor, right: torch.Tensor, rest: float, halvings: Sequence[int]) -> int:
    """Returns the step size that takes the fewest bits, of those that `search` gives. They are compared by how many values the
    rounded factors do not predict in a sample of rows."""
    rows = change.sample(STEP_SAMPLE)
    values, base = change.pair(rows)
    some = left[torch.from_numpy(rows)]
    bits = []
    for finer in halvings:
        factors = quantize(some, right, rest, finer, len(left))
        if factors is None:
            break
        product = torch.from_numpy(factors.rows).float() @ torch.from_numpy(factors.columns).float()
        missed = float(((base + product * 2.0**-factors.exponent).to(values.dtype) != values).double().mean())
        # A value that is missed takes a bit more for its sign.
        likely = min(missed, 0.5)
        entropy = missed - sum(share * math.log2(share) for share in (likely, 1 - likely) if share)
        bits.append(len(left) * right.shape[1] * entropy + finer / 2 * (left.numel() + right.numel()))
    return halvings[int(np.argmin(bits))] if bits else halvings[0]


def quantize(left: torch.Tensor, right: torch.Tensor, rest: float, finer: int = 0, whole: int = 0) -> Factors | None:
    """Rounds the factors of a product (rows × rank times rank × columns) to integers, with the step that takes the fewest bits.
    Returns None if no step gives exact sums.

    Args:
        rest: variance of what the product leaves of a value, including the rounding of its type.
        finer: number of times that the squared step is halved.
        whole: number of rows of the matrix, if these are a sample.
    """
    left, right = left.double(), right.double()
    (rows, rank), columns = left.shape, right.shape[1]
    most = rank * float(left.abs().max()) * float(right.abs().max())
    square = float(_steps(float(left.square().sum()) * (whole or rows) / rows, rank, rest, whole or rows, columns)[1])
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
