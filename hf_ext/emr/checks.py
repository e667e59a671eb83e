"""Checks that checkpoints can be merged: one base, one class, one structure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.storage.source import TensorSource, layer_of


@dataclass(frozen=True)
class TaskInput:
    """The checkpoint of a task to merge: its tensors, its config.json, and its other files by name."""

    tensors: TensorSource
    config: dict
    assets: Mapping[str, Path]


def require_one_architecture(base_config: dict, sources: Mapping[str, TaskInput]) -> None:
    """Raises CheckpointError unless all tasks have one class: one model switches between them. The base may have another
    head."""
    reference = next(iter(sources))
    for task, source in sources.items():
        kinds = {base_config.get("model_type"), source.config.get("model_type")} - {None}
        if len(kinds) > 1:
            raise CheckpointError(
                f"Task '{task}' is a {source.config['model_type']} model, the base is {base_config['model_type']}. Merge "
                "fine-tunes of one base, and give that base."
            )
        architectures, expected = source.config.get("architectures"), sources[reference].config.get("architectures")
        if architectures and expected and architectures != expected:
            raise CheckpointError(
                f"Task '{task}' has architectures {architectures}, task '{reference}' {expected}: one model cannot "
                "switch between them. Merge checkpoints of one class."
            )


def require_same_layers(task: str, tensors: TensorSource, base: TensorSource) -> None:
    """Raises CheckpointError if the task lacks a layer of the base or has a layer more, in a stack of layers that both have."""
    pairs = []
    for name in tensors.names():
        layer, twin = layer_of(name), base.twin_of(name)
        base_layer = layer_of(twin) if twin else None
        if layer and base_layer and layer[1] == base_layer[1]:  # names of a base with one layer fit every layer by their ends
            pairs.append((layer, base_layer))
    for names, common, owner, other in (
        (tensors.names(), {layer for layer, _ in pairs}, f"task '{task}' ({tensors})", f"the base {base}"),
        (base.names(), {layer for _, layer in pairs}, f"the base {base}", f"task '{task}' ({tensors})"),
    ):
        stacks = {stack for stack, _ in common}
        for name in names:
            layer = layer_of(name)
            if layer and layer[0] in stacks and layer not in common:
                raise CheckpointError(
                    f"Tensor '{name}' of {owner} is in a layer that {other} does not have: these are models of different "
                    "sizes. Give the base that all tasks were fine-tuned from."
                )


def require_fine_tune(task: str, source: TaskInput, base: TensorSource, sums: Mapping[str, np.ndarray]) -> None:
    """Raises BaseModelError if the task vector is as long as the base's weights, as it is for an unrelated model.

    Counts only matrices, if there are any: norms and biases are similar in all models.
    """
    matrices = [name for name in sums if len(source.tensors.entry(name).shape) > 1] or list(sums)
    moved, weights = (math.fsum(float(sums[name][field]) for name in matrices) for field in ("task_squares", "base_squares"))
    if moved >= weights > 0:
        raise BaseModelError(
            f"The weights of task '{task}' ({source.tensors}) differ from those of the base {base} by "
            f"{math.sqrt(moved / weights):.2f} times the base's own length: it is no fine-tune of this base. Give the base "
            "that it was fine-tuned from."
        )


def vocabulary(config: dict) -> int | None:
    """Returns the vocabulary size in a config.json, or in that of its text model; None if there is none."""
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def labels(config: dict) -> int:
    """Returns the number of labels of a classifier with this config.json."""
    return len(config.get("id2label") or (0, 1))
