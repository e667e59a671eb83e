"""A checkpoint folder that follows the steps of a training, for engines that load weights from a folder."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from hf_ext.errors import CheckpointError
from hf_ext.storage.files import locked, write_json
from hf_ext.storage.layout import select_weights
from hf_ext.storage.safetensors_file import RawTensor, SafetensorsFile
from hf_ext.storage.weights import open_plain_weights
from hf_ext.weight_sync.places import Place
from hf_ext.weight_sync.sglang_layout import open_reader

RECORD = "step.json"  # in the folder: the step of its weights


class LocalCheckpoint:
    """A model's folder on this machine whose weights follow the published steps.

    A step overwrites only the changed weights in the safetensors files. A program reads the new weights when it loads the
    folder again. `step.json` in the folder contains the step; it is missing during an update. An update also overwrites what
    another program has changed or replaced in the meantime.

    Args:
        folder: a copy of the model's folder, with the published weights in the published type. It must not be part of the
            Hub's cache, whose files other programs share.
        place: as for `Publisher`.

    Raises:
        CheckpointError: the folder has no plain safetensors weights, or its files are links.
    """

    def __init__(self, folder: str | os.PathLike, place: str | os.PathLike | Place):
        self.folder = Path(folder).absolute()
        self._reader = open_reader(place)
        self._lock = Lock()  # of several servers, one updates
        self._files: dict[str, list[int]] = {}  # those that are open
        self._weights: dict[str, torch.Tensor] = {}
        self._open()

    def update(self, step: int) -> None:
        """Brings the weights to a step, from whichever step they are at.

        Raises:
            CheckpointError: the step is not at the place, its tensors are not those of the folder, or another process is
                writing to the folder.
            CorruptFileError: damaged files prevent the update. The weights are unchanged, unless the message says otherwise.
        """
        with self._lock, locked(self.folder):
            path, before = self.folder / RECORD, self._record()
            if before is None or self._reader.step is None:
                self._reader = open_reader(self._reader.place)  # of what is there by now
            elif self._reader.step == before.get("step") == step:
                return
            path.unlink(missing_ok=True)
            try:
                self._open()
                self._reader.update(self._weights, step, strict=True)
            except Exception:
                if before and not self._reader.is_mixed:
                    write_json(path, before)
                raise
            files = _files(self.folder)
            if _identities(files) != _identities(self._files):
                raise CheckpointError(f"Weights in {self.folder} were replaced during the update to step {step}. Repeat it.")
            write_json(path, {"place": str(self._reader.place), "step": int(step), "files": files})

    def has(self, step: int) -> bool:
        """Checks whether the folder has the weights of a step, and no other program has changed its files since."""
        record = self._record()
        return record is not None and record.get("step") == step

    def _record(self) -> dict | None:
        """Returns the contents of `step.json`; None if there is none, or if other weights are in the folder by now."""
        with suppress(OSError, ValueError, AttributeError):
            record = json.loads((self.folder / RECORD).read_text())
            if (record.get("place"), record.get("files")) == (str(self._reader.place), _files(self.folder)):
                return record
        return None

    def _open(self) -> None:
        """Opens the folder's files, unless they are open."""
        files = _files(self.folder)
        if _identities(files) == _identities(self._files):
            return
        weights: dict[str, torch.Tensor] = {}
        for file in open_plain_weights(self.folder):
            path = file.path
            if path.is_symlink() or path.stat().st_nlink > 1:
                raise CheckpointError(
                    f"{path} is a link. Other programs may share its contents, which steps would change. Copy the folder, "
                    "without links (cp -rL), and give the copy."
                )
            weights |= _writable(file)
        self._files, self._weights = files, weights

    def __str__(self) -> str:
        return str(self.folder)


def _files(folder: Path) -> dict[str, list[int]]:
    """Returns what tells the files of a folder's weights from others: device, inode, links, size, time of the last change."""
    files = {}
    for path in select_weights(folder):
        try:
            status = path.lstat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. Copy the model's folder again.") from error
        files[path.name] = [status.st_dev, status.st_ino, status.st_nlink, status.st_size, status.st_mtime_ns]
    return files


def _identities(files: dict[str, list[int]]) -> dict[str, list[int]]:
    """Returns the part of `_files` that a change in place keeps."""
    return {name: numbers[:-1] for name, numbers in files.items()}


def _writable(file: SafetensorsFile) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file. Writing to them changes the file."""
    path = file.path
    try:
        data = np.memmap(path, np.uint8, "r+")[8 + len(file.header_bytes) :]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    return {
        name: RawTensor(entry.dtype, entry.shape, data[entry.begin : entry.end]).to_torch()
        for name, entry in file.entries.items()
    }
