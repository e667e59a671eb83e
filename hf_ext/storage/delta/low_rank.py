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

MAX_RANK = 64  # each component is one more product for every value that is read
MAX_RANK_OF_ALL = {2: MAX_RANK, 3: 256}  # by level, of changes that are wholly of low rank
OVERSAMPLING = 8
LEAST = 64  # rows and columns of a matrix that is worth it
MAX_EXPONENT = 100
ROUNDS = {2: 3, 3: 6}  # by level, of fitting the factors of such a change
FINEST = 7  # spacings that lie further below the largest count as if they did so: few values would outweigh all others
STEPS = 2  # of conjugate gradients for the rows and for the columns in each of them
BAND = 64  # rows that are fitted at a time, so that all that belongs to them stays in the cache
NEARLY_ALL = 1e-4  # a share of the energy so small that single precision does not tell what is left
TINY = 1e-300  # instead of nothing, to divide by
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
        spacing: gives the exponents of the distances of each value of the tensor to the next of its type.
        level: see `encode_raw`.
    """
    touched = np.flatnonzero(energies)
    if min(change.shape) < LEAST or len(touched) < LEAST or not np.isfinite([grid, energies.sum()]).all():
        return []
    rows = slice(None) if len(touched) == len(change) else touched
    part = torch.from_numpy(change[rows])
    components = decompose(part, float(energies.sum()), MAX_RANK_OF_ALL[level], level - 1)
    rank = best_rank(components, grid)
    if rank == 0:
        return []
    wholly = components.energy_left(rank) < max(4 * grid * part.numel(), NEARLY_ALL * components.energy)
    if not wholly:
        rank = min(rank, MAX_RANK)
    found = []
    for some, halvings in search(rank, wholly, level):
        root = torch.from_numpy(np.sqrt(components.values[:some]))
        left, right = components.left(some) * root, components.right(some) * root[:, None]
        rest = components.energy_left(some) / part.numel() + grid
        if wholly:
            left, right = fit(part, torch.from_numpy(spacing()[rows]), left, right, ROUNDS[level])
            rest = grid
        for finer in halvings:
            factors = quantise(left, right, rest, finer)
            if factors is not None:
                whole = np.zeros((len(change), some), np.int32)
                whole[rows] = factors.rows
                found.append(factors._replace(rows=whole))
    return found


def fit(
    change: torch.Tensor, exponents: torch.Tensor, left: torch.Tensor, right: torch.Tensor, rounds: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the same rank that is nearest to a change of which each value is known as exactly as its spacing
    (2^exponent) allows: weighted least squares, of the rows and of the columns in turn."""
    weights = (2 * (exponents.max() - exponents).clamp(max=FINEST)).float().exp2()
    left, right = left.double(), right.double()
    for _ in range(rounds):
        left = solve(weights, change, left, right)
        right = solve(weights.T, change.T, right.T, left.T).T
    return left, right


def solve(weights: torch.Tensor, targets: torch.Tensor, start: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """For each row of targets (rows × columns) what times the factors (rank × columns) comes nearest: conjugate gradients from
    a start near by (rows × rank), preconditioned as if the weights of a row were all the same."""
    inverse = torch.linalg.pinv(factors @ factors.T, hermitian=True)
    bands = zip(*(values.split(BAND) for values in (weights, targets, start)))
    return torch.cat([descend(weight.double(), target.double(), near, factors, inverse) for weight, target, near in bands])


def descend(
    weights: torch.Tensor, targets: torch.Tensor, found: torch.Tensor, factors: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    scale = 1 / weights.mean(1, keepdim=True)
    rest = (weights * (targets - found @ factors)) @ factors.T
    direction = steepest = scale * (rest @ inverse)
    energy = (rest * steepest).sum(1, keepdim=True)
    for _ in range(STEPS):
        image = (weights * (direction @ factors)) @ factors.T
        step = energy / (direction * image).sum(1, keepdim=True).clamp(min=TINY)
        found = found + step * direction
        rest = rest - step * image
        steepest = scale * (rest @ inverse)
        before, energy = energy, (rest * steepest).sum(1, keepdim=True)
        direction = steepest + energy / before.clamp(min=TINY) * direction
    return found


def search(rank: int, wholly: bool, level: int) -> list[tuple[int, list[int]]]:
    """Ranks, and for each how many times the squares of the factors' steps are halved beyond what suits a rest of white noise.
    A change that is wholly of low rank leaves hardly any: there each value is either predicted exactly or a step beside, more
    rarely with finer factors."""
    if wholly:
        return [(rank, [4, 8] if level == 2 else list(range(0, 14, 2)))]
    ranks = [rank] if level == 2 else sorted({rank * 3 // 4, rank, rank * 5 // 4})
    return [(each, [0] if level == 2 else [-1, 0, 1]) for each in ranks if each]


def spacing(values: np.ndarray, kind: torch.finfo) -> np.ndarray:
    """Of each value the exponent (int16) of the power of two that lies between it and the next of its type; the largest there
    is where a value is not finite."""
    finite = np.isfinite(values)
    magnitude = np.abs(np.where(finite, values, 0))
    magnitude[~finite] = magnitude.max(initial=0)
    return (np.frexp(np.maximum(magnitude, kind.tiny))[1] + (math.frexp(kind.eps)[1] - 2)).astype(np.int16)


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
