"""Coded tasks (`method="switch"`): the size that a user chooses, the steps that it takes, and what is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np
import xxhash

from hf_ext.display import bytes_of
from hf_ext.emr import election
from hf_ext.emr.checks import TaskModel
from hf_ext.errors import CheckpointError
from hf_ext.storage.delta.coarse import coarsened
from hf_ext.storage.delta.payload import read_header
from hf_ext.storage.native import WIDTHS, as_numbers, cast
from hf_ext.storage.prefetch import in_threads, threads_for
from hf_ext.storage.safetensors_file import Entry, RawTensor
from hf_ext.storage.source import TensorSource

METHODS = ELECTED, CODED = "emr", "switch"
BITS = 0.25  # per parameter and task, by default
LEAST_BITS = 0.001  # per parameter and task
HEADER = 58  # bytes of a payload's header without the two names, about
ENTRY = 250  # bytes that the entry of a tensor takes in the headers of a folder, about
CHUNK = 1 << 20  # values of each task worked on at a time
FEW_VALUES = 1 << 25  # of a model whose tensors are all in the sample
PLACES = 32  # of a sample: tensors that have the values at as many places, spread evenly over all values
MOST_VALUES = 1 << 22  # of a tensor in the sample of a larger model
GLANCE = 1 << 16  # values of a tensor that tell the size of its changes
FIRST_STEP = 2.5  # times the root mean square of the changes
TINY = 1e-9
ROUNDS, CODINGS = 10, 6  # steps that are tried at most on a sample, and on the whole model
NEAR = 0.04  # share by which the result may be smaller than wanted
CLOSE = 1.25, 1.001  # quotients of two steps of which each tensor may take one; the second if the first is too rough
FARTHEST, FLAT = 2.0**40, 0.002  # limits of the steps, as multiples of the first; amounts, as a share, that count as equal
MOST_GAIN = 1.5
EXACT = 2.0**-60  # for a task that changes no tensor
LEAST_STEP, MOST_STEP = 2.0**-98, 2.0**98  # with factors of up to 4, a step that can be stored
VECTOR = 1 / 16  # of the step, for a tensor of one dimension: each of its values changes a whole row or column of activations


class Budget(NamedTuple):
    """The size of coded tasks: one of these."""

    keep: float | None = None  # share of the values that get a number of their own
    bits: float | None = None  # per parameter and task
    size: int | None = None  # bytes of the folder, at most
    uncoded: int | None = None  # of these, the bytes that all but coded tensors take, if known


def budget_of(method: str, keep: float | None, bits: float | None, size: int | str | None) -> Budget | None:
    """Returns the checked size of coded tasks; None for elected tasks."""
    if method not in METHODS:
        raise CheckpointError(f"method={method!r} is not supported; choose one of: {', '.join(METHODS)}.")
    given = {name: value for name, value in (("keep", keep), ("bits", bits), ("size", size)) if value is not None}
    if given and method != CODED:
        raise CheckpointError(f"{' and '.join(given)}: only the method {CODED!r} has a size to choose. Add method={CODED!r}.")
    if len(given) > 1:
        raise CheckpointError(f"{' and '.join(given)} are given; give one of them.")
    if keep is not None and not (_is_number(keep) and 0 < keep <= 1):
        raise CheckpointError(f"keep={keep!r} is not a share; give a number above 0 and at most 1.")
    if bits is not None and not (_is_number(bits) and LEAST_BITS <= bits <= 64):
        raise CheckpointError(f"bits={bits!r} is out of range; give a number from {LEAST_BITS} to 64.")
    limit = None if size is None else bytes_of(size)
    if size is not None and (limit is None or limit == math.inf):
        raise CheckpointError(f"size={size!r} is not a size; give a number of bytes, such as '50MB'.")
    if method != CODED:
        return None
    if not given:
        return Budget(bits=BITS)
    return Budget(keep and float(keep), bits and float(bits), None if limit is None else int(limit))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


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


def search(
    measure: Callable[[float], float],
    step: float,
    wanted: float,
    most: float,
    rounds: int,
    tried: dict[float, float],
    close: float = 1.02,
) -> float:
    """Returns the step at which `measure`, which falls as the step grows, gives nearly `wanted` and at most `most`: the
    smallest that was tried, or the largest if all give too much.

    Args:
        step: the first to try.
        rounds: steps to try at most.
        tried: amounts that are known, by step; receives those that are measured.
        close: quotient of two steps between which no other is tried.
    """
    limits = max(step / FARTHEST, LEAST_STEP), min(step * FARTHEST, MOST_STEP)
    for jump in range(1, rounds + 1):
        above = max((one for one, amount in tried.items() if amount > most), default=0.0)
        below = min((one for one, amount in tried.items() if amount <= most), default=math.inf)
        if tried.get(below, 0) >= (1 - NEAR) * wanted or below <= close * above:
            break
        if 0 < above and below < math.inf:  # interpolates between the logarithms, and halves their distance, in turn
            part = math.log(tried[above] / wanted) / math.log(tried[above] / max(tried[below], TINY))
            step = above * (below / above) ** (min(max(part, 0.1), 0.9) if jump % 2 else 0.5)
        elif tried:
            *_, before, last = [math.nan, *sorted(tried, reverse=above == 0)]
            factor = (max(tried[last], TINY) / wanted) ** 0.75 * (1.1 if above else 0.9)
            is_flat = abs(tried[last] - tried.get(before, math.inf)) < FLAT * wanted
            step = limits[above > 0] if is_flat else last * min(max(factor, 8.0**-jump), 8.0**jump)
            step = min(max(step, limits[0]), limits[1])
        if step in tried:
            break
        tried[step] = measure(step)
    return min((one for one, amount in tried.items() if amount <= most), default=max(tried))


def those_finer(coarse: Mapping[str, float], fine: Mapping[str, float], wanted: float) -> set[str]:
    """Returns names of tensors that take a finer step, so that the amounts of all are nearly `wanted` in total, and not more.

    Args:
        coarse, fine: the tensors' amounts in either step.
    """
    left, names = wanted - sum(coarse.values()), set()
    for name in sorted(coarse, key=lambda name: coarse[name] - fine[name]):
        if 0 < fine[name] - coarse[name] <= left:
            names.add(name)
            left -= fine[name] - coarse[name]
    return names


class Sample:
    """A sample of the tensors that a task codes, to choose the step.

    It has the tensors at places spread evenly over all values, half of the places by the number of values and half by the size
    of their changes. Of small models it has all tensors, and of models without a change there all that changed.

    Args:
        model, base: the task, and the model that it was fine-tuned from.
        names: of the tensors.
        keep: measure the share of values with a change of their own, instead of the bits per parameter.
    """

    def __init__(self, model: TaskModel, base: TensorSource, names: Sequence[str], keep: bool):
        self._model, self._keep = model, keep
        sizes = np.array([math.prod(model.tensors.entry(name).shape) for name in names], np.float64)
        if sizes.sum() <= FEW_VALUES:
            weights, most = sizes, FEW_VALUES
        else:
            energies = sizes * [_square(*_pair(model, base, name, GLANCE)) for name in names]
            shares = sizes / sizes.sum() / 2 + (energies / energies.sum() / 2 if energies.any() else 0)
            ends = np.cumsum(shares / shares.sum())
            places = np.searchsorted(ends, (np.arange(PLACES) + 0.5) / PLACES)
            weights, most = np.bincount(places, minlength=len(names)) * sizes / shares / PLACES, MOST_VALUES
        self._tensors = [
            (name, float(weight), *_pair(model, base, name, most)) for name, weight in zip(names, weights) if weight
        ]
        self._squares = [_square(tensor, prior) for _, _, tensor, prior in self._tensors]
        if not any(self._squares):  # perhaps a few rows changed, such as added words
            whole = ((name, float(size), *_pair(model, base, name, int(size))) for name, size in zip(names, sizes))
            self._tensors = [entry for entry in whole if _square(*entry[2:])]
            self._squares = [_square(*entry[2:]) for entry in self._tensors]
        self._values = sum(weight for _, weight, *_ in self._tensors)
        self._whole = sum(weight * square for (_, weight, *_), square in zip(self._tensors, self._squares))
        self._gains: dict[float, float] = {}
        self._headers = 8 * sum(HEADER + 2 * len(name) for name in names) / float(sizes.sum())  # bits per parameter

    def first_step(self) -> float:
        """Returns a step to begin with; 0 if nothing in the sample changed. One huge change does not count."""
        sizes = sorted((square, weight) for (_, weight, *_), square in zip(self._tensors, self._squares) if square)
        middle = np.searchsorted(np.cumsum([weight for _, weight in sizes]), sum(weight for _, weight in sizes) / 2)
        return FIRST_STEP * math.sqrt(sizes[middle][0]) if sizes else 0.0

    def measure(self, step: float) -> float:
        """Returns what a step makes of the sample: bits per parameter, or the share of values."""

        def encode(i: int) -> tuple[float, float]:
            name, weight, tensor, prior = self._tensors[i]
            coarse = coarsened(tensor, prior, step_of(step, name, self._model.tensors.entry(name)))
            amount = coarse.numbers if self._keep else 8 * (len(coarse.payload) - read_header(coarse.payload, "").body)
            return weight * amount / math.prod(tensor.shape), weight * _square(coarse.tensor, prior)

        count = len(self._tensors)
        parts = in_threads(encode, count, threads_for(sum(tensor.data.size for *_, tensor, _ in self._tensors)))
        amount, square = (sum(column) for column in zip(*parts))
        self._gains[step] = min(math.sqrt(self._whole / square), MOST_GAIN) if square else 1.0
        return amount / self._values + (0 if self._keep else self._headers)

    def step(self, size: float) -> Step:
        """Returns a step with its gain."""
        if size not in self._gains and self._whole:
            self.measure(size)
        return Step(size, self._gains.get(size, 1.0))


def _pair(model: TaskModel, base: TensorSource, name: str, most: int) -> tuple[RawTensor, RawTensor]:
    """Returns a tensor of a task and the base's, cut to about `most` values in rows that are spread evenly."""
    tensor, prior = model.tensors.read(name), base.read(base.twin_of(name) or name)
    if not tensor.shape:
        return tensor, prior
    rows = min(tensor.shape[0], prior.shape[0])
    kept = np.arange(0, rows, max(1, -(-math.prod(tensor.shape) // most)))
    return _rows(tensor, kept), _rows(prior, kept)


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
