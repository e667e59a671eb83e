"""Computes the factors of a LoRA from the changes of a fine-tune's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from hf_ext.errors import CheckpointError
from hf_ext.fm_delta.lora_ranks import Aim, Spectrum
from hf_ext.integration.lora_layers import LoraLayers
from hf_ext.integration.weight_plan import Loaded
from hf_ext.storage.delta.change import Change
from hf_ext.storage.delta.low_rank import Components, leading
from hf_ext.storage.native import FLOATS, WIDTHS, cast
from hf_ext.storage.prefetch import Prefetcher, progress, threads_for
from hf_ext.storage.safetensors_file import RawTensor, torch_dtype
from hf_ext.storage.source import TensorSource


class Pair(NamedTuple):
    """The names of a tensor of the fine-tune and of its counterpart in the base."""

    tensor: str
    twin: str


class Factors(NamedTuple):
    """A LoRA of one matrix: left (rows × rank) and right (rank × columns), or of the experts' matrices, with the experts as a
    first dimension. `change` is the energy of the change that the products approximate; None if it is not known."""

    left: torch.Tensor
    right: torch.Tensor
    change: float | None


class Changes:
    """The differences of a fine-tune's tensors from those of its base.

    Args:
        tuned, base: the two models.
        pairs: the tensors to compare, by any names.
        parts: with experts' matrices to compare, by their parameters.

    Raises:
        CheckpointError: two tensors differ in shape or do not hold floats.
    """

    def __init__(self, tuned: TensorSource, base: TensorSource, pairs: Mapping[str, Pair], parts: LoraLayers | None = None):
        self._tuned, self._base, self._pairs = tuned, base, pairs
        self._parts = parts
        self._experts = parts.experts if parts else {}
        stored = [zip(part.tuned.all_names(), part.base.all_names()) for part in self._experts.values()]
        for pair in (*pairs.values(), *(Pair(*names) for part in stored for names in part)):
            entry, twin = tuned.entry(pair.tensor), base.entry(pair.twin)
            if not {entry.dtype, twin.dtype} <= FLOATS.keys():
                raise CheckpointError(
                    f"Tensor '{pair.tensor}' is {entry.dtype} in {tuned} and {twin.dtype} in the base {base}. A LoRA requires "
                    "floats of 16, 32 or 64 bits; give models that are not quantized."
                )
            if entry.shape != twin.shape:
                raise CheckpointError(
                    f"Tensor '{pair.tensor}' is {list(entry.shape)} in {tuned} and {list(twin.shape)} in the base {base}. A "
                    "LoRA cannot change shapes: resize the base as the fine-tune was resized, save it, and give that folder."
                )

    def shape(self, name: str) -> tuple[int, int]:
        """Returns the shape of a tensor as a matrix, or of an expert's matrix. A vector is one row."""
        if name in self._experts:
            return self._experts[name].shape[1:]
        shape = self._tuned.entry(self._pairs[name].tensor).shape
        return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))

    def dtype(self, name: str) -> str:
        """Returns the type of a LoRA's factors: that of the fine-tune's tensor, or F32 for F64."""
        tensor = self._experts[name].tuned.all_names()[0] if name in self._experts else self._pairs[name].tensor
        dtype = self._tuned.entry(tensor).dtype
        return "F32" if dtype == "F64" else dtype

    def cost(self, name: str) -> int:
        """Returns the bytes of one component."""
        count = self._experts[name].shape[0] if name in self._experts else 1
        return count * sum(self.shape(name)) * WIDTHS[self.dtype(name)]

    @contextmanager
    def change(self, name: str) -> Iterator[Change]:
        """Yields the change of a tensor as a matrix."""
        pair = self._pairs[name]
        yield Change(*_of_one_type(self._tuned.read(pair.tensor), self._base.read(pair.twin)), self.shape(name)[1])
        self._tuned.release(pair.tensor)
        self._base.release(pair.twin)

    def energies(self, names: Iterable[str]) -> dict[str, float]:
        """Returns the energy of each change: the sum of its squares."""

        def energy(name: str) -> float:
            with self.change(name) as change:
                return sum(float(change.rows(band)[1].sum()) for band in change.bands())

        return dict(Prefetcher(energy, {name: 0 for name in names if math.prod(self.shape(name))}))

    def rows(self, name: str) -> list[int]:
        """Returns the indices of the rows that changed."""
        with self.change(name) as change:
            energies = [change.rows(band)[1] for band in change.bands()]
        return np.flatnonzero(np.concatenate(energies)).tolist()

    def matrices(self, name: str) -> Iterator[Change]:
        """Yields the change of a tensor, or of each expert's matrix."""
        if self._parts is None or name not in self._experts:
            with self.change(name) as change:
                yield change
            return
        part, model = self._experts[name], self._parts.model

        def converted(loaded: Loaded, source: TensorSource) -> RawTensor:
            return RawTensor.from_torch(loaded.convert(model, lambda tensor: source.read(tensor).to_torch())[name])

        tensors = converted(part.tuned, self._tuned), converted(part.base, self._base)
        data, prediction, dtype = _of_one_type(*tensors)
        size = data.size // part.shape[0]
        for start in range(0, data.size, size):
            yield Change(data[start : start + size], prediction[start : start + size], dtype, part.shape[2])

    def components(self, name: str, rank: int) -> list[Components]:
        """Returns the leading singular components of a change, or of each expert's, somewhat more than `rank`.

        Raises:
            CheckpointError: the change is too large.
        """
        all_components = []
        for change in self.matrices(name):
            components = leading(change, rank, threads_for(self.cost(name)))
            if components is None:
                raise CheckpointError(f"The change of '{name}' of {self._tuned} is too large to decompose.")
            all_components.append(components)
        return all_components

    def factors(self, names: Iterable[str], aim: Aim) -> dict[str, Factors]:
        """Returns the LoRA of each matrix that gets a rank. Computes further components where their choice needs them."""
        limits = {name: min(*self.shape(name), aim.rank or max(self.shape(name))) for name in names}
        counts = {name: min(aim.first_rank, limit) for name, limit in limits.items()}
        components: dict[str, list[Components]] = {}
        missing, ranks = list(counts), dict[str, int]()

        def compute(name: str) -> list[Components]:
            return self.components(name, counts[name])

        with progress("Decomposing", len(missing)) as bar:
            while missing:
                sizes = {name: 4 * sum(self.shape(name)) * counts[name] for name in missing}
                for name, found in Prefetcher(compute, sizes):
                    components[name] = found
                    bar.update(not ranks)
                ranks = aim.ranks({name: _spectrum(found, counts[name], self.cost(name)) for name, found in components.items()})
                missing = [name for name, rank in ranks.items() if rank == counts[name] < limits[name] and not aim.is_uniform]
                counts |= {name: min(2 * counts[name], limits[name]) for name in missing}
        return {name: self._factors(name, components.pop(name), rank) for name, rank in ranks.items() if rank}

    def _factors(self, name: str, all_components: list[Components], rank: int) -> Factors:
        dtype, sides = torch_dtype(self.dtype(name)), []
        for components in all_components:
            root = torch.from_numpy(components.values[:rank]).float().sqrt()
            left, right = components.left(rank) * root, components.right(rank) * root[:, None]
            missing = rank - len(root)  # of an expert that changed less than others
            sides.append((pad(left, (0, missing)).to(dtype), pad(right, (0, 0, 0, missing)).to(dtype)))
        left, right = (torch.stack(side) if name in self._experts else side[0].contiguous() for side in zip(*sides))
        return Factors(left, right, sum(components.energy for components in all_components))


def _of_one_type(first: RawTensor, second: RawTensor) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the bytes of two tensors in a type that holds both, and the type."""
    dtypes = {first.dtype, second.dtype}
    dtype = dtypes.pop() if len(dtypes) == 1 else "F64" if "F64" in dtypes else "F32"
    return cast(first.data, first.dtype, dtype), cast(second.data, second.dtype, dtype), dtype


def _spectrum(all_components: list[Components], count: int, cost: int) -> Spectrum:
    """Returns the spectrum of a layer, or of experts that all get the same rank."""
    squares = np.zeros(min(count, max(len(components.values) for components in all_components)))
    for components in all_components:
        values = components.values[: len(squares)]
        squares[: len(values)] += np.square(values)
    return Spectrum(np.sqrt(squares), sum(components.energy for components in all_components), cost)
