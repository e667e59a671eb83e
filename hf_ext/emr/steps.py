"""The step in which a coded task's changes are stored: the search for the one that takes a given size, on a sample first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from hf_ext.emr.checks import TaskModel
from hf_ext.storage.delta.coarse import coarsened
from hf_ext.storage.delta.payload import read_header
from hf_ext.storage.native import WIDTHS, as_numbers, cast
from hf_ext.storage.prefetch import in_threads, threads_for
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.storage.source import TensorSource

HEADER = 58  # bytes of a payload's header without the two names, about
FEW_VALUES = 1 << 22  # of a model whose tensors are all in the sample
PLACES = 32  # of a sample: tensors that have the values at as many places, spread evenly over all values
MOST_VALUES = 1 << 19  # of a tensor in the sample of a larger model
GLANCE = 1 << 16  # values of a tensor that tell the size of its changes
FIRST_STEP = 3.5  # times the root mean square of the changes
TINY = 1e-9
NEAR = 0.04  # share by which the result may be smaller than wanted
FARTHEST, FLAT = 2.0**40, 0.002  # limits of the steps, as multiples of the first; amounts, as a share, that count as equal
MOST_GAIN = 1.5
LEAST_STEP, MOST_STEP = 2.0**-98, 2.0**98  # with factors of up to 4, a step that can be stored
VECTOR = 1 / 16  # of the step, for a tensor of one dimension: each of its values changes a whole row or column of activations


class Step(NamedTuple):
    """The step in which the changes of a coded task are stored."""

    size: float  # the smallest change of a single value
    gain: float = 1  # factor of the changes: it restores the length of the task vector, as arXiv 2412.00054 does

    def of(self, name: str, tensor: RawTensor) -> float:
        """Returns the size of the step for a tensor, given that for its model. The changes of 16-bit values are multiples of
        their spacing, a power of two, so that many values would get a number at once as the step falls. Steps that differ by up
        to half an octave, in a fixed order without meaning, make the size fall evenly."""
        size = self.size
        if len(tensor.shape) < 2:
            size *= VECTOR
        elif WIDTHS[tensor.dtype] == 2:
            size *= 2 ** (xxhash.xxh3_64_intdigest(name.encode()) / 2**64 - 0.5)
        return min(max(size, LEAST_STEP), MOST_STEP)


def limits(first: float) -> tuple[float, float]:
    """Returns the smallest and the largest step that `search` tries, given the first."""
    return max(first / FARTHEST, LEAST_STEP), min(first * FARTHEST, MOST_STEP)


def search(
    measure: Callable[[float], float],
    step: float,
    wanted: float,
    most: float,
    rounds: int,
    tried: dict[float, float],
    close: float = 1.1,
) -> float:
    """Returns the step at which `measure`, which falls as the step grows, gives nearly `wanted` and at most `most`: the
    smallest that was tried, or the largest if all give too much. Tries `step` first, and `rounds` steps at most, none between
    two whose quotient is `close`. `tried` are the amounts that are known, by step; it receives those that are measured."""
    finest, coarsest = limits(step)
    for jump in range(1, rounds + 1):
        above = max((size for size, amount in tried.items() if amount > most), default=0.0)
        below = min((size for size, amount in tried.items() if amount <= most), default=math.inf)
        if tried.get(below, 0) >= (1 - NEAR) * wanted or below <= close * above:
            break
        if 0 < above and below < math.inf:  # interpolates between the logarithms, and halves their distance, in turn
            part = math.log(tried[above] / wanted) / math.log(tried[above] / max(tried[below], TINY))
            step = above * (below / above) ** (min(max(part, 0.1), 0.9) if jump % 2 else 0.5)
        elif tried:
            *_, before, last = [math.nan, *sorted(tried, reverse=above == 0)]
            factor = (max(tried[last], TINY) / wanted) ** 0.75 * (1.1 if above else 0.9)
            is_flat = abs(tried[last] - tried.get(before, math.inf)) < FLAT * wanted
            step = (coarsest if above else finest) if is_flat else last * min(max(factor, 8.0**-jump), 8.0**jump)
            step = min(max(step, finest), coarsest)
        if step in tried:
            break
        tried[step] = measure(step)
    return min((size for size, amount in tried.items() if amount <= most), default=max(tried))


def those_finer(
    coarse: Mapping[str, float], fine: Mapping[str, float], wanted: float, preferred: Collection[str] = ()
) -> set[str]:
    """Returns names of tensors that take a finer step, so that the amounts of all are nearly `wanted` in total, and not more,
    given the tensors' amounts in either step. Takes the `preferred` ones first, then those that change most."""
    left, names = wanted - sum(coarse.values()), set()
    for name in sorted(coarse, key=lambda name: (name not in preferred, coarse[name] - fine[name])):
        if 0 < fine[name] - coarse[name] <= left:
            names.add(name)
            left -= fine[name] - coarse[name]
    return names


class _Part(NamedTuple):
    """Rows of a tensor in a sample."""

    name: str
    weight: float  # number of the model's values that it stands for
    tensor: RawTensor
    base: RawTensor
    square: float  # mean square of its changes
    prior: float  # mean square of the base's values


