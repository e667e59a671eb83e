"""Interference of tasks at shared parameters: the tug-of-war of Uni-Med (arXiv 2409.17508, section 3.1)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils.logging import tqdm

from hf_ext.display import COLORS, label, legend, new_figure, save_figure, table
from hf_ext.integration.modes import evaluating

Batches = Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Interference:
    """The agreement of gradients for each pair of tasks. `str()` gives both matrices.

    Attributes:
        tasks: names, in the order of the matrices.
        direction: GD, (tasks, tasks): cos(gᵢ, gⱼ), in -1…1.
        magnitude: GM, (tasks, tasks): 2 ‖gᵢ‖ ‖gⱼ‖ / (‖gᵢ‖² + ‖gⱼ‖²), in 0…1.
        norms: ‖gᵢ‖, (tasks,). If it is 0, as for questions without images at the connector, the task's pairs are nan.
    """

    tasks: list[str]
    direction: torch.Tensor
    magnitude: torch.Tensor
    norms: torch.Tensor

    @property
    def mean_direction(self) -> float:
        """Mean GD over all pairs of two tasks."""
        return self._mean(self.direction)

    @property
    def mean_magnitude(self) -> float:
        """Mean GM over all pairs of two tasks."""
        return self._mean(self.magnitude)

    def summary(self) -> str:
        return f"mean GD {self.mean_direction:.3f}, mean GM {self.mean_magnitude:.3f} of {len(self.tasks)} tasks"

    def plot(self, path: str | os.PathLike) -> None:
        """Draws both matrices as heat maps.

        Raises:
            HfExtError: matplotlib is not installed, or the file cannot be written.
        """
        size = 2.0 + 0.8 * len(self.tasks)
        figure = new_figure(2 * size + 0.8, size)
        for axes, title, unit, values, low, colors in zip(
            figure.subplots(1, 2),
            ("Direction (GD)", "Magnitude (GM)"),
            ("cosine of two gradients", "similarity of their lengths"),
            (self.direction, self.magnitude),
            (-1, 0),
            ("RdBu_r", "Blues"),
        ):
            drawn = axes.imshow(values.numpy(), vmin=low, vmax=1, cmap=colors)
            label(axes, title)
            axes.set_xticks(range(len(self.tasks)), self.tasks, rotation=45, ha="right")
            axes.set_yticks(range(len(self.tasks)), self.tasks)
            for (i, j), value in np.ndenumerate(values.numpy()):
                color = "white" if abs(value) > 0.7 else "black"
                axes.text(j, i, _cell(value), ha="center", va="center", color=color, fontsize=8)
            figure.colorbar(drawn, ax=axes, shrink=0.8).set_label(unit, fontsize="small")
        save_figure(figure, path)

    def __str__(self) -> str:
        parts = []
        for title, values in (("GD", self.direction), ("GM", self.magnitude)):
            rows = [(task, *map(_cell, row)) for task, row in zip(self.tasks, values.tolist())]
            parts.append(table((title, *self.tasks), rows))
        return "\n\n".join([*parts, self.summary()])

    def _mean(self, values: torch.Tensor) -> float:
        return values[~torch.eye(len(values), dtype=torch.bool)].nanmean().item()


def interference(
    model: nn.Module, batches_by_task: Mapping[str, Batches], parameters: Iterable[nn.Parameter] | None = None
) -> Interference:
    """Measures how the gradients of several tasks agree.

    Holds the gradients of all tasks in memory at once. With a hard router GD is 0, because each task has its own expert.
    Dropout is off. The model's own gradients and its training mode do not change.

    Args:
        batches_by_task: for each task, one batch with labels, or several, whose gradients are averaged.
        parameters: parameters to compare; defaults to the trained ones of the connector, or of an adapter's experts and router.

    Raises:
        ValueError: there are fewer than two tasks, no trained parameters, or no labels.
    """
    if len(batches_by_task) < 2:
        raise ValueError("Interference requires batches of at least two tasks.")
    if parameters is None:
        parameters = (
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and any(part in name for part in ("connector.", ".lora_experts.", ".lora_router."))
        )
    parameters = list(parameters)
    if not parameters or not all(parameter.requires_grad for parameter in parameters):
        raise ValueError("There are no gradients to compare: give parameters with requires_grad=True.")
    with evaluating(model):
        gradients = [
            _gradient(model, parameters, task, _on_device(model, batches))
            for task, batches in tqdm(batches_by_task.items(), desc="Differentiating")
        ]
    count = len(gradients)
    products = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(i + 1):
            products[i, j] = products[j, i] = sum(
                torch.sum(a.float() * b.float(), dtype=torch.float64).item() for a, b in zip(gradients[i], gradients[j])
            )
    squares = products.diagonal()
    norms = squares.sqrt()
    pairs = norms[:, None] * norms
    return Interference(
        list(batches_by_task), products / pairs, 2 * pairs / (squares[:, None] + squares).where(pairs > 0, torch.nan), norms
    )


def _gradient(model: nn.Module, parameters: list[nn.Parameter], task: str, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
    total = [torch.zeros_like(parameter) for parameter in parameters]
    with torch.enable_grad():
        for batch in batches:
            loss = model(**batch).loss
            if loss is None:
                raise ValueError(f"The batches of '{task}' have no labels: pass answers= to the processor.")
            if loss.requires_grad:  # False if it depends on no trained parameter
                gradients = torch.autograd.grad(loss / len(batches), parameters, allow_unused=True, materialize_grads=True)
                total = [a.add_(b) for a, b in zip(total, gradients)]
    return total


def _on_device(model: nn.Module, batches: Batches) -> list[dict[str, Any]]:
    """Returns one or several batches as a list, on the model's device."""
    device = next(model.parameters()).device
    return [
        {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in ([batches] if isinstance(batches, Mapping) else batches)
    ]


def _cell(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


class InterferenceCallback(TrainerCallback):
    """Measures interference during training, and adds the means to the Trainer's log. They are printed, and in
    `state.log_history`; trackers such as TensorBoard log before this callback and do not get them.

    Args:
        batches_by_task: as in `interference`.
        every: steps between measurements; None measures whenever the Trainer logs.

    Attributes:
        history: step and result of each measurement.
    """

    def __init__(self, batches_by_task: Mapping[str, Batches], every: int | None = None):
        self.batches_by_task = batches_by_task
        self.every = every
        self.history: list[tuple[int, Interference]] = []

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if not logs or "loss" not in logs:
            return
        if self.every and self.history and state.global_step - self.history[-1][0] < self.every:
            return
        measurement = interference(model, self.batches_by_task)
        self.history.append((state.global_step, measurement))
        means = {"interference_direction": measurement.mean_direction, "interference_magnitude": measurement.mean_magnitude}
        logs.update(means)
        state.log_history[-1].update(means)


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """Images as points in a plane, before and after the connector.

    Attributes:
        tasks: the task of each image.
        before: (images, 2), the mean of each image's visual tokens, in the first two principal components.
        after: (images, 2), the same for the connector's output.
    """

    tasks: list[str]
    before: torch.Tensor
    after: torch.Tensor

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the points, colored by task (Uni-Med, figure 5).

        Raises:
            HfExtError: matplotlib is not installed, or the file cannot be written.
        """
        figure = new_figure(9, 4.2)
        names = list(dict.fromkeys(self.tasks))
        for axes, title, points in zip(figure.subplots(1, 2), ("Before", "After"), (self.before, self.after)):
            for name, color in zip(names, cycle(COLORS)):
                x, y = points[[task == name for task in self.tasks]].T.numpy()
                axes.scatter(x, y, s=12, alpha=0.7, label=name, color=color)
            axes.set_xticks([])
            axes.set_yticks([])
            label(axes, f"{title} the connector", "first principal component", "second")
        legend(axes, "task", outside=True)
        save_figure(figure, path)


@torch.no_grad()
def feature_map(model: PreTrainedModel, batches_by_task: Mapping[str, Batches]) -> FeatureMap:
    """Maps images to points before and after the connector, for different tasks.

    Args:
        batches_by_task: for each task, one or more batches; batches without images are skipped.

    Raises:
        ValueError: there are fewer than three images.
    """
    tasks, before, after = [], [], []
    with evaluating(model):
        for task, batches in batches_by_task.items():
            for batch in _on_device(model, batches):
                if batch.get("pixel_values") is None:
                    continue
                features = model.get_image_features(batch["pixel_values"], batch.get("image_tasks"))
                before.append(features.last_hidden_state.float().mean(1).cpu())
                after.append(features.pooler_output.float().mean(1).cpu())
                tasks += [task] * len(before[-1])
    if len(tasks) < 3:
        raise ValueError(f"There are {len(tasks)} images; a map requires at least three.")
    return FeatureMap(tasks, *(_plane(torch.cat(points)) for points in (before, after)))


def _plane(points: torch.Tensor) -> torch.Tensor:
    points = points - points.mean(0)
    return points @ torch.linalg.svd(points, full_matrices=False).Vh[:2].T
