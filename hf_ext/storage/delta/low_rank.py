"""Finds the low-rank part of a matrix's change, as a product of two matrices of small integers.

The change of a full fine-tune is partly of low rank; that of a merged LoRA is completely so. Removing this part from the
difference costs the bits of the factors and saves bits of every value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from hf_ext.storage.delta.change import Change
from hf_ext.storage.delta.payload import Factors
from hf_ext.storage.delta.weighted_fit import fit
from hf_ext.storage.native import MANTISSA, WIDTHS, as_numbers
from hf_ext.storage.subspace import Components, gram, leading, random_directions, singular

MAX_RANK = 64  # each component adds a product to the decoding of every value
MAX_RANK_OF_ALL = {2: MAX_RANK, 3: 256}  # by level, for changes that are completely of low rank
MARGIN = 4  # components that a sample must show in addition to those that pay
LEAST = 64  # smaller numbers of rows or columns are not worth it
FEW, GROWTH = 16, 3  # components that the first look at a sample of the rows shows, and factor of the next looks
ROWS_PER_COMPONENT = 4  # of that sample
MAX_EXPONENT = 100
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


def changes(data: np.ndarray, base_data: np.ndarray, dtype: str, length: int, level: int, threads: int = 1) -> list[Factors]:
    """Returns low-rank changes that may bring a base closer to a tensor, to be tried one by one, at level 2 or 3 of
    `encode_raw`. Both are given as bytes of one type and size, the tensor with rows of `length` values. A sample of the rows
    shows whether any change can pay. Memory: the sample (at most 2^23 values), the factors and a few bands of rows. The result
    does not depend on the number of threads."""
    if MOST // length < LEAST:
        return []
    change, spacings = Change(data, base_data, dtype, length), spacings_of(data, dtype)
    with np.errstate(over="ignore"):  # float64 values may be too far apart to be squared
        grid = Grid.of(spacings)
    part = low_rank_part(change, grid, MAX_RANK_OF_ALL[level], PASSES[level], threads)
    if part is None:
        return []
    results: list[Factors] = []
    noise = grid.mean * part.size
    is_all = part.energy_left(part.rank) < max(4 * noise, NEARLY_ALL * change.energy)
    for rank, halvings in search(part.rank if is_all else min(part.rank, MAX_RANK), is_all, dtype, level):
        left, right = part.components.factors(rank)
        rest = part.energy_left(rank) / part.size + grid.mean
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
    spacings = np.maximum(spacings_of(change.values.reshape(-1), change.dtype), math.log2(step))
    grid = Grid.of(spacings)._replace(least_gain=0)
    part = low_rank_part(change, grid, MAX_RANK, PASSES[3], threads)
    if part is None:
        return None
    left, right = part.components.factors(part.rank)
    exponent = step_exponent(left, right, part.energy_left(part.rank) / part.size + grid.mean)
    plain, stretched = quantize(left, right, exponent), quantize(left * gain, right, exponent)
    return None if plain is None or stretched is None else (plain, stretched)


class Part(NamedTuple):
    """The low-rank part of a change that pays: the first `rank` of its components."""

    components: Components
    rank: int
    energy: float  # sum of the squares of the whole change
    size: int  # number of values in rows that changed

    def energy_left(self, rank: int) -> float:
        """Returns the energy of the change beyond its first components."""
        return max(self.energy - self.components.energy(rank), 0.0)


def low_rank_part(change: Change, grid: Grid, most: int, passes: int, threads: int) -> Part | None:
    """Returns the low-rank part of a change that pays, of rank `most` at most, from a glance at a sample of rows and `passes`
    power iterations over the whole matrix; None if no component pays. `grid` is the rounding of the tensor's values to their
    type."""
    start = glance(change, grid, most) if min(change.shape) >= LEAST and math.isfinite(grid.mean) else None
    if start is None:
        return None
    components = leading(partial(change.product, threads=threads), start, passes + 1)
    if not change.energy < MOST_ENERGY:
        return None
    touched, columns = int(np.count_nonzero(change.energies)), change.shape[1]
    rank = min(best_rank(components.values, change.energy, (touched, columns), grid), most)
    return Part(components, rank, change.energy, touched * columns) if rank else None


def glance(change: Change, grid: Grid, most: int) -> torch.Tensor | None:
    """Returns the leading right singular vectors of a sample of rows (columns × width), at least MARGIN more than pay, or None
    if the sample shows that no component pays. The arguments are those of `low_rank_part`."""
    rows, columns = change.shape
    width = FEW
    while True:
        part, energies = change.rows(change.sample(min(ROWS_PER_COMPONENT * width * columns, MOST)))
        sampled, touched, energy = len(part), int(np.count_nonzero(energies)), float(energies.sum())
        scale = rows / sampled
        shape = round(touched * scale), columns
        if not 0 < energy < MOST_ENERGY:
            return None
        basis = torch.linalg.qr(part.T @ (part @ random_directions(columns, min(width, touched)))).Q
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


def search(rank: int, is_all: bool, dtype: str, level: int) -> list[tuple[int, Sequence[int]]]:
    """Returns the ranks to try, each with its step sizes: the numbers of times to halve the squared step of the factors,
    starting from the best step for a rest of white noise. A change that is completely of low rank leaves almost no rest. Each
    predicted value is then exact or off by one step; finer factors make errors rarer."""
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


def best_rank(values: np.ndarray, energy: float, shape: tuple[int, int], grid: Grid) -> int:
    """Returns the rank at which factors and rest together take the fewest bits, given the leading singular values of the change
    and its energy, if the rest is white noise and each component counts as `grid.least_gain` bits more for each value, because
    it takes time. Returns 0 if no rank saves a share of LEAST_SAVED."""
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
    """Returns the exponent of `quantize` that takes the fewest bits, given the variance of a value's rest after the product,
    including the rounding of its type."""
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
