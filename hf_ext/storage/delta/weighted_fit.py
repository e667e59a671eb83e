"""Fits a product of two matrices to a change that is completely of low rank, by weighted least squares.

A value is known as exactly as its type resolves it, so values with a small spacing have the largest weights. With the columns'
factors fixed, each row of the other factors is a separate small problem, and vice versa. Both are solved exactly in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from hf_ext.storage.delta.change import Change
from hf_ext.storage.prefetch import check_awaited, in_threads

ROUNDS = {2: 2, 3: 3}  # by level
SAMPLE = {2: 1 << 20, 3: 1 << 23}  # by level: values from which the factors of the columns are fitted
ROWS_PER_FACTOR = 64  # least number of rows in that sample
MOST = 1 << 23  # values of the largest sample
TOGETHER = 16  # components that are solved for at once: the work for each grows with their number
TINY = 1e-6  # a share of the largest equation's coefficient that keeps others from being 0


class Weighted(NamedTuple):
    """A band of rows of a change."""

    change: torch.Tensor  # rows × columns
    weights: torch.Tensor  # rows × columns
    left: torch.Tensor  # rows × rank: their factors

    def rest(self, right: torch.Tensor) -> torch.Tensor:
        """Returns the change minus the product, times the weights."""
        return torch.addmm(self.change, self.left, right, alpha=-1).mul_(self.weights)


def fit(
    change: Change, left: torch.Tensor, right: torch.Tensor, top: int, level: int, threads: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns factors of the same shapes (rows × rank and rank × columns) that leave less of a change; may reuse the memory of
    those given.

    The columns' factors are fitted on a sample of the rows.

    Args:
        top: exponent of the spacing of values that have the weight 1; see `Change.weights`.
        threads: number of threads; the result does not depend on it.
    """
    rank, columns = right.shape
    left, right = left.contiguous(), right.contiguous()
    rows = change.sample(min(max(SAMPLE[level], ROWS_PER_FACTOR * rank * columns), MOST))
    is_all = len(rows) == change.shape[0]
    sampled_left = left if is_all else left[torch.from_numpy(rows)]

    def band_of(chosen: slice | np.ndarray, factors: torch.Tensor) -> Weighted:
        return Weighted(change.rows(chosen)[0], change.weights(chosen, top), factors)

    sampled = [band_of(band if is_all else rows[band], sampled_left[band]) for band in change.bands(len(rows))]
    for after in range(ROUNDS[level]):
        if after:
            fit_rows(sampled.__getitem__, len(sampled), right, threads)
        fit_columns(sampled, right)
    if is_all:
        fit_rows(sampled.__getitem__, len(sampled), right, threads)
    else:
        del sampled
        bands = list(change.bands())
        fit_rows(lambda i: band_of(bands[i], left[bands[i]]), len(bands), right, threads)
    return left, right


def fit_rows(band_at: Callable[[int], Weighted], count: int, right: torch.Tensor, threads: int) -> None:
    """Replaces the factors of rows, in place, by those of the least weighted error. Works on one band in each thread."""
    blocks = [slice(at, at + TOGETHER) for at in range(0, len(right), TOGETHER)]
    products = [pairs(right[block]) for block in blocks]

    def fit_band(i: int) -> None:
        check_awaited()
        band = band_at(i)
        for block, product in zip(blocks, products):
            band.left[:, block] += solve(product @ band.weights.T, right[block] @ band.rest(right).T).T

    in_threads(fit_band, count, threads)


def fit_columns(bands: list[Weighted], right: torch.Tensor) -> None:
    """Replaces the factors of columns, in place, by those of the least weighted error."""
    for at in range(0, len(right), TOGETHER):
        block = slice(at, at + TOGETHER)
        rest = torch.zeros_like(right[block])
        gram = right.new_zeros(len(rest) * (len(rest) + 1) // 2, right.shape[1])
        for band in bands:
            check_awaited()
            factors = band.left[:, block].T.contiguous()
            gram.addmm_(pairs(factors), band.weights)
            rest.addmm_(factors, band.rest(right))
        right[block] += solve(gram, rest)


def pairs(factors: torch.Tensor) -> torch.Tensor:
    """Returns the products of all pairs of rows, beginning with those of the first row."""
    return torch.cat([factors[i] * factors[i:] for i in range(len(factors))])


def solve(gram: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Solves many small systems of equations at once, by elimination.

    Args:
        gram: the upper triangles of the symmetric matrices, row by row (rank · (rank + 1) / 2 × systems).
        rest: the right sides (rank × systems).
    """
    rank, rows, start = len(rest), [], 0
    for i in range(rank):
        rows.append(gram[start : start + rank - i])
        start += rank - i
    floor = TINY * torch.stack([row[0] for row in rows]).amax(0) + torch.finfo(rest.dtype).tiny
    for i in range(rank):
        rows[i][0] += floor
        share = rows[i][1:] / rows[i][0]
        for j in range(i + 1, rank):
            rows[j] -= share[j - i - 1] * rows[i][j - i :]
        rest[i + 1 :] -= share * rest[i]
    for i in reversed(range(rank)):
        rest[i] = (rest[i] - (rows[i][1:] * rest[i + 1 :]).sum(0)) / rows[i][0]
    return rest
