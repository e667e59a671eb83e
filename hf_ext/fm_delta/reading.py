"""Reading single tensors of plain or compressed checkpoints, as with safetensors' `safe_open`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, TypeAlias

from hf_ext.storage.hub import Hub
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import open_checkpoint

if TYPE_CHECKING:
    import torch

Index: TypeAlias = int | slice | EllipsisType


def open(
    name: str | os.PathLike,
    revision: str | None = None,
    *,
    base: str | os.PathLike | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike | None = None,
    local_files_only: bool = False,
) -> OpenCheckpoint:
    """Opens a checkpoint to read some of its tensors, as safetensors' `safe_open` does with one file.

    The checkpoint may be plain or compressed, in one file or in shards, and its base may be compressed too. Files on the Hub
    are downloaded into the cache first. Every payload and every decoded tensor is checked against its checksum.

    Args:
        name: a folder, or the id of a repository on the Hub.
        revision: branch, tag or commit on the Hub.
        base: folder or Hub id of the base, if it is no longer where config.json says.
        token, cache_dir, local_files_only: as for `from_pretrained`, and for the base too.

    Raises:
        BaseModelError: there are no weights of that name, or the base is missing or is another model.
        CheckpointError: the files hold several models merged into one. `hf-ext extract` writes one of them.
        CorruptFileError: a header is damaged.
    """
    return OpenCheckpoint(open_checkpoint(name, revision, Hub(token, cache_dir, local_files_only), base))


class OpenCheckpoint:
    """An open checkpoint, which reads single tensors. `open` returns it.

    It is a context manager. Several threads may read at a time.
    """

    def __init__(self, source: TensorSource):
        self._opened: TensorSource | None = source

    def keys(self) -> list[str]:
        """Returns the names of all tensors."""
        return self._source.names()

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor, in memory of its own.

        Raises:
            KeyError: the checkpoint has no tensor of that name.
            BaseModelError: the base has changed.
            CorruptFileError: the tensor is damaged.
        """
        self._source.require_whole()
        tensor = self._source.read(self._require(name)).to_torch()
        self._source.release(name)
        return tensor

    def get_slice(self, name: str) -> TensorSlice:
        """Returns a tensor to take a part of: `get_slice(name)[a:b]`. Reads nothing yet.

        Raises:
            KeyError: the checkpoint has no tensor of that name.
        """
        return TensorSlice(self._source, self._require(name))

    def close(self) -> None:
        """Closes the files. Tensors that were read stay valid."""
        self._opened = None

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _source(self) -> TensorSource:
        if self._opened is None:
            raise ValueError("The checkpoint is closed.")
        return self._opened

    def _require(self, name: str) -> str:
        if name not in self._source:
            raise KeyError(f"{self._source} has no tensor '{name}'")
        return name


class TensorSlice:
    """A tensor of an open checkpoint. Indexing reads a part of it: `[a:b]`, `[i]` or `[a:b, :, j]`.

    Of a plain tensor, only the rows from `a` to `b` are read. Of a compressed tensor with three or more dimensions and large
    matrices, such as the experts' weights, only these rows are decoded. Any other compressed tensor is decoded whole.
    """

    def __init__(self, source: TensorSource, name: str):
        self._source, self._name = source, name

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor."""
        return list(self._source.entry(self._name).shape)

    def get_dtype(self) -> str:
        """Returns the type of the values by its name in safetensors files, such as `BF16`."""
        return self._source.entry(self._name).dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Returns a part of the tensor, in memory of its own.

        Raises:
            IndexError: the tensor has no such part.
            BaseModelError: the base has changed.
            CorruptFileError: the tensor is damaged.
        """
        within: tuple[Index, ...]
        first, *rest = (index if isinstance(index, tuple) else (index,)) or (...,)
        shape = self._source.entry(self._name).shape
        self._source.require_whole()
        if not shape or isinstance(first, bool) or not isinstance(first, int | slice):
            return self._source.read(self._name).to_torch()[index].clone()
        if isinstance(first, int):
            if not -shape[0] <= first < shape[0]:
                raise IndexError(f"index {first} is out of range for dimension 0 with size {shape[0]}")
            begin = first % shape[0]
            end, within = begin + 1, (0, *rest)
        else:
            begin, end, step = first.indices(shape[0])
            end, within = max(begin, end), (slice(None, None, step), *rest)
        return self._source.read_rows(self._name, begin, end).to_torch()[within].clone()
