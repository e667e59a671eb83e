"""The interface of all sources of tensors by name: plain and compressed checkpoints, tasks of a merge, merged adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hf_ext.storage.names import Names
from hf_ext.storage.safetensors_file import Entry, RawTensor

if TYPE_CHECKING:
    import torch

FINGERPRINT_SAMPLE = 1024  # bytes read at each of three places of a tensor


class TensorSource(ABC):
    """A source of tensors by name, each read on request.

    Attributes:
        name: folder, Hub id or another name for messages.
        revision: commit on the Hub; None for anything local.
        paths: the files of the source, then those of its bases; empty if the tensors come from memory.
        digest: of sources that decode: a text that differs if the name or the contents of any tensor do.
    """

    name: str
    digest: str
    revision: str | None = None
    paths: Sequence[Path] = ()

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of all tensors."""

    @abstractmethod
    def entry(self, name: str) -> Entry:
        """Returns dtype, shape and size of a tensor, without reading it."""

    @abstractmethod
    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        """Returns a tensor.

        Args:
            out: writable bytes of the tensor's size. A source that computes the tensor may do so there; its result then holds
                this array.
        """

    def read_on(self, names: Sequence[str], device: torch.device) -> list[torch.Tensor]:
        """Returns tensors on a device. A source may decode them there, see `delta/device_decode.py`."""
        return [self.read(name).to_device(device) for name in names]

    def read_rows(self, name: str, begin: int, end: int) -> RawTensor:
        """Returns the rows from `begin` to `end` of a tensor, along its first dimension."""
        return rows_of(self.read(name), begin, end)

    def identity(self, name: str) -> Hashable:
        """Returns a value that two tensors of one dtype and shape share only if their bytes are equal."""
        return xxhash.xxh3_64_intdigest(self.read(name).data)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:  # noqa: B027
        """Gives back the memory that reading these bytes of a tensor took, where they are mapped from a file."""

    def require_whole(self) -> None:  # noqa: B027
        """Raises CorruptFileError if a mapped file was truncated since it was opened: reading it would end the process."""

    def require_intact(self) -> None:  # noqa: B027
        """Raises CorruptFileError if a payload is damaged. Without this check, reading a tensor raises the error."""

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __str__(self) -> str:
        return f"'{self.name}'" + (f" at revision {self.revision}" if self.revision else "")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all names, dtypes and shapes and of a few bytes of every tensor. It does not depend on sharding."""
        return fingerprint_of({name: sample(name, self.read(name)) for name in self.names()})

    def twin_of(self, name: str) -> str | None:
        """Returns the name that the weight `name` has here, see names.py; None if it is not here."""
        return self._names.twin_of(name)

    def distinct(self, names: Sequence[str]) -> list[str]:
        """Returns the first of some names of one weight, and those whose tensors differ from the first one's."""
        kinds = {name: (self.entry(name)[:2], self.identity(name)) for name in names}
        return [name for name in names if name == names[0] or kinds[name] != kinds[names[0]]]

    @cached_property
    def _names(self) -> Names:
        return Names(self.names())


class Renamed(TensorSource):
    """A source whose tensors have other names: `names` are by new name those of the source."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]):
        self.name, self.revision, self.paths = source.name, source.revision, source.paths
        self._source, self._name_of = source, names

    def names(self) -> list[str]:
        return list(self._name_of)

    def entry(self, name: str) -> Entry:
        return self._source.entry(self._name_of[name])

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        return self._source.read(self._name_of[name], out)

    def read_on(self, names: Sequence[str], device: torch.device) -> list[torch.Tensor]:
        return self._source.read_on([self._name_of[name] for name in names], device)

    def read_rows(self, name: str, begin: int, end: int) -> RawTensor:
        return self._source.read_rows(self._name_of[name], begin, end)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        self._source.release(self._name_of[name], begin, end)

    def require_whole(self) -> None:
        self._source.require_whole()


class NoBase(TensorSource):
    """The base of weights that are stored without one. It has no tensors."""

    name = ""

    def names(self) -> list[str]:
        return []

    def entry(self, name: str) -> Entry:
        raise KeyError(name)

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        raise KeyError(name)


def rows_of(tensor: RawTensor, begin: int, end: int) -> RawTensor:
    """Returns the rows from `begin` to `end` of a tensor."""
    row = tensor.data.size // max(tensor.shape[0], 1)
    return RawTensor(tensor.dtype, (end - begin, *tensor.shape[1:]), tensor.data[begin * row : end * row])


def sample(name: str, tensor: RawTensor) -> bytes:
    """Returns the bytes of a tensor that a fingerprint covers."""
    size = tensor.data.size
    parts = [tensor.data[start:][:FINGERPRINT_SAMPLE] for start in (0, size // 2, max(size - FINGERPRINT_SAMPLE, 0))]
    return f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode() + b"".join(part.tobytes() for part in parts)


def fingerprint_of(samples: Mapping[str, bytes]) -> str:
    """Returns the fingerprint of a checkpoint whose tensors have these samples, by name."""
    digest = xxhash.xxh3_128()
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()
