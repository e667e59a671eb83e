"""The arithmetic of hf_ext/emr/election.py in a few lines of NumPy, for tests of the C++ code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def elect(base: np.ndarray, tasks: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the elected weights and each task's mask (booleans) for arrays of one shape and type. Computes in float64."""
    vectors = [task.astype(np.float64) - base.astype(np.float64) for task in tasks]
    sign = np.where(sum(vectors) > 0, 1.0, -1.0)
    elected, best = base.copy(), np.zeros(base.shape)
    for task, vector in zip(tasks, vectors):
        larger = sign * vector > best
        elected, best = np.where(larger, task, elected), np.where(larger, sign * vector, best)
    return elected, [sign * vector > 0 for vector in vectors]


def rescaler(base: np.ndarray, task: np.ndarray, elected: np.ndarray, mask: np.ndarray) -> float:
    """Returns λ of one task, in float64."""
    base, task, elected = (array.astype(np.float64) for array in (base, task, elected))
    unified = np.abs(mask * (elected - base)).sum()
    return np.abs(task - base).sum() / unified if unified else 0.0


def modulate(base: np.ndarray, elected: np.ndarray, mask: np.ndarray, scale: float) -> np.ndarray:
    """Returns a task's weights for float32 arrays, with every operation in float32."""
    if scale == 1:
        return np.where(mask, elected, base)
    return np.where(mask, base + np.float32(scale) * (elected - base), base)
