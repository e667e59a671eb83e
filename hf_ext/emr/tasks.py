"""The models of a merge's tasks: opened once, from a folder, the Hub, an adapter or memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedModel

from hf_ext.adapters.models import open_model
from hf_ext.emr.checks import TaskModel
from hf_ext.emr.folder import MergeFolder
from hf_ext.emr.modulators import is_asset
from hf_ext.errors import CheckpointError
from hf_ext.integration.config_change import difference
from hf_ext.integration.loading.weight_plan import ignored_weight, skeleton_of, ties_of
from hf_ext.storage.files import scan
from hf_ext.storage.hub import downloaded
from hf_ext.storage.source import Renamed, TensorSource
from hf_ext.storage.stored import Stored

if TYPE_CHECKING:
    from peft import PeftModel

Task: TypeAlias = "str | os.PathLike | PreTrainedModel | PeftModel"


def open_task(name: str, task: Task, base: TensorSource, scratch: Path) -> TaskModel:
    """Opens the checkpoint of a task that is given as a folder, a Hub id or a model. Saves a model into `scratch` first."""
    if hasattr(task, "peft_config") and hasattr(task, "get_base_model"):  # a PeftModel
        copied: Any = deepcopy(task)
        if not hasattr(copied, "merge_and_unload"):
            raise CheckpointError(f"Task '{name}': this adapter cannot be merged into weights.")
        task = copied.merge_and_unload()
    if getattr(task, "_hf_peft_config_loaded", False):
        raise CheckpointError(f"Task '{name}' is a model with adapters inside; give a PeftModel, or the folder of the adapter.")
    if isinstance(task, PreTrainedModel):
        type(task).save_pretrained(task, scratch)
        folder = scratch
    elif isinstance(task, str | os.PathLike):
        folder = downloaded(task, f"Task '{name}': ")
    else:
        raise CheckpointError(f"Task '{name}' is a {type(task).__name__}; give a folder, a Hub id, or a model.")
    stored = Stored(str(folder))
    try:
        tensors, config = open_model(stored, base)
    except CheckpointError as error:
        raise CheckpointError(f"Task '{name}': {error}") from error
    if "_class_name" in config:
        raise CheckpointError(
            f"Task '{name}': {folder} is a model of diffusers, which has no tasks. `hf-ext compress` can store it."
        )
    files = [path.as_posix() for path in sorted(scan(folder)) if (folder / path).is_file()]
    return TaskModel(name, folder, tensors, config, {file: folder / file for file in files if is_asset(file)})


def merged_task(merged: MergeFolder, task: str) -> TaskModel:
    """Returns a task of a merge, to merge it with others."""
    ties = merged.files[task].record.ties
    return TaskModel(task, merged.folder, merged.source(task), merged.task_config(task), merged.assets(task), ties)


def with_one_name_each(models: Sequence[TaskModel], base: TensorSource) -> list[TaskModel]:
    """Returns the models with one name for each weight: one that is found in the base, if a model has it there. A model that
    breaks a tie keeps the tied weight under its own name. The others have that name in their `ties`."""
    if skeleton := skeleton_of(models[0].config, models[0]):
        for model in models:
            if ignored := ignored_weight(skeleton, model.tensors.names()):
                raise CheckpointError(
                    f"from_pretrained ignores '{ignored[0]}' of {model}, and leaves '{ignored[1]}' of the "
                    f"{type(skeleton).__name__} random. Save the model without the wrapper that renames its weights."
                )
    ties = ties_of(skeleton, base.names(), *(model.tensors.names() for model in models))
    views = [{name: name for name in model.tensors.names()} for model in models]
    tied: list[dict[str, str]] = [dict(model.ties) for model in models]
    for group in ties.groups(dict.fromkeys([*(name for names in views for name in names), *base.names()])):
        used = [name for name in group if any(name in names for names in views)]
        in_base = [name for name in group if name in base]
        fitting = (name for name in used if base.twin_of(name) in in_base)
        one = next(fitting, (in_base or used)[0])
        held = [[name for name in used if name in names] for names in views]
        apart = set()
        for model, names, view in zip(models, held, views):
            if names:
                first, *others = model.tensors.distinct(sorted(names, key=lambda name: name != one))
                apart |= {*others}
                for name in names:
                    del view[name]
                view |= {one: first} | {name: name for name in others}
        for names, view, own in zip(held, views, tied):
            own |= {name: one for name in sorted(apart - view.keys()) if names}
    return [replace(model, tensors=_renamed(model.tensors, names), ties=own) for model, names, own in zip(models, views, tied)]


def _renamed(tensors: TensorSource, names: dict[str, str]) -> TensorSource:
    return tensors if [*names] == [*names.values()] == tensors.names() else Renamed(tensors, names)


def require_one_structure(models: Sequence[TaskModel]) -> None:
    """Raises CheckpointError unless one model can switch between the config.json files of these. Vocabulary, labels, and
    settings of training and generation may differ."""
    first, *rest = models
    for model in rest:
        if model.config.get("model_type") != first.config.get("model_type"):
            continue  # require_one_class raises for that
        if differs := difference(first.config, model.config):
            key, expected, value = differs
            raise CheckpointError(
                f"Task '{model.task}' has {key} {value!r} in its config.json, task '{first.task}' {expected!r}: one model "
                "cannot switch between them. Merge checkpoints of one class and structure."
            )
