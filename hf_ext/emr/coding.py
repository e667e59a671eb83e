"""Coded tasks (`method="switch"`): the size that a user chooses, the steps that it takes, and what is lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from hf_ext.display import bytes_of
from hf_ext.emr import election
from hf_ext.emr.checks import TaskModel
from hf_ext.errors import CheckpointError
from hf_ext.storage.delta.coarse import coarsened
from hf_ext.storage.native import WIDTHS, as_numbers, cast
from hf_ext.storage.prefetch import in_threads, threads_for
from hf_ext.storage.safetensors_file import Entry, RawTensor
from hf_ext.storage.source import TensorSource

METHODS = ELECTED, CODED = "emr", "switch"
BITS = 0.25  # per parameter and task, by default
LEAST_BITS = 0.001  # per parameter and task
ENTRY = 250  # bytes that the entry of a tensor takes in the headers of a folder, about
CHUNK = 1 << 20  # values of each task worked on at a time
FEW_VALUES = 1 << 25  # of a model whose tensors are all in the sample
PLACES = 32  # of a sample: tensors that have the values at as many places, spread evenly over all values
MOST_VALUES = 1 << 22  # of a tensor in the sample of a larger model
FIRST_STEP = 2.5  # times the root mean square of the changes
TINY = 1e-9
ROUNDS, NEAR = 10, 0.03  # steps that are tried at most, and the share by which the result may be smaller than wanted
MOST_GAIN = 1.5
EXACT = 2.0**-60  # for a task that changes no tensor
LEAST_STEP, MOST_STEP = 2.0**-98, 2.0**98  # with factors of up to 4, a step that can be stored
VECTOR = 1 / 16  # of the step, for a tensor of one dimension: each of its values changes a whole row or column of activations


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


class Step(NamedTuple):
    """The step in which the changes of a coded task are stored."""

    size: float  # the smallest change of a single value
    gain: float = 1  # factor of the changes: it restores the length of the task vector, as arXiv 2412.00054 does


def step_of(step: float, name: str, entry: Entry) -> float:
    """Returns the step of a tensor, given that of its model.

    The changes of 16-bit values are multiples of their spacing, a power of two, so that many values would get a number at once
    as the step falls. Steps that differ by up to half an octave, in a fixed order without meaning, make the size fall evenly.
    """
    if len(entry.shape) < 2:
        step *= VECTOR
    elif WIDTHS[entry.dtype] == 2:
        step *= 2 ** (xxhash.xxh3_64_intdigest(name.encode()) / 2**64 - 0.5)
    return min(max(step, LEAST_STEP), MOST_STEP)


def choose_step(
    model: TaskModel, base: TensorSource, names: Sequence[str], keep: float | None = None, bits: float | None = None
) -> Step:
    """Returns the step at which the coded tensors of these names take `bits` per parameter, or at which the share `keep` of
    their values get a change of their own."""
    wanted = bits if keep is None else keep
    assert wanted is not None
    sample = _sample(model, base, names, every=False)
    if not any(_square(tensor, prior) for _, _, tensor, prior in sample):  # as of an adapter that changes few tensors
        sample = _sample(model, base, names, every=True)
    if not sample:
        return Step(EXACT)
    shares: dict[float, float] = {}
    gains: dict[float, float] = {}
    counts = [count for _, count, *_ in sample]
    lengths = [_square(tensor, prior) for _, _, tensor, prior in sample]
    whole = sum(count * square for count, square in zip(counts, lengths))

    def measure(step: float) -> float:
        """Returns what a step makes of the sample: bits per parameter, or the share of values."""

        def encode(i: int) -> tuple[float, float]:
            name, count, tensor, prior = sample[i]
            made = coarsened(tensor, prior, step_of(step, name, model.tensors.entry(name)))
            amount = 8 * len(made.payload) if keep is None else made.numbers
            return count * amount / math.prod(tensor.shape), count * _square(made.tensor, prior)

        made = in_threads(encode, len(sample), threads_for(sum(tensor.data.size for _, _, tensor, _ in sample)))
        amount, square = (sum(column) for column in zip(*made))
        shares[step], gains[step] = amount / sum(counts), min(math.sqrt(whole / square), MOST_GAIN) if square else 1.0
        return shares[step]

    step, aim = FIRST_STEP * math.sqrt(whole / sum(counts)), (1 - NEAR / 2) * wanted
    above, below = 0.0, math.inf  # steps that give more than wanted, and at most that
    while step and len(shares) < ROUNDS:
        if measure(step) > wanted:
            above = max(above, step)
        else:
            below = min(below, step)
            if shares[step] > (1 - NEAR) * wanted:
                break
        if above and below < math.inf:  # interpolates between the logarithms
            part = math.log(shares[above] / aim) / math.log(shares[above] / max(shares[below], TINY))
            step = above * (below / above) ** min(max(part, 0.1), 0.9)
        else:
            step *= min(max((shares[step] / aim) ** 0.75, 0.2), 5) * (1.1 if above else 0.9)
    chosen = below if below < math.inf else above
    return Step(chosen, gains.get(chosen, 1.0))


def _sample(
    model: TaskModel, base: TensorSource, names: Sequence[str], every: bool
) -> list[tuple[str, int, RawTensor, RawTensor]]:
    """Returns tensors with the number of places in them, as they are in the model and in the base. Large ones are cut to rows
    that are spread evenly. With `every`, all tensors that changed, in full."""
    ends = np.cumsum([math.prod(model.tensors.entry(name).shape) for name in names])
    places = (np.arange(PLACES) + 0.5) * (ends[-1] / PLACES)
    counts, most = Counter(np.searchsorted(ends, places, side="right").tolist()), MOST_VALUES
    if every or ends[-1] <= FEW_VALUES:
        counts, most = Counter(dict(enumerate(np.diff(ends, prepend=0).tolist()))), int(ends[-1])
    sample = []
    for index, count in counts.items():
        name = names[index]
        tensor, prior = model.tensors.read(name), base.read(base.twin_of(name) or name)
        if not tensor.shape:
            continue
        rows = min(tensor.shape[0], prior.shape[0])
        kept = np.arange(0, rows, max(1, -(-math.prod(tensor.shape) // most)))
        tensor, prior = _rows(tensor, kept), _rows(prior, kept)
        if not every or _square(tensor, prior):
            sample.append((name, count, tensor, prior))
    return sample


def _rows(tensor: RawTensor, rows: np.ndarray) -> RawTensor:
    data = tensor.data.reshape(tensor.shape[0], -1)[rows].reshape(-1)
    return RawTensor(tensor.dtype, (len(rows), *tensor.shape[1:]), data)


def _square(tensor: RawTensor, prior: RawTensor) -> float:
    """Returns the mean square of the finite changes of a tensor."""
    numbers = (as_numbers(data, tensor.dtype) for data in (tensor.data, cast(prior.data, prior.dtype, tensor.dtype)))
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.subtract(*numbers)
    change[~np.isfinite(change)] = 0
    return float(np.square(change, dtype=np.float64).mean())


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
