"""The report of a merge: how close each task is to its own model, as numbers, a table and a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from hf_ext.display import COLORS, label, megabytes, new_figure, percent, save_figure, table


@dataclass(frozen=True)
class TaskReport:
    """A task compared with its single model, over all elected or coded parameters (the paper's figure 4).

    Attributes:
        parameters: number of elected or coded parameters.
        scale, least_scale, largest_scale: λ over the whole model, and the range of the λ in use, which is 1 for a coded task.
        density: share of parameters under the task's mask, or with a coded change of their own.
        conflicts: share of the parameters that the task moved whose elected sign is the opposite one.
        distance: L2 distance between the task's weights and the single model's; `relative` divides it by the length of the task
            vector.
        cosine: of the single model's task vector and the merge's.
        bits: size of the masks or the coded changes in the file, in bits per parameter.
        step: size of the steps of a coded task; None for an elected one.
    """

    task: str
    parameters: int
    scale: float
    least_scale: float
    largest_scale: float
    density: float
    conflicts: float
    distance: float
    relative: float
    cosine: float
    bits: float
    step: float | None = None


COLUMNS = ("task", "λ or step", "share", "relative L2", "cosine", "bits/parameter")


@dataclass(frozen=True)
class MergeReport:
    """The report of a merge, with an entry for each task. `str()` gives a table.

    Attributes:
        tasks: in the order of the merge.
        bytes: size of the merge's files, without model card and pictures.
    """

    tasks: list[TaskReport]
    bytes: int

    def to_dict(self) -> dict:
        return asdict(self)

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (
                t.task,
                f"λ {t.scale:.4f}" if t.step is None else f"step {t.step:.2g}",
                percent(t.density),
                percent(t.relative),
                f"{t.cosine:.4f}",
                f"{t.bits:.3f}",
            )
            for t in self.tasks
        ]

    def __str__(self) -> str:
        return f"{table(COLUMNS, self.rows())}\n\n{self.summary()}"

    def summary(self) -> str:
        count = f"{len(self.tasks)} task{'s' * (len(self.tasks) != 1)}"
        return f"{', '.join(t.task for t in self.tasks)}: {count} in {megabytes(self.bytes)}"

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the figures of each task to an image file.

        Raises:
            HfExtError: matplotlib is not installed, or the file cannot be written.
        """
        panels = {
            "Cosine to the single model": ("cosine", 1, "1 is the same direction"),
            "L2 distance": ("relative", 100, "% of the task vector"),
            "Masked or changed alone": ("density", 100, "% of all parameters"),
            "Size": ("bits", 1, "bits per parameter"),
        }
        names = [task.task for task in self.tasks]
        figure = new_figure(11, max(2.4, 0.32 * len(names) + 1.3))
        for axes, (title, (field, factor, unit)) in zip(figure.subplots(1, len(panels), sharey=True), panels.items()):
            values = [factor * getattr(task, field) for task in self.tasks]
            bars = axes.barh(names, values, color=COLORS[0])
            axes.bar_label(bars, fmt="%.3g", fontsize="x-small", padding=2)
            axes.set_xlim(0, 1.15 * max([*values, 1e-9]))
            label(axes, title, unit)
        figure.axes[0].invert_yaxis()
        save_figure(figure, path)


def figures_of(scales: Mapping[str, float], sums: Mapping[str, np.ndarray], values: Mapping[str, int]) -> dict[str, float]:
    """Returns a task's figures, from the λ in use and the sums of each of its tensors (SUMS) and their numbers of values."""

    def total(field: str) -> float:
        return math.fsum(float(tensor[field]) for tensor in sums.values())

    used = [scale for scale in scales.values() if scale]
    product = math.fsum(scales[name] * float(tensor["product"]) for name, tensor in sums.items())
    kept = math.fsum(scales[name] ** 2 * float(tensor["unified_squares"]) for name, tensor in sums.items())
    length, moved = total("task_squares"), total("moved")
    distance = math.sqrt(max(length - 2 * product + kept, 0.0))
    parameters = sum(values[name] for name in sums)
    return {
        "parameters": parameters,
        "scale": _ratio(total("task_l1"), total("unified_l1")),
        "least_scale": min(used, default=0.0),
        "largest_scale": max(used, default=0.0),
        "density": _ratio(total("agreeing"), parameters),
        "conflicts": _ratio(moved - total("agreeing"), moved),
        "distance": distance,
        "relative": _ratio(distance, math.sqrt(length)),
        "cosine": _ratio(product, math.sqrt(length * kept)),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
