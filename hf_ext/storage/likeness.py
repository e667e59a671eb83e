"""An estimate of how well one checkpoint predicts another, from samples of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.names import layer_of
from hf_ext.storage.native import FLOATS, MANTISSA, WIDTHS, cast
from hf_ext.storage.safetensors_file import Entry, RawTensor
from hf_ext.storage.source import TensorSource

# Full fine-tunes agree with their base in more than 0.9 of the values; noise of a tenth of the weights' spread leaves 0.7, and
# shuffled weights agree in 0.1.
LIKELY_AGREEMENT, LIKELY_SHARE = 0.35, 0.5  # the share is that of the parameters that the base must have too
CODES = {"U8", "I8", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"}  # of quantized weights, compared byte by byte
RUNS, LENGTH = 16, 64  # from each tensor, 16 evenly spread runs of 64 values are read: at most 8 KB


@dataclass(frozen=True)
class Likeness:
    """An estimate of how well a checkpoint predicts another, the source. Counts tensors of floats and of quantized weights.

    Attributes:
        shared: share of the source's parameters that the other checkpoint has too, by name and shape.
        agreement: share of those that have the same sign and exponent, or the same code, in both; about 0.1 for unrelated
            weights.
        bits: estimated bits per parameter of the source when stored as a difference at level 1; parameters that are not shared
            take their full width.
        same_layers: whether the stacks of layers that both have are equal in number and shape of layers.
    """

    shared: float
    agreement: float
    bits: float
    same_layers: bool

    @property
    def objection(self) -> str | None:
        """The reason why the checkpoint cannot be the source's base; None if it may be."""
        if self.shared < LIKELY_SHARE:
            return "most tensors have other names or shapes"
        return "same shapes, other weights" if self.agreement < LIKELY_AGREEMENT else None


def unrelated(source: TensorSource, base: TensorSource, is_quantized: bool = False) -> str | None:
    """Returns why a model cannot be a checkpoint's base: most tensors are not there, or have unrelated values. Returns None if
    it may be the base. Compares a few KB of each tensor, or, where one of the two is compressed, only names and shapes."""
    is_plain = isinstance(source, Checkpoint) and isinstance(base, Checkpoint)
    measured = likeness(source, base, LIKELY_SHARE if is_plain else math.inf, is_quantized)
    reason = measured.objection if is_plain or measured.shared < LIKELY_SHARE else None
    return reason and f"{base.name} is not the base of {source.name}: {reason}."


def likeness(src: TensorSource, other: TensorSource, least: float = 0.0, is_quantized: bool = False) -> Likeness:
    """Compares two checkpoints. If they share less than `least`, reads no tensors, and `agreement` is 0. Counts codes only if
    the weights are quantized: plain models have masks and positions in these types, equal in all of a kind."""
    counted = FLOATS.keys() | (CODES if is_quantized else set())
    names = [name for name in src.names() if src.entry(name).dtype in counted]
    twins = {name: twin for name in names if (twin := other.twin_of(name)) and _comparable(src, name, other, twin)}
    same_layers = all(src.entry(name).shape == other.entry(twin).shape for name, twin in twins.items() if layer_of(name))
    same_layers &= _as_high(names, twins) and _as_high(other.names(), twins.values())
    total = sum(_count(src.entry(name)) for name in names)
    common = {name: min(_count(src.entry(name)), _count(other.entry(twin))) for name, twin in twins.items()}
    shared = sum(common.values())
    bits: float = sum(
        8 * WIDTHS.get(src.entry(name).dtype, 1) * (_count(src.entry(name)) - common.get(name, 0)) for name in names
    )
    agreeing = 0.0
    if shared and shared >= least * total:
        for name, twin in twins.items():
            share, length = compare(src.read(name), other.read(twin), common[name])
            agreeing += share * common[name]
            bits += length * common[name]
    return Likeness(shared / max(total, 1), agreeing / max(shared, 1), bits / max(total, 1), same_layers)


def compare(tensor: RawTensor, other: RawTensor, count: int) -> tuple[float, float]:
    """Compares two tensors by samples of their first `count` values, or bytes of codes, with floats of `other` cast to the type
    of `tensor`. Returns the share of values with the same sign and exponent, and the estimated bits per value of the signed
    distances between them, as integers in the order of floats: the entropy of sign and length of the distances, and their bits
    below the highest one."""
    if not count:
        return 0.0, 0.0
    if tensor.dtype in CODES:
        equal = float((_sample(tensor, count) == _sample(other, count)).mean())
        return equal, 8 * (1 - equal)
    kind = np.dtype(f"<u{WIDTHS[tensor.dtype]}")
    a = _sample(tensor, count).view(kind)
    b = cast(_sample(other, count), other.dtype, tensor.dtype).view(kind)
    low, high = np.sort([_ordered(a), _ordered(b)], axis=0)
    same = a >> MANTISSA[tensor.dtype] == b >> MANTISSA[tensor.dtype]
    distances = (high - low).astype(np.float64)
    below = np.floor(np.log2(np.maximum(distances, 1)))
    _, counts = np.unique(np.where(_ordered(a) > _ordered(b), 1, -1) * (below + (distances > 0)), return_counts=True)
    shares = counts / counts.sum()
    return float(same.mean()), float(below.mean() - shares @ np.log2(shares))


def _sample(tensor: RawTensor, count: int) -> np.ndarray:
    """Returns the bytes of a tensor's first `count` values, or of evenly spread runs of them if there are many."""
    width = WIDTHS.get(tensor.dtype, 1)
    values = tensor.data[: count * width].reshape(count, width)
    if count > RUNS * LENGTH:
        starts = np.linspace(0, count - LENGTH, RUNS).astype(np.int64)
        values = np.concatenate([values[start : start + LENGTH] for start in starts])
    return values.copy().reshape(-1)  # aligned, as the codec's cast requires


def _ordered(values: np.ndarray) -> np.ndarray:
    """Returns the bits of floats as unsigned integers that sort in the same order."""
    sign = values.dtype.type(1 << (8 * values.itemsize - 1))
    return np.where(values & sign, ~values, values | sign)


def _comparable(src: TensorSource, name: str, other: TensorSource, twin: str) -> bool:
    """Checks whether two tensors are the same parameter, perhaps with another number of rows (resized embeddings). The names in
    a model of one layer have endings that fit every layer, so the numbers of the layers must be equal."""
    layers = [layer and layer[1] for layer in (layer_of(name), layer_of(twin))]
    entry, counterpart = src.entry(name), other.entry(twin)
    alike = len(entry.shape) == len(counterpart.shape) and entry.shape[1:] == counterpart.shape[1:]
    is_comparable = counterpart.dtype in FLOATS if entry.dtype in FLOATS else counterpart.dtype == entry.dtype
    return alike and is_comparable and layers[0] == layers[1]


def _count(entry: Entry) -> int:
    """Returns the number of a tensor's values, or of bytes of codes."""
    return entry.nbytes if entry.dtype in CODES else math.prod(entry.shape)


def _as_high(names: Iterable[str], common: Iterable[str]) -> bool:
    """Checks whether each stack with names in `common` has names of all its layers there. Other stacks are new heads."""
    layers = {layer for name in common if (layer := layer_of(name))}
    stacks = {stack for stack, _ in layers}
    return all(layer in layers for name in names if (layer := layer_of(name)) and layer[0] in stacks)
