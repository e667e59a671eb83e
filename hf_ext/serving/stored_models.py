"""The models that servers load, in whatever form they are stored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hf_ext.emr.folder import open_merge
from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.config_file import CONFIG, ENCODINGS, storage_settings
from hf_ext.storage.delta.source import PARTS_OF
from hf_ext.storage.hub import HUB, is_local, reaching
from hf_ext.storage.open import OF_TASK, open_checkpoint
from hf_ext.storage.prefetch import Prefetcher
from hf_ext.storage.source import TensorSource

if TYPE_CHECKING:
    import torch


class StoredModel(NamedTuple):
    """The location of a stored model."""

    path: str  # folder or Hub id
    revision: str | None = None
    task: str | None = None  # of a merge; None for its first task, and for anything else

    @classmethod
    def named(cls, name: str, revision: str | None = None) -> StoredModel:
        """Returns the model of a name: PATH or MERGE#TASK."""
        path, of_task, task = name.partition(OF_TASK)
        return cls(path, revision, task) if of_task and not os.path.exists(name) else cls(name, revision)

    def is_encoded(self) -> bool:
        """Checks whether its config.json says that the weights are compressed or merged."""
        folder = Path(self.path)
        if not is_local(self.path):
            try:
                with reaching(self.path, self.revision):
                    folder = HUB.download(self.path, CONFIG, self.revision).parent
            except BaseModelError:  # a server may take names of other kinds
                return False
        return folder.is_dir() and storage_settings(folder).get("quant_method") in ENCODINGS

    def open(self) -> TensorSource:
        """Returns the model's tensors, which are decoded when they are read."""
        checkpoint = Checkpoint(self.path, self.revision)
        if checkpoint.has_metadata(PARTS_OF):
            merged = open_merge(checkpoint.paths[0].parent)
            return merged.source(self.task or merged.tasks[0])
        if self.task is not None:
            raise CheckpointError(f"{checkpoint} is no merge, so it has no task {self.task!r}.")
        return open_checkpoint(self.path, self.revision)


def read_tensors(source: TensorSource, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns an iterator over tensors and their names. Threads that decode them start at once."""
    tensors = Prefetcher(source.read, {name: source.entry(name).nbytes for name in names})

    def convert() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to_torch()
            source.release(name)

    return convert()
