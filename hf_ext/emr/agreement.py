"""Checks on a sample that an election suits its tasks, before the whole model is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from hf_ext.emr import election
from hf_ext.emr.ballot import StoredTensor
from hf_ext.emr.checks import TaskModel, require_closer
from hf_ext.storage.native import WIDTHS, cast
from hf_ext.storage.source import TensorSource

RUNS, MORE_RUNS, RUN = 24, 240, 1 << 16  # of a sample: numbers of runs, and values in each

Sums = dict[str, float]


def require_agreement(
    tensors: Sequence[StoredTensor], tasks: Sequence[TaskModel], base: TensorSource, elected: TensorSource | None, rescale: str
) -> None:
    """Raises CheckpointError if a sample shows that one of the new `tasks` would end farther from its own model than the base
    is. The sample consists of runs of values, spread evenly over all parameters of the merge's `tensors`. Only a clear result
    counts: the task moved many runs, and the mean is three standard errors or more. A task that moved few of them, as an
    adapter does, takes a larger sample. In the end, the figures of the whole model decide. `elected` are the weights of the
    merge that the task is added to, if there is one; `rescale` is as in `merge`."""
    for runs in (RUNS, MORE_RUNS):
        is_clear: list[bool] = []
        figures: dict[str, tuple[float, float]] = {}
        sums = _sums(tensors, tasks, base, elected, runs)
        for task, totals in sums.items():
            whole = {field: math.fsum(total[field] for total in totals) for field in election.SUM_NAMES}
            scales = [election.rescaler(total if rescale == "tensor" else whole) for total in totals]
            squares = [scale**2 * total["unified_squares"] for scale, total in zip(scales, totals)]
            products = [scale * total["product"] for scale, total in zip(scales, totals)]
            excess = [square - 2 * product for square, product in zip(squares, products)]
            if 2 * sum(total["moved"] > 0 for total in totals) > RUNS:
                is_clear.append(bool(np.mean(excess) >= 3 * np.std(excess) / math.sqrt(runs)))
                length = math.fsum(squares) * whole["task_squares"]
                cosine = math.fsum(products) / math.sqrt(length) if length else 0.0
                figures[task] = math.sqrt(max(1 + math.fsum(excess) / whole["task_squares"], 0)), cosine
        if len(is_clear) == len(sums):
            break
    if any(is_clear):
        require_closer(figures)


def _sums(
    tensors: Sequence[StoredTensor], tasks: Sequence[TaskModel], base: TensorSource, elected: TensorSource | None, runs: int
) -> dict[str, list[Sums]]:
    """Returns by task the means of its sums over each run of a sample."""
    tensors = [tensor for tensor in tensors if {*tensor.voters} & {*tasks}]
    ends = np.cumsum([math.prod(tensor.shape) for tensor in tensors])
    places = np.linspace(0, int(ends[-1]), runs, endpoint=False).astype(np.int64)
    sums: dict[str, list[Sums]] = {model.task: [] for model in tasks}
    for index in sorted({*np.searchsorted(ends, places, side="right").tolist()}):
        tensor = tensors[index]
        size = math.prod(tensor.shape)
        first = int(ends[index]) - size
        begins = [min(int(place) - first, max(size - RUN, 0)) for place in places if first <= place < ends[index]]
        for task, total in _sums_of(tensor, tasks, base, elected, begins):
            sums[task].append(total)
    return sums


def _sums_of(
    tensor: StoredTensor, tasks: Sequence[TaskModel], base: TensorSource, elected: TensorSource | None, begins: Sequence[int]
) -> Iterator[tuple[str, Sums]]:
    """Yields each task and the means of its sums over the runs of a tensor's values that start at `begins`."""
    dtype, width = tensor.dtype, WIDTHS[tensor.dtype]
    base_tensor, voters = base.read(tensor.twin), [model for model in tensor.voters if model in tasks]
    base_width = WIDTHS[base_tensor.dtype]
    weights = [model.tensors.read(tensor.name).data for model in voters]
    standing = None
    for begin in begins:
        end = min(begin + RUN, math.prod(tensor.shape))
        values = cast(base_tensor.data[begin * base_width : end * base_width], base_tensor.dtype, dtype)
        runs = [data[begin * width : end * width] for data in weights]
        if all(np.array_equal(run, values) for run in runs):
            sums = np.zeros(len(voters), election.SUMS)
        else:
            if standing is None and elected is not None and tensor.name in elected:
                standing = elected.read(tensor.name).data
            chosen = values.copy() if standing is None else standing[begin * width : end * width].copy()
            _, sums = election.vote(dtype, values, runs, chosen, adopts=elected is not None)
        for model, total in zip(voters, sums):
            yield model.task, {field: float(total[field]) / (end - begin) for field in election.SUM_NAMES}
