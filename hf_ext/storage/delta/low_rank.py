"""Finds the low-rank part of a matrix's change, as a product of two matrices of small integers.

The change of a full fine-tune is partly of low rank; that of a merged LoRA is completely so. Removing this part from the
difference costs the bits of the factors and saves bits of every value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_ext.storage.delta.change import Change
from hf_ext.storage.delta.payload import Factors
from hf_ext.storage.delta.weighted_fit import fit
from hf_ext.storage.native import MANTISSA, WIDTHS, as_numbers
from hf_ext.storage.prefetch import in_threads

MAX_RANK = 64  # each component adds a product to the decoding of every value
MAX_RANK_OF_ALL = {2: MAX_RANK, 3: 256}  # by level, for changes that are completely of low rank
MARGIN = 4  # components that a sample must show in addition to those that pay
LEAST = 64  # smaller numbers of rows or columns are not worth it
FEW, GROWTH = 16, 3  # components that the first look at a sample of the rows shows, and factor of the next looks
ROWS_PER_COMPONENT = 4  # of that sample
MAX_EXPONENT = 100
GROUPS = 16  # of bands of rows, each with a sum of its own
PASSES = {2: 0, 3: 2}  # by level: power iterations over the whole matrix
MOST = 1 << 23  # values of the largest sample of rows
LEAST_GAIN = 0.004  # bits of each value that a component must save to be worth the time
TINY = 1e-300  # replaces 0 in divisors
LEAST_SAVED = 0.01  # of the bits that the whole change takes
MOST_ENERGY = 1e30  # of a change whose squares single precision can add up
NEARLY_ALL = 1e-4  # a share of the energy below which single precision does not resolve the rest
EXACT = 2**53  # up to here, double precision represents every sum of products
STEP_SAMPLE = 1 << 14  # values on which steps of the factors are compared
GRID_SAMPLE = 4096  # values from which the spacing of a tensor's values is estimated
GAUSSIAN_BITS = 0.5 * math.log2(2 * math.pi * math.e)  # entropy of a Gaussian number with a standard deviation of one step

#: Exponent of the smallest normal number of each float type.
LEAST_EXPONENT = {"F32": -126, "F16": -14, "BF16": -126, "F64": -1022}


class Grid(NamedTuple):
    """The rounding of a tensor's values to their type."""

    variances: np.ndarray  # of the rounding errors of values of different magnitudes
    shares: np.ndarray  # of all values
    least_gain: float = LEAST_GAIN

    @classmethod
    def of(cls, spacings: np.ndarray) -> Grid:
        """Describes the rounding of values with these exponents of their spacings."""
        exponents, counts = np.unique(spacings, return_counts=True)
        return cls(np.exp2(2.0 * exponents) / 12, counts / len(spacings))

    @property
    def mean(self) -> float:
        return float(self.variances @ self.shares)

    def bits(self, variance):
        """Returns the bits that a value takes, up to a constant, if it is predicted with an error of this variance. The
        variance is a number or an array."""
        return np.log2(np.add.outer(variance, self.variances) + TINY) @ self.shares / 2


class Components(NamedTuple):
    """The leading singular components of a change. They stay factored until the rank is known."""

    values: np.ndarray
    back: torch.Tensor  # columns × width: the transposed change times `images`
    images: torch.Tensor  # rows × width: the change times some vectors
    turn: torch.Tensor  # width × components: the left singular vectors as combinations of the images
    energy: float  # sum of the squares of the whole change
    touched: int  # rows that changed

    def left(self, rank: int) -> torch.Tensor:
        """Returns the left singular vectors: rows × rank, orthonormal columns."""
        return self.images @ self.turn[:, :rank]

    def right(self, rank: int) -> torch.Tensor:
        """Returns the right singular vectors: rank × columns, orthonormal rows."""
        return (self.back @ (self.turn[:, :rank] / torch.from_numpy(self.values[:rank]).float())).T

    def energy_left(self, rank: int) -> float:
        """Returns the energy of the components beyond this rank."""
        return max(self.energy - float(np.square(self.values[:rank]).sum()), 0.0)


