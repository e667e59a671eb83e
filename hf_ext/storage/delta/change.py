"""The difference between a matrix and that of a base, read in bands of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch

from hf_ext.storage.native import FLOATS, WIDTHS, _native
from hf_ext.storage.prefetch import check_awaited, in_threads
from hf_ext.storage.safetensors_file import torch_dtype

PIECE = 1 << 18  # values whose change is computed at once
GROUPS = 16  # of bands of rows, each with a sum of its own


class Change:
    """The difference between a matrix and that of a base, both given as bytes of one type and size, with rows of `length`
    values. Rows are computed each time they are needed."""

    scale = 1.0  # factor of the change that `rows` returns, to that of the tensor

    def __init__(self, data: np.ndarray, base_data: np.ndarray, dtype: str, length: int):
        self.dtype = dtype
        self.values, self.base = (array.reshape(-1, length * WIDTHS[dtype]) for array in (data, base_data))
        self.shape = len(self.values), length

    def rows(self, rows: slice | np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """Returns the change of some rows (float32, 0 where it is not finite) and the sum of the squares of each."""
        check_awaited()
        values, base = (np.ascontiguousarray(array[rows]) for array in (self.values, self.base))
        change, energies = np.empty((len(values), self.shape[1]), np.float32), np.empty(len(values))
        _native.subtract(values, base, FLOATS[self.dtype], self.shape[1], change, energies)
        return torch.from_numpy(change), energies

    @cached_property
    def energies(self) -> np.ndarray:
        """The sum of the squares of each row."""
        return np.concatenate([self.rows(band)[1] for band in self.bands()])

    @property
    def energy(self) -> float:
        """The sum of the squares of all rows."""
        return float(self.energies.sum())

    def product(self, vectors: torch.Tensor, threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the change times some vectors (columns × width), and the transposed change times these images. It reads the
        change once, and gets `energies` with it. The result does not depend on the number of threads."""
        bands, images = list(self.bands()), torch.empty(vectors.shape[1], self.shape[0], dtype=torch.float32)
        energies = np.empty(self.shape[0])

        def multiply(group: int) -> torch.Tensor:
            back = torch.zeros(vectors.shape[::-1], dtype=torch.float32)
            for band in bands[group::GROUPS]:
                part, energies[band] = self.rows(band)
                images[:, band] = vectors.T @ part.T  # much faster than part @ vectors if these are narrow
                back += images[:, band] @ part
            return back

        back = torch.stack(in_threads(multiply, min(GROUPS, len(bands)), threads)).sum(0)
        self.energies = energies
        return images.T, back.T

    def bands(self) -> Iterator[slice]:
        """Yields the ranges of rows of about PIECE values that together cover the matrix."""
        rows, step = self.shape[0], max(1, PIECE // self.shape[1])
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def sample(self, values: int) -> np.ndarray:
        """Returns the indices of rows with at most this many values in total: a random row of each stretch, with a fixed
        seed."""
        count = min(max(1, values // self.shape[1]), self.shape[0])
        if count == self.shape[0]:
            return np.arange(count)
        starts = np.arange(count + 1) * self.shape[0] // count
        return starts[:-1] + (np.random.default_rng(0).random(count) * np.diff(starts)).astype(np.int64)

    def pair(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the values in some rows in their own type, and the base's as float32."""
        values, base = (torch.from_numpy(array[rows]).view(torch_dtype(self.dtype)) for array in (self.values, self.base))
        return values, base.float()


class ScaledChange(Change):
    """A change times a power of 4, so that single precision can add up its squares. `largest` is the magnitude of its largest
    value, before that."""

    def __init__(self, data: np.ndarray, base_data: np.ndarray, dtype: str, length: int):
        super().__init__(data, base_data, dtype, length)
        self.largest = max((float(self._difference(band).abs().max()) for band in self.bands()), default=0.0)
        if 0 < self.largest < math.inf:
            self.scale = 4.0 ** (-math.frexp(self.largest)[1] // 2)

    def rows(self, rows: slice | np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        check_awaited()
        change = self._difference(rows) * self.scale
        return change.float(), change.square().sum(1).numpy()

    def _difference(self, rows: slice | np.ndarray) -> torch.Tensor:
        values, base = (
            torch.from_numpy(array[rows].copy()).view(torch_dtype(self.dtype)).double() for array in (self.values, self.base)
        )
        return values - base
