"""Chooses the ranks of a LoRA's layers from the singular values of their changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_ext.errors import HfExtError
from hf_ext.storage.delta.low_rank import Components
from hf_ext.storage.native import WIDTHS
from hf_ext.storage.prefetch import Prefetcher, progress

DEFAULT_RANK = 32


class Matrix(NamedTuple):
    """The shape of a layer's change, and the type of its factors."""

    rows: int
    columns: int
    dtype: str

    @property
    def cost(self) -> int:
        """The bytes of one component."""
        return (self.rows + self.columns) * WIDTHS[self.dtype]


class Spectrum(NamedTuple):
    """The change of a layer: its leading singular values in decreasing order, the sum of all squares, and the bytes that one
    component takes."""

    values: np.ndarray
    energy: float
    cost: int


@dataclass(frozen=True)
class Aim:
    """What a LoRA is to be: of one rank, of a share of the energy, or of a size.

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


def best_components(
    matrices: Mapping[str, Matrix], aim: Aim, decompose: Callable[[str, int], Components]
) -> dict[str, tuple[Components, int]]:
    """Returns the leading singular components of each layer that gets a rank, with the rank.

    Args:
        matrices: the layers.
        aim: determines the ranks.
        decompose: returns the components of a layer, at least the given number. Called again with a larger number for layers
            that may need more.
    """
    limits = {name: min(matrix.rows, matrix.columns) for name, matrix in matrices.items()}
    limits = {name: min(limit, aim.rank or limit) for name, limit in limits.items()}
    first = aim.rank or DEFAULT_RANK if aim.is_uniform else DEFAULT_RANK
    counts = {name: min(first, limit) for name, limit in limits.items()}
    components: dict[str, Components] = {}
    spectra: dict[str, Spectrum] = {}
    ranks: dict[str, int] = {}
    missing = list(counts)

    def compute(name: str) -> Components:
        return decompose(name, counts[name])

    with progress("Decomposing", len(missing)) as bar:
        while missing:
            sizes = {name: 4 * (matrices[name].rows + matrices[name].columns) * counts[name] for name in missing}
            for name, parts in Prefetcher(compute, sizes):
                components[name] = parts
                spectra[name] = Spectrum(parts.values[: counts[name]], parts.energy, matrices[name].cost)
                bar.update(not ranks)
            ranks = aim.ranks(spectra)
            missing = [name for name, rank in ranks.items() if rank == counts[name] < limits[name] and not aim.is_uniform]
            counts |= {name: min(2 * counts[name], limits[name]) for name in missing}
    return {name: (components[name], rank) for name, rank in ranks.items() if rank}
