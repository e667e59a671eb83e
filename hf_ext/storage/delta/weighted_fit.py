"""Fits a product of two matrices to a change that is completely of low rank, by weighted least squares.

A value is known as exactly as its type resolves it, so values with a small spacing have the largest weights. With the columns'
factors fixed, each row of the other factors is a separate small problem, and vice versa. Both are improved in turn.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_ext.storage.delta.change import Change
from hf_ext.storage.native import FLOATS, _native

STEPS = {2: (1, 2, 2), 3: (2, 2, 2, 2, 3)}  # by level: steps of conjugate gradients for rows, columns, rows, …
EQUATIONS, LEAST_EQUATIONS = 4.0, 64  # values that count: for each factor to be found, and in any case
MOST_ROWS = 1 << 15  # at least so many rows of a taller matrix give the factors of the columns
FINEST = 8  # limit of a spacing's exponent below the largest
TINY = 1e-7  # a share of the Gram matrix's largest entry that keeps it from being singular
LEAST = 1e-30  # replaces that entry if the sampled rows did not change


def fit(
    change: Change, left: torch.Tensor, right: torch.Tensor, spacings: np.ndarray, level: int, threads: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns factors of the same shapes (rows × rank and rank × columns) that leave less of a change, given the exponents of
    the spacings of a sample of values; may reuse the memory of those given. The result does not depend on the number of
    threads."""
    rank, length = right.shape
    rows, columns = left.contiguous(), right.T.contiguous()
    wanted = max(EQUATIONS * rank, LEAST_EQUATIONS) / min(change.shape)
    matrix = change.values, change.base, FLOATS[change.dtype], length, int(spacings.max()), finest(spacings, wanted)
    for turn, steps in enumerate(STEPS[level][-1 - rank :]):  # one component needs no more than one round
        fitted, fixed = (columns, sampled(rows)) if turn % 2 else (rows, columns)
        gram = (fixed.T @ fixed).double()
        gram.diagonal().add_(TINY * gram.diagonal().max().clamp(min=LEAST))
        sides = fixed.numpy(), torch.linalg.inv(gram).float().contiguous().numpy(), fitted.numpy()
        _native.fit_rows(*matrix, fitted is columns, *sides, min(steps, rank), threads)
    return rows, columns.T


def sampled(rows: torch.Tensor) -> torch.Tensor:
    """Returns every n-th row, as few as the factors of the columns are fitted from."""
    step = max(1, len(rows) // MOST_ROWS)
    return rows[::step][: len(rows) // step].contiguous()


def finest(spacings: np.ndarray, share: float) -> int:
    """Returns how far below the largest exponent of spacings the weights may grow, so that the values that count are at least
    this share of all: otherwise a few values outweigh all others."""
    below = spacings.max() - spacings.astype(np.int64)
    for limit in range(FINEST, 0, -1):
        weights = 4.0 ** np.minimum(below, limit)
        if weights.mean() ** 2 > share * np.square(weights).mean():
            return limit
    return 0