def changes(data: np.ndarray, prediction: np.ndarray, dtype: str, length: int, level: int, threads: int = 1) -> list[Factors]:
    """Returns low-rank changes that may bring a base closer to a tensor, to be tried one by one.

    A sample of the rows shows whether any change can pay. Memory: the sample (at most 2^23 values), the factors and a few bands
        of rows.

    Args:
        data: bytes of the tensor, a matrix with rows of `length` values.
        prediction: bytes of the base, of the same type and size.
        level: 2 or 3, see `encode_raw`.
        threads: number of threads; the result does not depend on it.
    """
    change = Change(data, prediction, dtype, length)
    rows, columns = change.shape
    if min(rows, columns) < LEAST or MOST // columns < LEAST:
        return []
    spacings = spacings_of(data, dtype)
    with np.errstate(over="ignore"):  # float64 values may be too far apart to be squared
        grid = Grid.of(spacings)
    start = glance(change, grid, MAX_RANK_OF_ALL[level]) if math.isfinite(grid.mean) else None
    components = None if start is None else decompose(change, start, PASSES[level], threads)
    if components is None:
        return []
    best = best_rank(components.values, components.energy, (components.touched, columns), grid)
    if best == 0:
        return []
    count = components.touched * columns
    is_all = components.energy_left(best) < max(4 * grid.mean * count, NEARLY_ALL * components.energy)
    results: list[Factors] = []
    for rank, halvings in search(min(best, MAX_RANK_OF_ALL[level] if is_all else MAX_RANK), is_all, dtype, level):
        root = torch.from_numpy(np.sqrt(components.values[:rank])).float()
        left, right = components.left(rank) * root, components.right(rank) * root[:, None]
        rest = components.energy_left(rank) / count + grid.mean
        if is_all:
            left, right = fit(change, left, right, spacings, level, threads)
            rest = grid.mean
        usual = step_exponent(left, right, rest)
        if is_all and level == 2 and WIDTHS[dtype] == 2:
            halvings = [best_step(change, left, right, usual, halvings)]
        quantized = [quantize(left, right, usual + finer) for finer in halvings]
        # Steps finer than exact sums allow give the same factors.
        results += {factors.exponent: factors for factors in quantized if factors is not None}.values()
    return results


def coarse_change(change: Change, step: float, gain: float, threads: int = 1) -> tuple[Factors, Factors] | None:
    """Returns the low-rank part of a change that pays if values are restored to multiples of `step` only, and `gain` times that
    part; None if none pays."""
    rows, columns = change.shape
    if min(rows, columns) < LEAST:
        return None
    spacings = np.maximum(spacings_of(change.values.reshape(-1), change.dtype), math.log2(step))
    grid = Grid.of(spacings)._replace(least_gain=0)
    start = glance(change, grid, MAX_RANK)
    components = None if start is None else decompose(change, start, PASSES[3], threads)
    if components is None:
        return None
    rank = min(best_rank(components.values, components.energy, (components.touched, columns), grid), MAX_RANK)
    if rank == 0:
        return None
    root = torch.from_numpy(np.sqrt(components.values[:rank])).float()
    left, right = components.left(rank) * root, components.right(rank) * root[:, None]
    rest = components.energy_left(rank) / (components.touched * columns)
    exponent = step_exponent(left, right, rest + grid.mean)
    plain, stretched = quantize(left, right, exponent), quantize(left * gain, right, exponent)
    return None if plain is None or stretched is None else (plain, stretched)