class Sample:
    """A sample of the tensors that a task codes, to choose the step. It has the tensors at places spread evenly over all
    values, half of the places by the number of values and half by the size of their changes. Of small models it has all
    tensors, and of models without a change there all that changed. `twins` are by name of a tensor the base's name."""

    def __init__(self, model: TaskModel, base: TensorSource, twins: Mapping[str, str]):
        self._model, self._base, self._twins = model, base, twins
        sizes = np.array([math.prod(model.tensors.entry(name).shape) for name in twins], np.float64)
        if sizes.sum() <= FEW_VALUES:
            weights, most = sizes, FEW_VALUES
        else:
            energies = sizes * [self._part(name, 0, GLANCE).square for name in twins]
            shares = sizes / sizes.sum() / 2 + (energies / energies.sum() / 2 if energies.any() else 0)
            ends = np.cumsum(shares / shares.sum())
            places = np.searchsorted(ends, (np.arange(PLACES) + 0.5) / PLACES)
            weights, most = np.bincount(places, minlength=len(twins)) * sizes / shares / PLACES, MOST_VALUES
        self._parts = [self._part(name, float(weight), most) for name, weight in zip(twins, weights) if weight]
        if not any(part.square for part in self._parts):  # perhaps a few rows changed, such as added words
            whole = (self._part(name, float(size), int(size)) for name, size in zip(twins, sizes))
            self._parts = [part for part in whole if part.square]
        self._values = sum(part.weight for part in self._parts)
        self._energy = sum(part.weight * part.square for part in self._parts)
        self._gains: dict[float, float] = {}
        self._kept: dict[float, float] = {}  # by size of a step, the sum of the squares of the changes that are stored
        self._bits: dict[float, dict[str, float]] = {}  # by size of a step that was measured, of each tensor
        self._headers = 8 * sum(HEADER + 2 * len(name) for name in twins) / float(sizes.sum())  # bits per parameter

    @property
    def sums(self) -> dict[str, dict[str, float]]:
        """By tensor, the sums of `election.SUMS` that tell a fine-tune from another model, as they are in the whole model."""
        squares = {part.name: (part.weight * part.square, part.weight * part.prior) for part in self._parts}
        return {name: {"task_squares": task, "base_squares": base} for name, (task, base) in squares.items()}

    def first_step(self) -> float:
        """Returns a step to begin with; 0 if nothing in the sample changed. One huge change does not count."""
        sizes = sorted((part.square, part.weight) for part in self._parts if part.square)
        middle = np.searchsorted(np.cumsum([weight for _, weight in sizes]), sum(weight for _, weight in sizes) / 2)
        return FIRST_STEP * math.sqrt(sizes[middle][0]) if sizes else 0.0

    def measure(self, size: float) -> float:
        """Returns the bits per parameter that the sample takes in steps of this size."""

        def encode(i: int) -> tuple[float, float]:
            name, weight, tensor, base, *_ = self._parts[i]
            coarse = coarsened(tensor, base, Step(size).of(name, tensor))
            bits = 8 * (len(coarse.payload) - read_header(coarse.payload, "").body)
            return weight * bits / math.prod(tensor.shape), weight * _square(coarse.tensor, base)

        threads = threads_for(sum(part.tensor.data.size for part in self._parts))
        bits, squares = zip(*in_threads(encode, len(self._parts), threads))
        square = self._kept[size] = sum(squares)
        self._gains[size] = min(math.sqrt(self._energy / square), MOST_GAIN) if square else 1.0
        self._bits[size] = dict(zip((part.name for part in self._parts), bits))
        return sum(bits) / self._values + self._headers

    def factors(self, size: float, other: float) -> dict[str, float]:
        """Returns how many times the bits a tensor takes in steps of the `other` size. Tensors outside the sample count as its
        average."""
        for step in {size, other} - self._bits.keys():
            self.measure(step)
        before, after = self._bits[size], self._bits[other]
        average = sum(after.values()) / max(sum(before.values()), TINY)
        return {name: after[name] / before[name] if before.get(name) else average for name in self._twins}

    def is_lost(self, size: float) -> bool:
        """Checks whether steps of this size, which was measured, leave nothing of the changes."""
        return not self._kept[size]

    def step(self, size: float) -> Step:
        """Returns a step of this size with its gain."""
        if size not in self._gains and self._energy:
            self.measure(size)
        return Step(size, self._gains.get(size, 1.0))

    def _part(self, name: str, weight: float, most: int) -> _Part:
        """Returns a tensor's rows that are spread evenly and have about `most` values."""
        tensor, base = self._model.tensors.read(name), self._base.read(self._twins[name])
        if tensor.shape:
            rows = np.arange(0, min(tensor.shape[0], base.shape[0]), max(1, -(-math.prod(tensor.shape) // most)))
            tensor, base = _rows(tensor, rows), _rows(base, rows)
        zeros = RawTensor(base.dtype, base.shape, np.zeros_like(base.data))
        return _Part(name, weight, tensor, base, _square(tensor, base), _square(base, zeros))


def _rows(tensor: RawTensor, rows: np.ndarray) -> RawTensor:
    data = tensor.data.reshape(tensor.shape[0], -1)[rows].reshape(-1)
    return RawTensor(tensor.dtype, (len(rows), *tensor.shape[1:]), data)


def _square(tensor: RawTensor, base: RawTensor) -> float:
    """Returns the mean square of the finite changes of a tensor."""
    numbers = (as_numbers(data, tensor.dtype) for data in (tensor.data, cast(base.data, base.dtype, tensor.dtype)))
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.subtract(*numbers)
    change[~np.isfinite(change)] = 0
    return float(np.square(change, dtype=np.float64).mean())
