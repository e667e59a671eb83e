"""The tensors that a merge stores, and the tasks that each of them serves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hf_ext.emr.checks import GIVE_BASE, TaskModel, require_known_names, require_one_class, require_same_layers, vocabulary
from hf_ext.emr.modulators import TaskFile
from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.storage.names import is_statistic, layer_of
from hf_ext.storage.native import FLOATS
from hf_ext.storage.source import TensorSource


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that a merge stores."""

    name: str
    dtype: str  # of the stored tensor
    shape: tuple[int, ...]  # the base's if the tensor has voters
    twin: str  # the base's name; empty without voters
    voters: Sequence[TaskModel]  # the tasks whose tensor is made from the base's: it takes part in the election, or is coded
    holder: TaskModel  # the task whose tensor is stored if there are no voters
    sharers: Sequence[TaskModel]  # in that case, the tasks that have the same tensor


def stored_tensors(
    base: TensorSource, base_config: dict, models: Sequence[TaskModel], standing: Mapping[str, TaskFile]
) -> list[StoredTensor]:
    """Returns the tensors that a merge of these tasks stores. Raises CheckpointError or BaseModelError if the tasks cannot be
    merged. `standing` are the files of the tasks that are merged already, by task: their tensors stay as they are."""
    require_one_class(models)
    for model in models:
        require_same_layers(model, base)
        require_known_names(model, base)
    shared = {name for file in standing.values() for name in file.record.shared}
    fixed = {name for name in shared if not any(file.is_from_base(name) for file in standing.values())}
    owners: dict[str, list[TaskModel]] = {}
    voters: dict[str, list[TaskModel]] = {}
    for model in models:
        names = model.tensors.names()
        for name in names:
            owners.setdefault(name, []).append(model)
            before = voters.setdefault(name, [])
            if model.task in standing:
                votes = standing[model.task].is_from_base(name)
            else:
                votes = name not in fixed and _is_from_base(model, name, base, base_config, before[:1])
            if votes:
                before.append(model)
        if not any(model in voters[name] for name in names):
            raise BaseModelError(
                f"No tensor of {model} has a counterpart of its shape in the base {base}: it is no fine-tune of this base. "
                f"{GIVE_BASE}"
            )
    holders = {name: having[0] for name, having in owners.items()}
    for model in reversed(models):
        if model.task in standing:  # the tensors that it shares stay the stored ones
            holders |= dict.fromkeys(standing[model.task].record.shared, model)
    return [_stored(name, holders[name], owners[name], voters[name], base) for name in owners]


def _stored(
    name: str, holder: TaskModel, owners: Sequence[TaskModel], voters: Sequence[TaskModel], base: TensorSource
) -> StoredTensor:
    entry = (*voters, holder)[0].tensors.entry(name)
    if twin := base.twin_of(name) if voters else None:
        return StoredTensor(name, entry.dtype, base.entry(twin).shape, twin, voters, holder, ())
    tensor, sharers = None, [holder]
    for model in owners:
        if model is not holder and model.tensors.entry(name)[:2] == entry[:2]:
            tensor = tensor or holder.tensors.read(name)
            if np.array_equal(tensor.data, model.tensors.read(name).data):
                sharers.append(model)
    return StoredTensor(name, entry.dtype, entry.shape, "", (), holder, sharers)


def _is_from_base(model: TaskModel, name: str, base: TensorSource, base_config: dict, others: Sequence[TaskModel]) -> bool:
    """Checks whether a task's tensor is made from the base's. If not, it is stored as the task's own: a head, for instance,
    integers, or statistics of its data. `others` is another task whose tensor of this name is made from the base's, if there is
    one."""
    twin, entry = base.twin_of(name), model.tensors.entry(name)
    if twin is None or entry.dtype not in FLOATS or base.entry(twin).dtype not in FLOATS or is_statistic(name):
        return False
    base_shape, shape = base.entry(twin).shape, entry.shape
    if not math.prod(shape) and shape == base_shape:
        return False
    if base_shape != shape:
        in_layer = layer_of(name) is not None and shape[:1] != (len(model.config.get("id2label") or (0, 1)),)
        if len(base_shape) != len(shape) or base_shape[1:] != shape[1:] or in_layer or not math.prod(shape):
            raise CheckpointError(
                f"Tensor '{name}' of task '{model.task}' is {list(shape)}, but {list(base_shape)} in the base {base}: these "
                f"are models of different sizes. {GIVE_BASE}"
            )
        # With as many rows as words, it is a resized embedding. Otherwise it is a head for other labels.
        if base_shape[0] != vocabulary(base_config) or shape[0] != vocabulary(model.config):
            return False
    for other in others:
        if (dtype := other.tensors.entry(name).dtype) != entry.dtype:
            raise CheckpointError(
                f"Tensor '{name}' is {entry.dtype} in task '{model.task}' and {dtype} in '{other.task}'. Save all in one type."
            )
    return True
