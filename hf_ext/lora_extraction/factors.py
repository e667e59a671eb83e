"""The factors of a LoRA: the leading singular components of the changes of a fine-tune, and how many of each to take."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.storage.delta.change import Change, ScaledChange
from hf_ext.storage.delta.low_rank import MOST_ENERGY
from hf_ext.storage.native import FLOATS, WIDTHS, cast
from hf_ext.storage.prefetch import Prefetcher, progress
from hf_ext.storage.safetensors_file import torch_dtype
from hf_ext.storage.source import TensorSource, rows_of
from hf_ext.storage.subspace import Components, block_width, leading, random_directions

DEFAULT_RANK = 32
LEAST_SQUARE = 1e-30  # mean square of a change below which single precision may lose squares
ROUNDS = 4  # of subspace iteration


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


class Decomposed(NamedTuple):
    """The leading singular components of a change, and the energy of all. A change that single precision cannot add up is
    multiplied by `scale` before."""

    components: Components
    energy: float = 0.0
    scale: float = 1.0


class Factors(NamedTuple):
    """The LoRA of a matrix: left (rows × rank) and right (rank × columns). `change` is the energy of the change that their
    product approximates, `kept` the energy that it keeps, as rounded to the type of the factors."""

    left: torch.Tensor
    right: torch.Tensor
    change: float
    kept: float


class Compared(NamedTuple):
    """A tensor of the fine-tune with its counterpart in the base.

    Attributes:
        tensor, twin: their names in the two models.
        rows: the numbers of rows in the two models.
        shape: of the rows that both have, as a matrix. A vector is one row.
        dtypes: the types in the two models.
        dtype: type of a LoRA's factors: that of the fine-tune's tensor, or F32 for F64.
        cost: bytes of one component of a LoRA; 0 if the tensor does not hold floats.
    """

    tensor: str
    twin: str
    rows: tuple[int, int]
    shape: tuple[int, int]
    dtypes: tuple[str, str]
    dtype: str
    cost: int


class Changes:
    """The differences of a fine-tune's tensors from those of its base. Rows that only one of the models has, such as those of
    added tokens, do not count.

    Args:
        tuned, base: the two models.
        pairs: the names of the tensors to compare in the two models, by any names. Empty in the base for those without
            counterpart.
        layers: names of those that get a LoRA.

    Attributes:
        compared: the tensors that have a counterpart.
        resized: names of those that have more rows in one of the models.

    Raises:
        CheckpointError: two tensors differ in the shape of their rows, or a layer's tensors do not hold floats.
    """

    def __init__(self, tuned: TensorSource, base: TensorSource, pairs: Mapping[str, tuple[str, str]], layers: Collection[str]):
        self._tuned, self._base = tuned, base
        self.compared: dict[str, Compared] = {}
        for name, (tensor, twin) in pairs.items():
            if not twin:
                continue
            entry, prior = tuned.entry(tensor), base.entry(twin)
            if name in layers and not {entry.dtype, prior.dtype} <= FLOATS.keys():
                raise CheckpointError(
                    f"Tensor '{tensor}' is {entry.dtype} in {tuned} and {prior.dtype} in the base {base}. A LoRA requires "
                    "floats of 16, 32 or 64 bits; give models that are not quantized."
                )
            if entry.shape[1:] != prior.shape[1:] or len(entry.shape) != len(prior.shape):
                raise CheckpointError(
                    f"Tensor '{tensor}' is {list(entry.shape)} in {tuned} and {list(prior.shape)} in the base {base}. A LoRA "
                    "cannot change shapes."
                )
            rows = (entry.shape[0], prior.shape[0]) if entry.shape else (1, 1)
            shape = (min(rows), math.prod(entry.shape[1:])) if len(entry.shape) > 1 else (1, min(rows))
            dtype = "F32" if entry.dtype == "F64" else entry.dtype
            cost = sum(shape) * WIDTHS.get(dtype, 0)
            self.compared[name] = Compared(tensor, twin, rows, shape, (entry.dtype, prior.dtype), dtype, cost)
        self.resized = {name for name, pair in self.compared.items() if pair.rows[0] != pair.rows[1]}

    @contextmanager
    def change(self, name: str) -> Iterator[Change | None]:
        """Yields the change of a tensor as a matrix; None if there is none.

        Raises:
            CheckpointError: a changed tensor holds values that are not finite.
        """
        pair = self.compared[name]
        rows, columns = pair.shape
        tuned, base = self._tuned.read(pair.tensor), self._base.read(pair.twin)
        if name in self.resized:
            tuned, base = (rows_of(raw, 0, min(pair.rows)) for raw in (tuned, base))
        if tuned.dtype == base.dtype and np.array_equal(tuned.data, base.data):
            yield None
        else:
            for source, tensor, raw in ((self._tuned, pair.tensor, tuned), (self._base, pair.twin, base)):
                if not torch.stack(raw.to_torch().aminmax()).isfinite().all():
                    raise CheckpointError(
                        f"Tensor '{tensor}' of {source} holds values that are NaN or infinite. A LoRA requires finite weights."
                    )
            dtype = tuned.dtype if tuned.dtype == base.dtype else "F64" if "F64" in pair.dtypes else "F32"
            data, prior = (cast(raw.data, raw.dtype, dtype) for raw in (tuned, base))
            change = Change(data, prior, dtype, columns)
            if dtype == "F64" or not LEAST_SQUARE * rows * columns < change.energy < MOST_ENERGY:
                change = ScaledChange(data, prior, dtype, columns)
                if change.largest > torch.finfo(torch.float32).max:
                    raise CheckpointError(f"The change of '{pair.tensor}' of {self._tuned} is too large for a LoRA in float32.")
            yield change
        self._tuned.release(pair.tensor)
        self._base.release(pair.twin)

    def energies(self, names: Iterable[str]) -> dict[str, float | None]:
        """Returns the energy of each change, the sum of its squares, if it is not 0; None for tensors without counterpart, for
        those that are not floats, and where all that changed is the number of rows."""

        def energy(name: str) -> float | None:
            pair = self.compared[name]
            if not {*pair.dtypes} <= FLOATS.keys():
                is_equal = name not in self.resized and self._tuned.identity(pair.tensor) == self._base.identity(pair.twin)
                return 0.0 if is_equal else None
            with self.change(name) as change:
                if change is None:
                    return None if name in self.resized else 0.0
                return change.energy / change.scale**2

        pairs = {name: self.compared.get(name) for name in names}
        unknown = dict.fromkeys(name for name, pair in pairs.items() if pair is None)
        sizes = {name: 0 for name, pair in pairs.items() if pair and 0 not in pair.shape}
        return unknown | {name: change for name, change in Prefetcher(energy, sizes) if change != 0}

    def rows(self, name: str) -> list[int]:
        """Returns the indices of the rows that changed or were added."""
        (tuned, base), rows = self.compared[name].rows, np.array([], int)
        with self.change(name) as change:
            if change is not None:
                rows = np.flatnonzero(np.concatenate([change.rows(band)[1] for band in change.bands()]))
        return [*rows.tolist(), *range(base, tuned)]

    def decomposed(self, name: str, count: int) -> Decomposed:
        """Returns the leading singular components of a change, at most `count`."""
        with self.change(name) as change:
            if change is None:
                rows, columns = self.compared[name].shape
                return Decomposed(Components(np.empty(0), torch.empty(rows, 0), torch.empty(0, columns)))
            start = random_directions(change.shape[1], block_width(count, change.shape))
            values, left, right = leading(change.product, start, ROUNDS)
            return Decomposed(Components(values[:count], left[:, :count], right[:count]), change.energy, change.scale)

    def factors(self, names: Iterable[str], aim: Aim) -> dict[str, Factors]:
        """Returns the LoRA of each matrix that gets a rank. Computes further components where their choice needs them."""
        pairs = {name: self.compared[name] for name in names}
        limits = {name: min(*pair.shape, aim.rank or max(pair.shape)) for name, pair in pairs.items()}
        first = aim.rank or DEFAULT_RANK if aim.is_uniform else DEFAULT_RANK
        counts = {name: min(first, limit) for name, limit in limits.items()}
        decomposed: dict[str, Decomposed] = {}
        missing, ranks = list(counts), dict[str, int]()

        with progress("Decomposing", len(missing)) as bar:
            while missing:
                sizes = {name: 4 * sum(pairs[name].shape) * counts[name] for name in missing}
                for name, result in Prefetcher(lambda name: self.decomposed(name, counts[name]), sizes):
                    decomposed[name] = result
                    bar.update(not ranks)
                spectra = {
                    name: Spectrum(components.values / scale, energy / scale**2, pairs[name].cost)
                    for name, (components, energy, scale) in decomposed.items()
                }
                ranks = aim.ranks(spectra)
                missing = [name for name, rank in ranks.items() if rank == counts[name] < limits[name] and not aim.is_uniform]
                counts.update({name: min(2 * counts[name], limits[name]) for name in missing})

        sizes = {name: pairs[name].cost * rank for name, rank in ranks.items() if rank}
        # In threads of their own, as PyTorch's threads cost more than they save here.
        return dict(Prefetcher(lambda name: self._factors(name, decomposed.pop(name), ranks[name]), sizes))

    def _factors(self, name: str, decomposed: Decomposed, rank: int) -> Factors:
        (components, energy, scale), pair = decomposed, self.compared[name]
        exact = components.factors(rank, scale)
        left, right = (factor.to(torch_dtype(pair.dtype)) for factor in exact)
        if not (left.isfinite().all() and right.isfinite().all()):
            raise CheckpointError(f"The change of '{pair.tensor}' of {self._tuned} is too large for a LoRA in {pair.dtype}.")
        U, V = left.double(), right.double()
        # The inner products of the exact and of the rounded product of factors with the rounded one.
        inner, square = (float(((u.double().T @ U) * (v.double() @ V.T)).sum()) for u, v in (exact, (left, right)))
        left = torch.nn.functional.pad(left, (0, 0, 0, pair.rows[1] - len(left)))  # rows that only the base has
        return Factors(left, right, energy / scale**2, kept=2 * inner - square)
