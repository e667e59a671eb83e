"""The models that servers load, in whatever form they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from hf_ext.emr.folder import open_merge
from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.storage.config_file import ENCODINGS
from hf_ext.storage.delta.device_decode import decoding_device, reading
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import Stored, split_task
from hf_ext.storage.weights import Kind

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
        path, task = split_task(name)
        return cls(path, revision, task)

    def is_encoded(self) -> bool:
        """Checks whether its config.json says that the weights are compressed or merged."""
        try:
            return Stored(self.path, self.revision).settings.get("quant_method") in ENCODINGS
        except BaseModelError:  # a server may take names of other kinds
            return False

    def open(self) -> TensorSource:
        """Returns the model's tensors, which are decoded when they are read."""
        stored = Stored(self.path, self.revision)
        if stored.checkpoint.kind is Kind.MERGE:
            merged = open_merge(stored.checkpoint.paths[0].parent)
            return merged.source(self.task or merged.tasks[0])
        if self.task is not None:
            raise CheckpointError(f"{stored.checkpoint} is no merge, so it has no task {self.task!r}.")
        return stored.tensors()


def read_tensors(
    source: TensorSource, names: list[str], devices: Iterable[torch.device] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns an iterator over tensors and their names. Threads that decode them start at once. `devices` are those of the
    weights; tensors may be on another."""
    tensors = reading(source, names, decoding_device(devices))

    def convert() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            source.release(name)

    return convert()
