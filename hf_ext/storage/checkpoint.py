"""A plain checkpoint: the safetensors weights of a folder or of a repository on the Hub."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.config_file import CONFIG
from hf_ext.storage.hub import HUB, Check, Hub, is_local, reaching, snapshot_of
from hf_ext.storage.layout import save_of
from hf_ext.storage.safetensors_file import Entry, RawTensor, SafetensorsFile
from hf_ext.storage.source import TensorSource
from hf_ext.storage.weights import Kind, kind_of, open_weights, require_all


def holds_weights(folder: str | os.PathLike, fingerprint: str) -> bool:
    """Checks whether a folder holds the plain weights with this fingerprint."""
    try:
        return Checkpoint(folder).fingerprint == fingerprint
    except BaseModelError:
        return False


class Checkpoint(TensorSource):
    """The tensors of a model's safetensors files, as they are stored.

    Args:
        name: a folder, or the id of a repository on the Hub.
        revision: branch, tag or commit on the Hub; `self.revision` is the resolved commit, None for a folder.
        hub: access settings.
        check: called with the headers of weights that would have to be downloaded; raises BaseModelError to prevent that.

    Raises:
        BaseModelError: there are no safetensors weights of that name, or they are damaged or incomplete.
    """

    def __init__(self, name: str | os.PathLike, revision: str | None = None, hub: Hub = HUB, check: Check | None = None):
        self.name = os.fspath(name)
        self.revision = revision
        self._hub = hub
        try:
            self.files = self._open(hub, check)
        except (CheckpointError, CorruptFileError) as error:
            raise BaseModelError(f"The weights of '{self.name}' cannot be read: {error}") from error
        self.paths = [file.path for file in self.files]
        snapshot = None if os.path.isdir(self.name) else snapshot_of(self.paths[0].parent)
        self.revision = snapshot.name if snapshot else None
        self._file_of = {key: file for file in self.files for key in file.entries}

    def _open(self, hub: Hub, check: Check | None) -> list[SafetensorsFile]:
        """Opens the files, which are downloaded if necessary."""
        if not is_local(self.name):
            files = [SafetensorsFile(path) for path in hub.weights(self.name, self.revision, check)]
            require_all(files)
            return files
        if not os.path.isdir(self.name):
            raise CheckpointError(f"there is no folder '{self.name}'. Give the folder of the model, or its id on the Hub.")
        files = open_weights(Path(self.name))
        if len(saves := sorted({save_of(file.path) for file in files})) > 1:
            raise CheckpointError(f"{self.name} holds several models: {', '.join(saves)}. Give a folder with one of them.")
        return files

    def folder(self) -> Path:
        """Returns the folder of the weights. Downloads its config.json, if a repository has one, and else raises BaseModelError
        if it cannot be reached."""
        if os.path.isdir(self.name):
            return Path(self.name)
        from huggingface_hub.errors import EntryNotFoundError

        with reaching(self.name, self.revision), suppress(EntryNotFoundError):
            self._hub.download(self.name, CONFIG, self.revision)
        return self.paths[0].parent

    def names(self) -> list[str]:
        return list(self._file_of)

    def entry(self, name: str) -> Entry:
        return self._file_of[name].entries[name]

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        """Returns a view of the mapped file."""
        return self._file_of[name][name]

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        self._file_of[name].release(name, begin, end)

    def require_whole(self) -> None:
        for file in self.files:
            file.require_whole()

    def read_sparsely(self) -> None:
        """Turns off read-ahead, for readers that need only a few parts of each tensor."""
        for file in self.files:
            file.read_sparsely()

    @property
    def kind(self) -> Kind:
        """How the weights are stored, by the headers of their files."""
        return kind_of(file.metadata for file in self.files)
