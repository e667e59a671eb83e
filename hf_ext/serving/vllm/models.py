"""The models of a server by name, and which tensors differ between two of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_ext.errors import CheckpointError
from hf_ext.serving.stored_models import StoredModel
from hf_ext.storage.names import layer_of
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import OF_TASK


def read_models(models: object) -> dict[str, StoredModel]:
    """Returns models by name.

    Args:
        models: maps each name to PATH, MERGE#TASK, or a mapping with `path` and optionally `revision` and `task`; or it is the
            path of a JSON file with such a mapping, whose relative paths are looked up from its folder.
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
        value = StoredModel.named(value)._asdict()
    if not isinstance(value, dict) or "path" not in value or not value.keys() <= set(StoredModel._fields):
        raise CheckpointError(f"Model '{name}' must be PATH, MERGE{OF_TASK}TASK or {{path, revision, task}}, not {value!r}.")
    stored = StoredModel(**value)
    if beside is not None and (beside.parent / stored.path).exists():
        stored = stored._replace(path=str(beside.parent / stored.path))
    return stored


def changed(before: TensorSource, after: TensorSource) -> Iterator[str]:
    """Returns the names of the tensors to load where the model `after` replaces `before`: see `whole_layers`."""
    require_same_shapes(before, after)

    def differs(name: str) -> bool:
        return before.entry(name).dtype != after.entry(name).dtype or before.identity(name) != after.identity(name)

    return whole_layers(after.names(), differs)


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
