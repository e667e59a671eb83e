"""The models of a server by name, and the tensors of each, in whatever form they are stored."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hf_ext.emr.folder import open_merge
from hf_ext.errors import CheckpointError
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.source import PARTS_OF
from hf_ext.storage.open import OF_TASK, open_checkpoint
from hf_ext.storage.source import TensorSource, layer_of


class StoredModel(NamedTuple):
    """Where a model is stored.

    Attributes:
        path: folder or Hub id.
        revision: branch, tag or commit on the Hub.
        task: a task of a merge. None for its first task, and for anything else.
    """

    path: str
    revision: str | None = None
    task: str | None = None

    def open(self) -> TensorSource:
        """Returns the model's tensors, which are decoded when they are read.

        Raises:
            CheckpointError: the model has no such task, or is not there.
            BaseModelError: its base is missing, or differs from the one it was written against.
            CorruptFileError: a file is damaged.
        """
        checkpoint = Checkpoint(self.path, self.revision)
        if checkpoint.has_metadata(PARTS_OF):
            merged = open_merge(checkpoint.paths[0].parent)
            return merged.source(self.task or merged.tasks[0])
        if self.task is not None:
            raise CheckpointError(f"{checkpoint} is no merge, so it has no task {self.task!r}.")
        return open_checkpoint(self.path, self.revision)


def read_models(models: object) -> dict[str, StoredModel]:
    """Returns models by name.

    Args:
        models: maps each name to PATH, MERGE#TASK, or a mapping with `path` and optionally `revision` and `task`; or it is the
            path of a JSON file with such a mapping, whose relative paths are looked up from its folder.

    Raises:
        CheckpointError: it is none of these.
    """
    beside = None
    if isinstance(models, str | os.PathLike):
        beside = Path(models).absolute()
        try:
            models = json.loads(beside.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{beside} cannot be read as JSON: {error}.") from error
    if not isinstance(models, dict):
        raise CheckpointError(f"`models` must map names to folders or Hub ids, but it is {models!r}.")
    return {name: _stored(name, value, beside) for name, value in models.items()}


def _stored(name: str, value: Any, beside: Path | None) -> StoredModel:
    if isinstance(value, str):
        path, of_task, task = value.partition(OF_TASK)
        value = {"path": path, "task": task} if of_task and not os.path.exists(value) else {"path": value}
    if not isinstance(value, dict) or "path" not in value or not value.keys() <= set(StoredModel._fields):
        raise CheckpointError(f"Model '{name}' must be PATH, MERGE{OF_TASK}TASK or {{path, revision, task}}, not {value!r}.")
    stored = StoredModel(**value)
    if beside is not None and (beside.parent / stored.path).exists():
        stored = stored._replace(path=str(beside.parent / stored.path))
    return stored


def changed(before: TensorSource, after: TensorSource) -> Iterator[str]:
    """Returns the names of the tensors to load where the model `after` replaces `before`: see `whole_layers`.

    Raises:
        CheckpointError: the two have different tensors, so one cannot replace the other.
    """
    require_same_shapes(before, after)
    return whole_layers(after.names(), lambda name: _differs(name, before, after))


def whole_layers(names: Iterable[str], differs: Callable[[str], bool]) -> Iterator[str]:
    """Yields the names of all tensors of each layer in which any differs, layer by layer.

    vLLM fuses tensors of a layer, and takes what it does not get of a module from uninitialized memory. Outside the layers,
    modules beside one another count as a layer.
    """
    layers: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        layers.setdefault(layer_of(name) or tuple(name.split(".")[:-2]), []).append(name)
    for members in layers.values():
        if any(map(differs, members)):
            yield from members


def require_same_shapes(before: TensorSource, after: TensorSource) -> None:
    """Raises CheckpointError if the model `after` cannot replace `before`, because it has other tensors."""
    for name in after.names():
        if name not in before or before.entry(name).shape != after.entry(name).shape:
            raise CheckpointError(f"{after} cannot replace {before}: its tensor '{name}' is new or has another shape.")
    if missing := [name for name in before.names() if name not in after]:
        raise CheckpointError(f"{after} cannot replace {before}: it has no tensor '{missing[0]}'.")


def _differs(name: str, before: TensorSource, after: TensorSource) -> bool:
    return before.entry(name).dtype != after.entry(name).dtype or before.identity(name) != after.identity(name)
