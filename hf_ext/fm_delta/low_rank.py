"""What a fine-tune changed, as a product of two matrices of small integers and a rest.

The changes of a full fine-tune are partly of low rank, those of a merged LoRA wholly. Taken out of the difference, such a part
costs its factors and saves bits of every value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

MAX_RANK = 48
OVERSAMPLING = 8
LEAST = 64  # rows and columns of a matrix that is worth it
MAX_EXPONENT = 100
NEARLY_ALL = 1e-4  # a share of the energy so small that single precision does not tell what is left
EXACT = 2**53  # up to here double precision holds every sum of products
GAUSSIAN_BITS = 0.5 * math.log2(2 * math.pi * math.e)  # of a Gaussian number whose standard deviation is one step


class Factors(NamedTuple):
    """The change rows · columns · 2^-exponent, as the C++ extension takes it."""

    rows: np.ndarray  # int32, rows × rank
    columns: np.ndarray  # int32, rank × columns
    exponent: int


class Components(NamedTuple):
    """The leading singular components of a change, whose matrices stand factored until it is known how many are wanted."""

    values: np.ndarray
    basis: torch.Tensor  # rows × width, orthonormal columns
    reduced: torch.Tensor  # width × columns: the change in this basis
    turn: torch.Tensor  # width × components, orthonormal columns: the components in this basis
    energy: float  # sum of the squares of the whole change

    @property
    def lengths(self) -> tuple[int, int]:
        return self.basis.shape[0], self.reduced.shape[1]

    def left(self, rank: int) -> torch.Tensor:
        """rows × rank, orthonormal columns."""
        return self.basis @ self.turn[:, :rank]

    def right(self, rank: int) -> torch.Tensor:
        """rank × columns, orthonormal rows."""
        return (self.turn[:, :rank].T @ self.reduced) / torch.from_numpy(self.values[:rank, None]).float()

    def energy_left(self, rank: int) -> float:
        return max(self.energy - float(np.square(self.values[:rank]).sum()), 0.0)


def candidates(
    change: np.ndarray, energies: np.ndarray, grid: float, spacing: Callable[[], np.ndarray], level: int
) -> list[Factors]:
    """Low-rank changes of a base that may make its difference from a tensor cheaper, to be tried one by one.

    Args:
        change: float32, rows × columns, finite.
        energies: of each row the sum of its squares.
        grid: mean variance of the rounding of the tensor's values to their type.
        spacing: gives the distance of each value of the tensor to the next of its type.
        level: see `encode_raw`.
    """
    touched = np.flatnonzero(energies)
    if min(change.shape) < LEAST or len(touched) < LEAST or not np.isfinite([grid, energies.sum()]).all():
        return []
    rows = slice(None) if len(touched) == len(change) else touched
    part = torch.from_numpy(change[rows])
    components = decompose(part, float(energies.sum()), MAX_RANK, level - 1)
    rank = best_rank(components, grid)
    wholly = components.energy_left(rank) < max(4 * grid * part.numel(), NEARLY_ALL * components.energy)
    found = []
    for some, finer in search(rank, wholly, level):
        root = torch.from_numpy(np.sqrt(components.values[:some]))
        left, right = components.left(some) * root, components.right(some) * root[:, None]
        rest = components.energy_left(some) / part.numel() + grid
        if wholly:
            left, right = fit(part.double(), torch.from_numpy(spacing()[rows]), left, right)
            rest = grid
        factors = quantise(left, right, rest, finer)
        if factors is not None:
            whole = np.zeros((len(change), factors.rows.shape[1]), np.int32)
            whole[rows] = factors.rows
            found.append(factors._replace(rows=whole))
    return found


def fit(
    change: torch.Tensor, spacing: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the same rank that is nearest to a change (float64) of which each value is known as exactly as its spacing
    (float64) allows: weighted least squares, of the rows and of the columns in turn."""
    most = spacing.max()
    weights = (most / spacing.clamp(min=most / 2**12)).square()
    left, right = left.double(), right.double()
    for _ in range(2):
        left = solve(weights, change, right)
        right = solve(weights.T, change.T, left.T).T
    return left, right


