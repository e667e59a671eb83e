"""Checks that checkpoints can be merged: one base, one class, one structure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_ext.display import percent
from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.storage.names import layer_of
from hf_ext.storage.source import TensorSource

GIVE_BASE = "Give the base that all tasks were fine-tuned from."


@dataclass(frozen=True, eq=False)
class TaskModel:
    """A model to merge."""

    task: str
    folder: Path
    tensors: TensorSource
    config: dict
    assets: Mapping[str, Path]  # its files besides config.json and weights, by name
    ties: Mapping[str, str] = field(default_factory=dict)  # of weights that other tasks hold apart: the one tied to, by name

    def __str__(self) -> str:
        return f"task '{self.task}' ({self.tensors})"


def require_one_class(models: Sequence[TaskModel]) -> None:
    """Raises CheckpointError unless all tasks have one class: one model switches between them. The base may have another
    head, or a model type that Transformers loads as that of the tasks."""
    for model in models:
        architectures, expected = model.config.get("architectures"), models[0].config.get("architectures")
        if architectures and expected and architectures != expected:
            raise CheckpointError(
                f"Task '{model.task}' has architectures {architectures}, task '{models[0].task}' {expected}: one model cannot "
                "switch between them. Merge checkpoints of one class."
            )


def require_same_layers(model: TaskModel, base: TensorSource) -> None:
    """Raises CheckpointError if the task lacks a layer of the base or has a layer more, in a stack of layers that both have."""
    pairs, tensors = [], model.tensors
    for name in tensors.names():
        layer, twin = layer_of(name), base.twin_of(name)
        base_layer = layer_of(twin) if twin else None
        if layer and base_layer and layer[1] == base_layer[1]:  # names of a base with one layer fit every layer by their ends
            pairs.append((layer, base_layer))
    for names, common, owner, other in (
        (tensors.names(), {layer for layer, _ in pairs}, str(model), f"the base {base}"),
        (base.names(), {layer for _, layer in pairs}, f"the base {base}", str(model)),
    ):
        stacks = {stack for stack, _ in common}
        for name in names:
            layer = layer_of(name)
            if layer and layer[0] in stacks and layer not in common:
                raise CheckpointError(
                    f"Tensor '{name}' of {owner} is in a layer that {other} does not have: these are models of different "
                    f"sizes. {GIVE_BASE}"
                )


def require_known_names(model: TaskModel, base: TensorSource) -> None:
    """Raises CheckpointError if a weight in a layer of the task is none of the base's by its name, but is by its place and
    shape: whole parts of the model would be left out of the merge."""

    def place(name: str, tensors: TensorSource) -> tuple | None:
        stack, number = layer_of(name) or ("", "")
        rest = name[len(stack + number) + 1 :]
        return (number, rest, tuple(tensors.entry(name).shape)) if number and "." in rest else None

    twins = {name: base.twin_of(name) for name in model.tensors.names()}
    lost = {key: name for name in base.names() if name not in twins.values() and (key := place(name, base))}
    for name in (name for name, twin in twins.items() if twin is None):
        if (key := place(name, model.tensors)) and (other := lost.get(key)):
            raise CheckpointError(
                f"Tensor '{name}' of {model} seems to be '{other}' of the base {base}, but nothing says so: the names follow "
                "no rule. Load both with Transformers, save them again, and give the new folders."
            )


def require_fine_tune(model: TaskModel, base: TensorSource, sums: Mapping[str, Any]) -> None:
    """Raises BaseModelError if most task vectors are as long as the base's weights, as they all are for an unrelated model.
    Counts only matrices, if there are any: norms and biases are similar in all models."""
    matrices = [name for name in sums if len(model.tensors.entry(name).shape) > 1] or list(sums)
    moved, weights = (math.fsum(float(sums[name][field]) for name in matrices) for field in ("task_squares", "base_squares"))
    strange = [name for name in matrices if sums[name]["task_squares"] >= sums[name]["base_squares"] > 0]
    if moved >= weights and 2 * len(strange) > len(matrices):
        raise BaseModelError(
            f"The weights of {model} differ from those of the base {base} by {math.sqrt(moved / weights):.2f} times the base's "
            f"own length: it is no fine-tune of this base. {GIVE_BASE}"
        )


def require_closer(figures: Mapping[str, tuple[float, float]], are_coded: bool = False) -> None:
    """Raises CheckpointError if a task would end farther from its own model than the base is. `figures` are by task the
    distance between the two, divided by that of the base, and the cosine of their changes."""
    worse = [
        f"'{task}' ({percent(relative)} of the base's distance, cosine {cosine:.3f})"
        for task, (relative, cosine) in figures.items()
        if relative >= 1
    ]
    if worse:
        reason = "Tasks conflict:"
        advice = 'Store them by another method (--method switch; in Python: method="switch"), merge fewer or more similar tasks'
        if are_coded:
            reason, advice = "Tasks get too few bits:", "Give them more"
        raise CheckpointError(
            f"{reason} the weights of {', '.join(worse)} would be farther from their own models than the base's. {advice}, "
            "compress each checkpoint exactly with hf-ext compress, or merge anyway with --accept-conflicts (in Python: "
            "accept_conflicts=True)."
        )


def vocabulary(config: dict) -> int | None:
    """Returns the vocabulary size in a config.json, or in that of its text model; None if there is none."""
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None
