"""The factors of a LoRA: the leading singular components of the changes of a fine-tune, and how many of each to take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.storage.delta.change import Change
from hf_ext.storage.delta.low_rank import Components, leading
from hf_ext.storage.native import FLOATS, WIDTHS, cast
from hf_ext.storage.prefetch import Prefetcher, progress, threads_for
from hf_ext.storage.safetensors_file import torch_dtype
from hf_ext.storage.source import TensorSource

if TYPE_CHECKING:
    from hf_ext.integration.lora_layers import Pair

DEFAULT_RANK = 32


class Spectrum(NamedTuple):
    """The change of a layer: its leading singular values in decreasing order, the sum of all squares, and the bytes that one
    component takes."""

    values: np.ndarray
    energy: float
    cost: int


@dataclass(frozen=True)
class Aim:
    """The goal of an extraction: one rank, a share of the energy, or a size.

    Attributes:
        rank: of all layers; with `energy` or `max_size`, the largest of a layer.
        energy: share of the energy of all changes to keep.
        max_size: bytes of all components.

    Raises:
        HfExtError: a value is impossible, or both `energy` and `max_size` are given.
    """

    rank: int | None = None
    energy: float | None = None
    max_size: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise HfExtError(f"rank={self.rank} is not supported: a LoRA has at least rank 1.")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise HfExtError(f"energy={self.energy} is not a share: give a number above 0, at most 1.")
        if self.max_size is not None and self.max_size < 1:
            raise HfExtError(f"max_size={self.max_size} is not a size: give a number of bytes.")
        if self.energy is not None and self.max_size is not None:
            raise HfExtError("energy and max_size cannot be combined: one of them determines the ranks.")

    @property
    def is_uniform(self) -> bool:
        """Checks whether all layers have the same rank."""
        return self.energy is None and self.max_size is None

    def ranks(self, spectra: Mapping[str, Spectrum]) -> dict[str, int]:
        """Returns the rank of each layer.

        Components of all layers are taken in the order of their energy for each byte, until they have the share or the size.
        """
        if self.is_uniform:
            return {name: len(spectrum.values) for name, spectrum in spectra.items()}
        squares = np.concatenate([np.square(spectrum.values) for spectrum in spectra.values()])
        counts = [len(spectrum.values) for spectrum in spectra.values()]
        costs = np.repeat([spectrum.cost for spectrum in spectra.values()], counts)
        layers = np.repeat(np.arange(len(counts)), counts)
        order = np.argsort(-squares / costs, kind="stable")
        if self.energy is not None:
            goal = self.energy * sum(spectrum.energy for spectrum in spectra.values())
            taken = int(np.searchsorted(squares[order].cumsum(), goal * (1 - 1e-9))) + 1
        else:
            taken = int((costs[order].cumsum() <= (self.max_size or 0)).sum())
        return dict(zip(spectra, np.bincount(layers[order[:taken]], minlength=len(counts)).tolist()))


class Factors(NamedTuple):
    """The LoRA of a matrix: left (rows × rank) and right (rank × columns). `change` is the energy of the change that their
    product approximates."""

    left: torch.Tensor
    right: torch.Tensor
    change: float


class Changes:
    """The differences of a fine-tune's tensors from those of its base.

    Args:
        tuned, base: the two models.
        pairs: the tensors to compare, by any names.

    Raises:
        CheckpointError: two tensors differ in shape or do not hold floats.
    """

    def __init__(self, tuned: TensorSource, base: TensorSource, pairs: Mapping[str, Pair]):
        self._tuned, self._base, self._pairs = tuned, base, pairs
        for tensor, twin in ((pair.tensor, pair.twin) for pair in pairs.values() if pair.twin):
            entry, prior = tuned.entry(tensor), base.entry(twin)
            if not {entry.dtype, prior.dtype} <= FLOATS.keys():
                raise CheckpointError(
                    f"Tensor '{tensor}' is {entry.dtype} in {tuned} and {prior.dtype} in the base {base}. A LoRA requires "
                    "floats of 16, 32 or 64 bits; give models that are not quantized."
                )
            if entry.shape != prior.shape:
                raise CheckpointError(
                    f"Tensor '{tensor}' is {list(entry.shape)} in {tuned} and {list(prior.shape)} in the base {base}. A LoRA "
                    "cannot change shapes: resize the base as the fine-tune was resized, save it, and give that folder."
                )

    def shape(self, name: str) -> tuple[int, int]:
        """Returns the shape of a tensor as a matrix. A vector is one row."""
        shape = self._tuned.entry(self._pairs[name].tensor).shape
        return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))

    def dtype(self, name: str) -> str:
        """Returns the type of a LoRA's factors: that of the fine-tune's tensor, or F32 for F64."""
        dtype = self._tuned.entry(self._pairs[name].tensor).dtype
        return "F32" if dtype == "F64" else dtype

    def cost(self, name: str) -> int:
        """Returns the bytes of one component."""
        return sum(self.shape(name)) * WIDTHS[self.dtype(name)]

    @contextmanager
    def change(self, name: str) -> Iterator[Change]:
        """Yields the change of a tensor as a matrix."""
        pair = self._pairs[name]
        tuned, base = self._tuned.read(pair.tensor), self._base.read(pair.twin)
        dtypes = {tuned.dtype, base.dtype}
        dtype = tuned.dtype if len(dtypes) == 1 else "F64" if "F64" in dtypes else "F32"
        yield Change(cast(tuned.data, tuned.dtype, dtype), cast(base.data, base.dtype, dtype), dtype, self.shape(name)[1])
        self._tuned.release(pair.tensor)
        self._base.release(pair.twin)

    def energies(self, names: Iterable[str]) -> dict[str, float | None]:
        """Returns the energy of each change, the sum of its squares, if it is not 0; None for tensors without counterpart."""

        def energy(name: str) -> float:
            with self.change(name) as change:
                return sum(float(change.rows(band)[1].sum()) for band in change.bands())

        pairs = {name: self._pairs[name] for name in names}
        sizes = {name: 0 for name, pair in pairs.items() if pair.twin and 0 not in self.shape(name)}
        unknown = dict.fromkeys(name for name, pair in pairs.items() if not pair.twin)
        return unknown | {name: change for name, change in Prefetcher(energy, sizes) if change}

    def rows(self, name: str) -> list[int]:
        """Returns the indices of the rows that changed."""
        with self.change(name) as change:
            energies = [change.rows(band)[1] for band in change.bands()]
        return np.flatnonzero(np.concatenate(energies)).tolist()

    def components(self, name: str, count: int) -> Components:
        """Returns the leading singular components of a change, somewhat more than `count`.

        Raises:
            CheckpointError: the change is too large.
        """
        with self.change(name) as change:
            components = leading(change, count, threads_for(self.cost(name)))
        if components is None:
            raise CheckpointError(f"The change of '{name}' of {self._tuned} is too large to decompose.")
        return components

    def factors(self, names: Iterable[str], aim: Aim) -> dict[str, Factors]:
        """Returns the LoRA of each matrix that gets a rank. Computes further components where their choice needs them."""
        limits = {name: min(*self.shape(name), aim.rank or max(self.shape(name))) for name in names}
        first = aim.rank or DEFAULT_RANK if aim.is_uniform else DEFAULT_RANK
        counts = {name: min(first, limit) for name, limit in limits.items()}
        components: dict[str, Components] = {}
        missing, ranks = list(counts), dict[str, int]()

        def compute(name: str) -> Components:
            return self.components(name, counts[name])

        with progress("Decomposing", len(missing)) as bar:
            while missing:
                sizes = {name: 4 * sum(self.shape(name)) * counts[name] for name in missing}
                for name, parts in Prefetcher(compute, sizes):
                    components[name] = parts
                    bar.update(not ranks)
                spectra = {
                    name: Spectrum(parts.values[: counts[name]], parts.energy, self.cost(name))
                    for name, parts in components.items()
                }
                ranks = aim.ranks(spectra)
                missing = [name for name, rank in ranks.items() if rank == counts[name] < limits[name] and not aim.is_uniform]
                counts |= {name: min(2 * counts[name], limits[name]) for name in missing}
        return {name: self._factors(name, components.pop(name), rank) for name, rank in ranks.items() if rank}

    def _factors(self, name: str, components: Components, rank: int) -> Factors:
        dtype, root = torch_dtype(self.dtype(name)), torch.from_numpy(components.values[:rank]).float().sqrt()
        left, right = components.left(rank) * root, components.right(rank) * root[:, None]
        return Factors(left.to(dtype), right.to(dtype), components.energy)