def glance(change: Change, grid: Grid, most: int) -> torch.Tensor | None:
    """Returns the leading right singular vectors of a sample of rows (columns × width), at least MARGIN more than pay, or None
    if the sample shows that no component pays.

    Args:
        grid: the rounding of the tensor's values to their type.
        most: limit of the rank.
    """
    rows, columns = change.shape
    width = FEW
    while True:
        part, energies = change.rows(change.sample(min(ROWS_PER_COMPONENT * width * columns, MOST)))
        sampled, touched, energy = len(part), int(np.count_nonzero(energies)), float(energies.sum())
        scale = rows / sampled
        shape = round(touched * scale), columns
        if not 0 < energy < MOST_ENERGY:
            return None
        noise = torch.randn(columns, min(width, touched), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        basis = torch.linalg.qr(part.T @ (part @ noise)).Q
        values, turn = singular(gram(part @ basis))
        rank = best_rank(whole_values(values, energy, touched, shape), energy * scale, shape, grid)
        if rank == 0:
            return None
        if rank + MARGIN < basis.shape[1] or width > most or sampled == rows and basis.shape[1] == touched:
            return basis @ turn[:, : rank + max(rank // 4, MARGIN)]
        width = min(GROWTH * width, max(most + 2 * MARGIN, width + 1))


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
    """Returns the singular values of a matrix, in decreasing order, and its right singular vectors (float32), from its Gram
    matrix. Leaves out tiny ones."""
    squares, turn = torch.linalg.eigh(gram)
    values = squares.clamp(min=0).sqrt().flip(0).numpy()
    values = values[values > 1e-6 * values[0]]
    return values, turn.flip(1)[:, : len(values)].float()


def search(rank: int, is_all: bool, dtype: str, level: int) -> list[tuple[int, Sequence[int]]]:
    """Returns the ranks to try, each with its step sizes: the numbers of times to halve the squared step of the factors,
    starting from the best step for a rest of white noise.

    A change that is completely of low rank leaves almost no rest. Each predicted value is then exact or off by one step; finer
    factors make errors rarer.
    """
    if is_all and level == 2:
        return [(rank, range(1, 10, 2) if WIDTHS[dtype] == 2 else [4, 7])]
    if is_all:  # a weighted fit may make more components pay
        return [(near, range(1, 14, 2)) for near in (rank, rank * 3 // 2 + 1)]
    if level == 2:
        return [(rank, [0])]
    return [(near, [-1, 0, 1]) for near in sorted({rank * 3 // 4, rank, rank * 5 // 4}) if near]


def spacings_of(data: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the exponents of the spacings of a sample of values, given as bytes."""
    values = data.reshape(-1, WIDTHS[dtype])
    return spacing(as_numbers(values[:: 1 + len(values) // GRID_SAMPLE].reshape(-1), dtype), dtype)


def spacing(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns, for each value, the exponent (int16) of the distance to the next value of its type. Values that are not finite
    get the largest exponent of the others."""
    finite = np.isfinite(values)
    magnitude = np.abs(np.where(finite, values, 0))
    magnitude[~finite] = magnitude.max(initial=0)
    return (np.frexp(np.maximum(magnitude, 2.0 ** LEAST_EXPONENT[dtype]))[1] - 1 - MANTISSA[dtype]).astype(np.int16)


def decompose(change: Change, start: torch.Tensor, passes: int, threads: int = 1) -> Components | None:
    """Computes the leading singular components from vectors near the right singular ones (columns × width), by power iterations
    over bands of rows. Returns None if squares of the change are not finite."""
    bands, images = list(change.bands()), torch.empty(start.shape[1], change.shape[0], dtype=torch.float32)

    def multiply(group: int) -> tuple[torch.Tensor, float, int]:
        back, energy, touched = torch.zeros(start.shape[::-1], dtype=torch.float32), 0.0, 0
        for band in bands[group::GROUPS]:
            part, energies = change.rows(band)
            images[:, band] = start.T @ part.T  # much faster than part @ start if `start` is narrow
            back += images[:, band] @ part
            energy, touched = energy + float(energies.sum()), touched + int(np.count_nonzero(energies))
        return back, energy, touched

    for i in range(passes + 1):
        backs, energies, counts = zip(*in_threads(multiply, min(GROUPS, len(bands)), threads))
        energy, back = sum(energies), sum(backs).T
        if not energy < MOST_ENERGY:
            return None
        if i < passes:
            start = torch.linalg.qr(back).Q
    images = images.T
    lengths, turn = singular(gram(images))
    turn = turn.double() / torch.from_numpy(lengths)  # makes the images orthonormal
    values, again = singular(turn.T @ gram(back) @ turn)
    return Components(values, back, images, (turn @ again.double()).float(), energy, sum(counts))


def gram(vectors: torch.Tensor) -> torch.Tensor:
    """Returns the products of all pairs of columns (float64)."""
    width = vectors.shape[1]
    products = torch.zeros(width, width, dtype=torch.float64)
    for part in vectors.split(1 << 14):
        products.addmm_(part.T.double(), part.double())
    return products


def best_rank(values: np.ndarray, energy: float, shape: tuple[int, int], grid: Grid) -> int:
    """Returns the rank at which factors and rest together take the fewest bits, if the rest is white noise and each component
    counts as `grid.least_gain` bits more for each value, because it takes time. Returns 0 if no rank saves a share of
    LEAST_SAVED.

    Args:
        values: the leading singular values of the change, in decreasing order.
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
    best = int((bits + grid.least_gain * count * ranks).argmin())
    most = count * grid.bits(energy / count)
    return best + 1 if most - bits[best] > LEAST_SAVED * (most - count * grid.bits(0.0)) else 0


def best_step(change: Change, left: torch.Tensor, right: torch.Tensor, usual: int, halvings: Sequence[int]) -> int:
    """Returns the step size of `search` that takes the fewest bits. Compares step sizes by the number of values in a sample of
    rows that the rounded factors do not predict."""
    rows = change.sample(STEP_SAMPLE)
    values, base = change.pair(rows)
    sample, bits = left[torch.from_numpy(rows)], []
    for finer in halvings:
        unit = 2.0 ** ((usual + finer) / 2)
        product = (sample * unit).round_() @ (right * unit).round_()
        missed = float(((base + product.mul_(unit**-2)).to(values.dtype) != values).float().mean())
        # A mispredicted value takes one more bit for its sign.
        likely = min(missed, 0.5)
        entropy = missed - sum(share * math.log2(share) for share in (likely, 1 - likely) if share)
        bits.append(len(left) * right.shape[1] * entropy + finer / 2 * (left.numel() + right.numel()))
        if bits[-1] > min(bits):
            break
    return halvings[int(np.argmin(bits))]


def quantize(left: torch.Tensor, right: torch.Tensor, exponent: int) -> Factors | None:
    """Rounds the factors of a product (rows × rank times rank × columns) to integers, with the step 2^(-exponent / 2), or a
    larger one if the sums would not be exact. Returns None if no step gives exact sums."""
    most = len(right) * float(left.abs().max()) * float(right.abs().max())
    if not 0 < most < math.inf:
        return None
    exponent = min(exponent, math.floor(math.log2(EXACT / most)) - 1)
    if abs(exponent) > MAX_EXPONENT:
        return None
    unit = 2 ** (exponent / 2)
    left, right = ((factors.double() * unit).round_().int().contiguous() for factors in (left, right))
    return Factors(left.numpy(), right.numpy(), exponent)


def step_exponent(left: torch.Tensor, right: torch.Tensor, rest: float) -> int:
    """Returns the exponent of `quantize` that takes the fewest bits.

    Args:
        rest: variance of a value's rest after the product, including the rounding of its type.
    """
    energy, (rows, rank), columns = float(left.double().square().sum()), left.shape, right.shape[1]
    square = float(_steps(energy, rank, rest, rows, columns)[1])
    limit = MAX_EXPONENT + 1
    return round(-math.log2(square)) if 0 < square < math.inf else limit


def _steps(values, rank, rest, rows: int, columns: int):
    """Returns the number of factors per value, and the squared step of the factors that takes the fewest bits. `values`, `rank`
    and `rest` are numbers, or arrays with an entry for each rank.

    Rounding the factors adds x · rest to the variance of a value, which costs the value log2(1 + x) / 2 bits. Halving the step
    costs each factor one bit. The sum is least where x / (1 + x) is the share.
    """
    share = np.minimum(rank * (rows + columns) / (rows * columns), 0.5)
    return share, 12 * rest * share / (1 - share) / (values * (1 / rows + 1 / columns))
