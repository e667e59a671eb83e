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
from hf_ext.storage.config_file import ENCODINGS, storage_settings
from hf_ext.storage.delta.file import KEY
from hf_ext.storage.files import locked, write_json
from hf_ext.storage.layout import select_weights
from hf_ext.storage.safetensors_file import RawTensor, SafetensorsFile
from hf_ext.weight_sync.places import Place
from hf_ext.weight_sync.subscriber import Subscriber

RECORD = "step.json"  # in the folder: the step of its weights


class LocalCheckpoint:
    """A model's folder on this machine whose weights follow the published steps.

    A step overwrites only the changed weights in the safetensors files. A program reads the new
    weights when it loads the folder again. `step.json` in the folder contains the step; it is missing during an update.

    Args:
        folder: a copy of the model's folder, with the published weights in the published type. It must not be part of the
            Hub's cache, whose files other programs share.
        place: as for `Publisher`.

    Raises:
        CheckpointError: the folder has no plain safetensors weights, or its files are links.
    """

    def __init__(self, folder: str | os.PathLike, place: str | os.PathLike | Place):
        self.folder = Path(folder).absolute()
        self._subscriber = Subscriber(place)
        self._lock = Lock()  # of several servers, one updates
        if storage_settings(self.folder).get("quant_method") in ENCODINGS:
            raise CheckpointError(f"{self.folder} is compressed. Restore it with `hf-ext decompress`.")
        self._weights: dict[str, torch.Tensor] = {}
        for path in select_weights(self.folder):
            if path.is_symlink() or path.stat().st_nlink > 1:
                raise CheckpointError(
                    f"{path} is a link. Other programs may share its contents, which steps would change. Copy the folder, "
                    "without links (cp -rL), and give the copy."
                )
            self._weights |= _writable(path)

    def update(self, step: int) -> None:
        """Brings the weights to a step, from whichever step they are at.

        Raises:
            CheckpointError: the step is not at the place, its tensors are not those of the folder, or another process is
                writing to the folder.
            CorruptFileError: damaged files prevent the update. The weights are unchanged, unless the message says otherwise.
        """
        with self._lock, locked(self.folder):
            if self._subscriber.step == step and self.has(step):
                return
            record = self.folder / RECORD
            before = record.read_text() if record.exists() else None
            record.unlink(missing_ok=True)
            try:
                self._subscriber.update(self._weights, step, strict=True)
            except Exception:
                if before and not self._subscriber.is_mixed:
                    record.write_text(before)
                raise
            write_json(record, {"place": str(self._subscriber.place), "step": self._subscriber.step})

    def has(self, step: int) -> bool:
        """Checks whether the folder has the weights of a step."""
        with suppress(OSError, ValueError, AttributeError):
            return json.loads((self.folder / RECORD).read_text()).get("step") == step
        return False

    def __str__(self) -> str:
        return str(self.folder)


def _writable(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file. Writing to them changes the file."""
    file = SafetensorsFile(path)
    if KEY in file.metadata:
        raise CheckpointError(f"{path} is compressed. Restore it with `hf-ext decompress`.")
    try:
        data = np.memmap(path, np.uint8, "r+")[8 + len(file.header_bytes) :]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    return {
        name: RawTensor(entry.dtype, entry.shape, data[entry.begin : entry.end]).to_torch()
        for name, entry in file.entries.items()
    }