def solve(weights: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """For each row of targets (rows × columns) what times the factors (rank × columns) comes nearest."""
    rank, columns = factors.shape
    products = (factors[:, None] * factors[None]).reshape(rank * rank, columns)
    normal = (weights @ products.T).reshape(-1, rank, rank)
    normal += 1e-12 * normal.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(rank, dtype=normal.dtype)
    return torch.linalg.solve(normal, (weights * targets) @ factors.T)


def search(rank: int, wholly: bool, level: int) -> list[tuple[int, int]]:
    """Ranks, and how much finer the factors' steps are than suits a rest of white noise. A change that is wholly of low rank
    leaves hardly any: there each value is either predicted exactly or a step beside, more rarely with finer factors."""
    ranks = [rank] if level == 2 or wholly else sorted({rank * 3 // 4, rank, rank * 5 // 4})
    steps = ([4, 8] if wholly else [0]) if level == 2 else (range(0, 14, 2) if wholly else [-1, 0, 1])
    return [(each, finer) for each in ranks for finer in steps if each]


def spacing(values: np.ndarray, kind: torch.finfo) -> np.ndarray:
    """The distance (float64) of each value to the next of its type; the largest there is where a value is not finite."""
    finite = np.isfinite(values)
    magnitude = np.abs(np.where(finite, values, 0).astype(np.float64))
    magnitude[~finite] = magnitude.max(initial=0)
    return np.ldexp(kind.eps, np.frexp(np.maximum(magnitude, kind.tiny))[1] - 1)


def decompose(change: torch.Tensor, energy: float, rank: int, power_iterations: int = 1) -> Components:
    """Randomised singular value decomposition (Halko, Martinsson, Tropp, arXiv 0909.4061), always with the same draw. One power
    iteration needs no orthogonal basis between its steps: what single precision then loses is smaller than the noise."""
    rows, columns = change.shape
    width = min(rank + OVERSAMPLING, rows, columns)
    basis = change @ torch.randn(columns, width, generator=torch.Generator().manual_seed(0))
    for iteration in range(power_iterations):
        basis = change @ (change.T @ (torch.linalg.qr(basis).Q if iteration else basis))
    basis = torch.linalg.qr(basis).Q
    reduced = basis.T @ change
    wide = reduced.double()
    squares, turn = torch.linalg.eigh(wide @ wide.T)
    values = squares.clamp(min=0).sqrt().flip(0)[:rank]
    values = values[values > 1e-6 * values[0]]
    return Components(values.numpy(), basis, reduced, turn.flip(1)[:, : len(values)].float(), energy)


def best_rank(components: Components, grid: float) -> int:
    """The rank at which factors and rest together take the fewest bits if the rest is white noise; 0 if none pays."""
    rows, columns = components.lengths
    count, values = rows * columns, components.values
    if not len(values):
        return 0
    ranks = np.arange(1, len(values) + 1)
    rest = np.maximum(components.energy - np.square(values).cumsum(), 0) / count + grid
    share, square = _steps(values.cumsum(), ranks, rest, rows, columns)
    bits = count / 2 * (np.log2(rest) - np.log2(1 - share))
    for length in (rows, columns):
        each = np.log2(values[:, None] / (length * square[None, :])) / 2 + GAUSSIAN_BITS
        bits += length * np.triu(np.maximum(each, 1)).sum(0)
    bits[share >= 0.5] = np.inf
    best = int(bits.argmin())
    return best + 1 if bits[best] < count / 2 * math.log2(components.energy / count + grid) else 0


def quantise(left: torch.Tensor, right: torch.Tensor, rest: float, finer: int = 0) -> Factors | None:
    """A product (rows × rank times rank × columns) as integers, in steps as fine as pays and is exact; None where there is no
    such step.

    Args:
        rest: variance of what the product leaves of a value, the rounding of its type included.
        finer: how many times the square of the step is halved.
    """
    left, right = left.double(), right.double()
    (rows, rank), columns = left.shape, right.shape[1]
    most = rank * float(left.abs().max()) * float(right.abs().max())
    _, square = _steps(float(left.square().sum()), rank, rest, rows, columns)
    if not (0 < square < math.inf and 0 < most < math.inf):
        return None
    exponent = min(round(-math.log2(square)) + finer, math.floor(math.log2(EXACT / most)) - 1)
    if abs(exponent) > MAX_EXPONENT:
        return None
    left, right = ((factors * 2 ** (exponent / 2)).round().int().contiguous().numpy() for factors in (left, right))
    return Factors(left, right, exponent)


def _steps(values: np.ndarray, rank: np.ndarray, rest: np.ndarray, rows: int, columns: int):
    """The share of a factor in a value, and the square of the factors' step that takes the fewest bits.

    Rounding the factors adds x · rest to the variance of a value, which costs it log2(1 + x) / 2 bits; half a step costs each
    factor one. Their sum is least where x / (1 + x) is the share.
    """
    share = np.minimum(rank * (rows + columns) / (rows * columns), 0.5)
    return share, 12 * rest * share / (1 - share) / (values * (1 / rows + 1 / columns))
