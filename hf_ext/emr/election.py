"""The arithmetic of EMR-Merging (arXiv 2405.17461, section 3): elect, mask, rescale. Takes and returns arrays of bytes.

A task vector is t = task - base. The unified vector takes, for each parameter, the sign of the sum of all t and the largest
|t| of that sign. A task's mask marks where its t has that sign, and its rescaler restores the length. The unified vector is
stored as a weight: base + t of one task, which is exactly that task's weight. Nothing is rounded.

csrc/emr/emr.cpp implements it; tests/reference_election.py does the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hf_ext.storage.native import FLOATS, WIDTHS, _native, cast

#: The sums of `elect` over the elements of each task's tensor, with u the unified vector under the task's mask: the numbers of
#: t and of u that are not 0, |t|, |u|, t², u², t·u, the base's squares, and the number of weights that are infinite or NaN.
SUMS = np.dtype(
    [
        (name, "<f8")
        for name in (
            "moved", "agreeing", "task_l1", "unified_l1", "task_squares", "unified_squares", "product", "base_squares",
            "not_finite",
        )
    ]
)  # fmt: skip
SUM_NAMES = SUMS.names or ()


def mask_bytes(values: int) -> int:
    """Returns the bytes of a mask of this number of values. The bit of value i is bit i % 8 of byte i // 8."""
    return (values + 7) // 8


def elect(
    dtype: str, base: np.ndarray, tasks: Sequence[np.ndarray], elected: np.ndarray, threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Elects each weight among those of the tasks (section 3.2 of the paper).

    A sum of 0 elects the negative sign. Among equal |t|, the first task's weight is elected.

    Args:
        dtype: safetensors' name of a float type.
        base, tasks: bytes of the same number of values of that type; at least one task.
        elected: receives the elected weights.
        threads: number of threads; the result does not depend on it.

    Returns:
        The tasks' masks, uint8 of shape [tasks, mask_bytes(values)], and their sums, SUMS of shape [tasks].
    """
    masks = np.empty((len(tasks), mask_bytes(base.size // WIDTHS[dtype])), np.uint8)
    sums = np.zeros(len(tasks), SUMS)
    _native.elect(FLOATS[dtype], base, tuple(tasks), elected, masks, sums.view(np.uint8), threads)
    return masks, sums


def adopt(dtype: str, base: np.ndarray, elected: np.ndarray, task: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds a task to an earlier election. Where no task had moved, the new task's weight is elected.

    Args:
        elected: weights of the earlier election; receives the new task's weights where it equals the base.

    Returns:
        The mask and the sums of the new task, as `elect` returns them for one task.
    """
    words = f"<u{WIDTHS[dtype]}"
    free = elected.view(words) == base.view(words)
    elected.view(words)[free] = task.view(words)[free]
    _, sums = elect(dtype, base, [task], np.empty_like(elected))  # right but for the sums of the unified vector
    base, *weights = (cast(array, dtype, "F64").view(np.float64) for array in (base, task, elected))
    with np.errstate(invalid="ignore"):
        vector, unified = (np.nan_to_num(array - base, posinf=0, neginf=0) for array in weights)
    agrees = vector * unified > 0
    unified = np.where(agrees, unified, 0)
    sums["agreeing"], sums["unified_l1"] = np.count_nonzero(agrees), np.abs(unified).sum()
    sums["unified_squares"], sums["product"] = unified @ unified, vector @ unified
    return np.packbits(agrees, bitorder="little")[None], sums


def vote(
    dtype: str, base: np.ndarray, tasks: Sequence[np.ndarray], elected: np.ndarray, adopts: bool, threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Elects weights as `elect` does, or, if it `adopts`, adds one task after another to the earlier election in `elected`. The
    tasks may have fewer values than the base, whose values follow them, and may share the memory of `elected`."""
    tasks = [task.copy() if np.may_share_memory(task, elected) else task for task in tasks]
    tasks = [
        cast(task, dtype, dtype) if task.size == base.size else np.concatenate([task, base[task.size :]]) for task in tasks
    ]
    if not adopts:
        return elect(dtype, base, tasks, elected, threads)
    masks, sums = zip(*(adopt(dtype, base, elected, task) for task in tasks))
    return np.concatenate(masks), np.concatenate(sums)


def rescaler(sums: np.ndarray | Mapping[str, float]) -> float:
    """Returns a task's λ = Σ|t| / Σ|u| (section 3.3) over the elements that its sums cover; 0 for an empty mask."""
    return float(sums["task_l1"] / sums["unified_l1"]) if sums["unified_l1"] else 0.0


def modulate(
    dtype: str, base: np.ndarray, elected: np.ndarray, mask: np.ndarray | None, scale: float, out: np.ndarray, threads: int = 1
) -> None:
    """Computes a task's weights: base + scale · (elected - base) where its mask is set, else the base (section 3.3).

    The arithmetic is in float32 (float64 for that type), rounded to nearest even. A scale of 1 gives the elected weight itself.

    Args:
        mask: `mask_bytes` long; None has no bits set.
        out: receives the weights; may be `elected`.
    """
    _native.modulate(FLOATS[dtype], base, elected, mask, scale, out, threads)


class Target(NamedTuple):
    """A tensor in memory that changes from one task's to another's. All arrays are bytes."""

    dtype: int  # code of its float type
    base: np.ndarray
    elected: np.ndarray
    mask: np.ndarray | None  # of the task that it belongs to
    scale: float
    to_mask: np.ndarray | None  # of the task that it changes to
    to_scale: float
    live: np.ndarray  # the memory to overwrite


def retarget(targets: Sequence[Target], threads: int = 1) -> int | None:
    """Overwrites the weights of one task by those of another, all or none. Returns None, or the index of a target that differs
    from the first task's weights, where no target is changed."""
    place = _native.retarget(tuple(targets), threads)
    return None if place == len(targets) else place
