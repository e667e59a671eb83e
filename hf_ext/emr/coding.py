"""Coded tasks (`method="switch"`): the size that a user chooses, and what is lost."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hf_ext.display import bytes_of
from hf_ext.emr import election
from hf_ext.errors import CheckpointError
from hf_ext.storage.native import WIDTHS, cast
from hf_ext.storage.prefetch import threads_for
from hf_ext.storage.safetensors_file import RawTensor

METHODS = ELECTED, CODED = "emr", "switch"
BITS = 0.25  # per parameter and task, by default
LEAST_BITS = 0.001  # per parameter and task
ENTRY = 250  # bytes that the entry of a tensor takes in the headers of a folder, about
CHUNK = 1 << 20  # values of each task worked on at a time


class Budget(NamedTuple):
    """The size of coded tasks: one of these."""

    keep: float | None = None  # share of the values that get a number of their own
    bits: float | None = None  # per parameter and task
    size: int | None = None  # bytes of the folder, at most
    reserved: int = 0  # of these, the bytes to leave free


def budget_of(method: str, keep: float | None, bits: float | None, size: int | str | None) -> Budget | None:
    """Returns the checked size of coded tasks; None for elected tasks."""
    if method not in METHODS:
        raise CheckpointError(f"method={method!r} is not supported; choose one of: {', '.join(METHODS)}.")
    given = {name: value for name, value in (("keep", keep), ("bits", bits), ("size", size)) if value is not None}
    if given and method != CODED:
        raise CheckpointError(f"{' and '.join(given)}: only the method {CODED!r} has a size to choose. Add method={CODED!r}.")
    if len(given) > 1:
        raise CheckpointError(f"{' and '.join(given)} are given; give one of them.")
    if keep is not None and (isinstance(keep, str) or not 0 < keep <= 1):
        raise CheckpointError(f"keep={keep!r} is not a share; give a number above 0 and at most 1.")
    if bits is not None and (isinstance(bits, str) or not LEAST_BITS <= bits <= 64):
        raise CheckpointError(f"bits={bits!r} is out of range; give a number from {LEAST_BITS} to 64.")
    limit = None if size is None else bytes_of(size)
    if size is not None and (limit is None or limit == math.inf):
        raise CheckpointError(f"size={size!r} is not a size; give a number of bytes, such as '50MB'.")
    if method != CODED:
        return None
    return Budget(keep, bits, None if limit is None else int(limit)) if given else Budget(bits=BITS)


def sums_of(tensor: RawTensor, base: RawTensor, near: RawTensor) -> np.ndarray:
    """Returns the sums `election.SUMS` of a task's tensor and of its approximation, which takes the unified vector's place."""
    dtype, threads = tensor.dtype, threads_for(tensor.data.size)
    width, base_width = WIDTHS[dtype], WIDTHS[base.dtype]
    values, total = min(tensor.data.size // width, base.data.size // base_width), np.zeros((), election.SUMS)
    for begin in range(0, values, CHUNK):
        end = min(begin + CHUNK, values)
        prior = cast(base.data[begin * base_width : end * base_width], base.dtype, dtype)
        own, approximate = (cast(part.data[begin * width : end * width], dtype, dtype) for part in (tensor, near))
        elected = np.empty_like(prior)
        _, (exact, coded) = election.elect(dtype, prior, [own, approximate], elected, threads)
        _, [off] = election.elect(dtype, approximate, [own], elected, threads)
        for field in ("moved", "task_l1", "task_squares", "base_squares", "not_finite"):
            total[field] += exact[field]
        total["unified_l1"] += coded["task_l1"]
        total["unified_squares"] += coded["task_squares"]
        total["product"] += (exact["task_squares"] + coded["task_squares"] - off["task_squares"]) / 2
    return total
