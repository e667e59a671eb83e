"""Interference of tasks at the connector of trained models, and their images before and after the connector (arXiv 2409.17508).

    python examples/run_uni_med.py --data BCCD_Dataset/BCCD --pubmedqa pubmedqa/data
    python benchmarks/uni_med_interference.py --data BCCD_Dataset/BCCD --models uni-med-out/moe_mlp-soft-0 --out pictures

Two tasks pull the connector's weights in directions that agree or not (the paper's section 3.1). For the gradients of two:

  GD    direction, cos(gᵢ, gⱼ), in -1…1. It is 0 with a hard router, whose tasks share no expert.
  GM    magnitude, 2 ‖gᵢ‖ ‖gⱼ‖ / (‖gᵢ‖² + ‖gⱼ‖²), in 0…1.

The samples are training samples of examples/run_uni_med.py, and dropout is off. For each model, OUT gets the heat maps of both
matrices, and a map of the images (the paper's figure 5): the mean of each image's tokens before and after the connector, in its
first two principal components.
"""

import argparse
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from measuring import print_table
from PIL import Image
from torch import nn
from transformers.utils import logging

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from parts.blood_smears import TASKS, load_photos, training_samples, with_images  # noqa: E402

from hf_ext import UniMedForConditionalGeneration, UniMedProcessor, uni_med  # noqa: E402
from hf_ext.display import COLORS, label, legend, new_figure, save_figure  # noqa: E402

Batches = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Interference:
    """The agreement of gradients for each pair of tasks.

    Attributes:
        tasks: names, in the order of the matrices.
        direction: GD, (tasks, tasks).
        magnitude: GM, (tasks, tasks). The pairs of a task without a gradient are nan.
    """

    tasks: list[str]
    direction: torch.Tensor
    magnitude: torch.Tensor

    def means(self) -> tuple[float, float]:
        """Returns the means of GD and GM over all pairs of two tasks."""
        pairs = ~torch.eye(len(self.tasks), dtype=torch.bool)
        return self.direction[pairs].nanmean().item(), self.magnitude[pairs].nanmean().item()

    def plot(self, path: Path) -> None:
        """Draws both matrices as heat maps."""
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
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
            figure.colorbar(drawn, ax=axes, shrink=0.8).set_label(unit, fontsize="small")
        save_figure(figure, path)


def interference(model: nn.Module, batches: Batches, parameters: list[nn.Parameter]) -> Interference:
    """Measures how the gradients of the tasks agree. Holds all of them in memory at once."""
    gradients = []
    for batch in batches.values():
        loss = model(**batch).loss
        parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        gradients.append(torch.cat([part.flatten() for part in parts]))
    products = torch.tensor([[torch.dot(a.double(), b.double()) for a in gradients] for b in gradients])
    squares = products.diagonal()
    pairs = (squares[:, None] * squares).sqrt()
    magnitude = 2 * pairs / (squares[:, None] + squares).where(pairs > 0, torch.nan)
    return Interference(list(batches), products / pairs, magnitude)


@torch.no_grad()
def plot_images(model: UniMedForConditionalGeneration, batches: Batches, path: Path) -> None:
    """Draws images as points before and after the connector, colored by task."""
    points: dict[str, list[torch.Tensor]] = {"Before": [], "After": []}
    for batch in batches.values():
        features = model.get_image_features(batch["pixel_values"], batch.get("image_tasks"))
        points["Before"].append(features.last_hidden_state.mean(1))
        points["After"].append(features.pooler_output.mean(1))
    figure = new_figure(9, 4.2)
    for axes, (title, means) in zip(figure.subplots(1, 2), points.items()):
        centered = torch.cat(means) - torch.cat(means).mean(0)
        plane = centered @ torch.linalg.svd(centered, full_matrices=False).Vh[:2].T
        for task, part, color in zip(batches, plane.split([len(mean) for mean in means]), cycle(COLORS)):
            axes.scatter(*part.T.numpy(), s=12, alpha=0.7, label=task, color=color)
        axes.set_xticks([])
        axes.set_yticks([])
        label(axes, f"{title} the connector", "first principal component", "second")
    legend(axes, "task", outside=True)
    save_figure(figure, path)


def training_batches(args: argparse.Namespace, processor: UniMedProcessor) -> dict[str, dict[str, torch.Tensor]]:
    """Returns a batch of each image task, the samples of examples/run_uni_med.py."""
    collate, rng = uni_med.UniMedCollator(processor), random.Random(0)
    height, width = processor.image_processor(Image.new("RGB", (640, 480)), return_tensors="pt")["pixel_values"].shape[2:]
    photos = load_photos(args.data, "trainval", (width, height))
    rows = {task: training_samples(task, photos, args.views) for task in TASKS}
    chosen = {task: rng.sample(samples, min(args.samples, len(samples))) for task, samples in rows.items()}
    return {task: dict(collate(list(with_images(samples, photos)))) for task, samples in chosen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder BCCD of github.com/Shenggan/BCCD_Dataset")
    parser.add_argument("--models", nargs="+", required=True, help="folders of trained models")
    parser.add_argument("--out", type=Path, default=Path("interference"), help="folder for the pictures")
    parser.add_argument("--samples", type=int, default=128, help="samples of each task")
    parser.add_argument("--views", type=int, default=18, help="views of each training image for each task")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    for folder in args.models:
        model = UniMedForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        batches = training_batches(args, UniMedProcessor.from_pretrained(folder))
        measured = interference(model, batches, list(model.connector.parameters()))
        rows.append([folder, *(f"{mean:.3f}" for mean in measured.means())])
        out = args.out / Path(folder).name
        out.mkdir(parents=True, exist_ok=True)
        measured.plot(out / "interference.png")
        plot_images(model, batches, out / "features.png")
    print_table(f"Gradients at the connector, {args.samples} samples of each task", ["model", "mean GD", "mean GM"], rows)


if __name__ == "__main__":
    main()
