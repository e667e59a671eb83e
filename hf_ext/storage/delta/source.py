"""Compressed files as a source of tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hf_ext.errors import BaseModelError, CorruptFileError
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.codec import decode_raw, decode_rows
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.delta.payload import STACKED, Header, peek_header
from hf_ext.storage.prefetch import Prefetcher, progress, threads_for
from hf_ext.storage.safetensors_file import Entry, RawTensor, TensorFile
from hf_ext.storage.source import TensorSource, rows_of

if TYPE_CHECKING:
    import torch


class DeltaCheckpoint(TensorSource):
    """The tensors of compressed files, each decoded on request.

    Attributes:
        base: the base, plain or compressed, checked against the fingerprint that the files record; `NoBase` if they record
            none.

    Args:
        opened: the checkpoint that the files were found by; defaults to their folder.
    """

    def __init__(self, files: Sequence[CompressedFile], base: TensorSource, opened: Checkpoint | None = None):
        # Under the name on the Hub, not that of the cache, other files may record this checkpoint as their base.
        self.name, self.revision = (opened.name, opened.revision) if opened else (str(files[0].path.parent), None)
        self.paths = [*(file.path for file in files), *base.paths]
        self.base = base
        self.files = files
        self.digest = files[0].digest
        self.fingerprint = files[0].fingerprint
        self._file_of = {name: file for file in files for name in file.original}

    def names(self) -> list[str]:
        return list(self._file_of)

    def entry(self, name: str) -> Entry:
        return self._file_of[name].original[name]

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        return decode_tensor(self._file_of[name], self.base, name, out)

    def read_on(self, names: Sequence[str], device: torch.device) -> list[torch.Tensor]:
        from hf_ext.storage.delta.device_decode import read_on

        return read_on(self, names, self._coded, self.base, device)

    def _coded(self, name: str) -> tuple[np.ndarray, Header]:
        """Returns a tensor's payload and its header."""
        file = self._file_of[name]
        return file.payload(name), file.headers[name]

    def read_rows(self, name: str, begin: int, end: int) -> RawTensor:
        """Returns rows of a tensor. Decodes only these, if the matrices of its last two dimensions are encoded separately."""
        file = self._file_of[name]
        rows = (begin, end) if file.headers[name].mode == STACKED else None
        tensor = decode_tensor(file, self.base, name, rows=rows)
        return tensor if rows else rows_of(tensor, begin, end)

    def identity(self, name: str) -> Hashable:
        return self._file_of[name].headers[name].checksum

    def require_whole(self) -> None:
        for file in self.files:
            file.require_whole()
        self.base.require_whole()

    def require_intact(self) -> None:
        for file in self.files:
            file.require_intact()
        self.base.require_intact()


class RestoredFile:
    """The original file of a compressed one. Its tensors are decoded on request."""

    def __init__(self, file: CompressedFile, base: TensorSource):
        self.path = file.path
        self.metadata = file.original_metadata
        self.entries = file.original
        self.header_bytes = file.original_header
        self._file = file
        self._base = base

    def __getitem__(self, name: str) -> RawTensor:
        return decode_tensor(self._file, self._base, name)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Does nothing: a decoded tensor is freed with its last reference."""


def original_size(file: CompressedFile) -> int:
    """Returns the size in bytes of a compressed file's original."""
    return 8 + len(file.original_header) + sum(entry.nbytes for entry in file.original.values())


def decode_tensor(
    file: CompressedFile, base: TensorSource, name: str, out: np.ndarray | None = None, rows: tuple[int, int] | None = None
) -> RawTensor:
    """Returns one tensor of a file, or, of a STACKED one, the rows from the first to the second of `rows`. If the base is not
    the recorded one, the error names both."""
    payload, header = file.payload(name), file.headers[name]
    base_tensor, threads = None, threads_for(file.size(name))
    try:
        if rows is None:
            base_tensor = read_base(base, header.base_name)
            return decode_raw(payload, base_tensor, header, threads, out)
        if header.base_name in base:
            entry = base.entry(header.base_name)
            header.require_base(entry.dtype, entry.shape)
            base_tensor = base.read_rows(header.base_name, *(min(row, entry.shape[0]) for row in rows))
        return decode_rows(payload, base_tensor, header, *rows, threads)
    except CorruptFileError as error:
        raise CorruptFileError(f"{file.path}: {error}") from error
    except BaseModelError as error:
        raise BaseModelError(f"{error} Compressed against {file.base}, read with {base}.") from error
    finally:
        if base_tensor is not None:
            base.release(header.base_name)


def payload_name(payload: torch.Tensor) -> str:
    """Returns the name of the tensor encoded in this tensor of bytes, which is a payload."""
    return peek_header(payload.reshape(-1).cpu().numpy()).name


def read_base(base: TensorSource, name: str) -> RawTensor | None:
    """Returns the base tensor that predicts a tensor; None if no tensor does or the base has none of that name."""
    return base.read(name) if name in base else None


def decode_all(files: Sequence[TensorFile]) -> int:
    """Decodes every tensor of compressed files, some ahead on all cores. Returns their number. Raises CorruptFileError or
    BaseModelError, which names the first tensor that differs from the saved one."""
    count = sum(len(file.entries) for file in files)
    with progress("Verifying", count) as bar:
        for file in files:
            for _ in Prefetcher(file.__getitem__, {name: entry.nbytes for name, entry in file.entries.items()}):
                bar.update()
    return count
