"""Compares methods that store many fine-tunes of one base: size, accuracy and error, each method at several sizes.

For benchmarks/emr.py and benchmarks/emr_generation.py. A size is in bits per parameter and task:

- hf_ext and EMR, FM-Delta: all safetensors files of their folders.
- T-Switch (arXiv 2412.00054): a mask of the largest changes of a task, their signs and one scale that keeps the length of the
  task vector. The size is that of an ideal code of mask and signs.
- BitDelta (arXiv 2402.10193): of each matrix, the signs of its change and one scale, without the training of the scales. Other
  tensors are kept. Zeros stay zeros, which its one bit cannot say.
- LoRA: hf_ext.fm_delta.extract_lora, of the rank that comes closest to the size, counted in 16 bits. Embeddings and others
  are the base's.
- TIES (density 0.2) is PEFT's, and stores one model.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from measuring import print_table, size_of
from peft.utils.merge_utils import ties
from safetensors.torch import load_file

from hf_ext import emr, fm_delta

Weights = dict[str, torch.Tensor]
OURS = "hf_ext, switch"


class Point(NamedTuple):
    """A method at one size: its bits per parameter and task, and the weights of a task by its name and its own weights. Without
    these, the weights are the task's own."""

    name: str
    bits: float
    weights: Callable[[str, Weights], Weights] | None = None


@dataclass(frozen=True)
class Tasks:
    """Fine-tunes of one base, each a folder, and the base's weights under the names of the fine-tunes."""

    base: Path
    prior: Weights
    folders: Mapping[str, Path]

    def own(self, task: str) -> Weights:
        return load_file(self.folders[task] / "model.safetensors")

    def changes(self, own: Weights) -> Weights:
        """Returns the change of each tensor of floats that the base has too."""
        prior = {name: weight for name, weight in self.prior.items() if name in own and weight.is_floating_point()}
        return {name: own[name].float() - weight.float() for name, weight in prior.items()}

    @cached_property
    def parameters(self) -> int:
        return sum(change.numel() for change in self.changes(self.own(next(iter(self.folders)))).values())

    def bits(self, size: float) -> float:
        """Returns the bits per parameter and task of so many bytes for all tasks."""
        return 8 * size / self.parameters / len(self.folders)

    def with_changes(self, changes: Weights) -> Weights:
        return {name: self.prior[name].float() + change for name, change in changes.items()}


# ---- methods ---------------------------------------------------------------------------------------------------------


def ties_merging(tasks: Tasks) -> Point:
    """TIES makes one task vector from many."""
    vectors, one = [tasks.changes(tasks.own(task)) for task in tasks.folders], torch.ones(len(tasks.folders))
    merged = {name: ties([vector[name] for vector in vectors], one, density=0.2) for name in vectors[0]}
    size = sum(weight.nbytes for weight in tasks.prior.values())
    return Point("TIES", tasks.bits(size), lambda task, own: tasks.with_changes(merged))


def task_switch(tasks: Tasks, bits: float) -> Point:
    """T-Switch with the share of changes whose mask and signs take so many bits."""

    def cost(share: float) -> float:
        return share - share * math.log2(share) - (1 - share) * math.log2(1 - share)

    share = float(np.interp(bits, *zip(*((cost(share), share) for share in np.linspace(1e-4, 0.6, 10000)))))

    def weights(task: str, own: Weights) -> Weights:
        vectors = tasks.changes(own)
        sizes = torch.cat([vector.abs().flatten() for vector in vectors.values()])
        kept = int(share * sizes.numel())
        threshold = sizes.kthvalue(sizes.numel() - kept + 1).values
        scale = sizes.norm() / kept**0.5
        return tasks.with_changes({name: scale * v.sign() * (v.abs() >= threshold) for name, v in vectors.items()})

    return Point(f"T-Switch, {100 * share:.1f} % of the changes", cost(share), weights)


def bit_delta(tasks: Tasks) -> Point:
    def weights(task: str, own: Weights) -> Weights:
        changes = tasks.changes(own)
        return tasks.with_changes({name: v.abs().mean() * v.sign() if v.dim() > 1 else v for name, v in changes.items()})

    bits = sum(weight.numel() if weight.dim() > 1 else 8 * weight.nbytes for weight in tasks.prior.values())
    return Point("BitDelta", bits / tasks.parameters, weights)


def lora(tasks: Tasks, bits: float) -> Point:
    layers = [weight.shape for name, weight in tasks.prior.items() if weight.dim() == 2 and "embed" not in name]
    rank = max(1, round(bits * tasks.parameters / 16 / sum(map(sum, layers))))

    def weights(task: str, own: Weights) -> Weights:
        merged = tasks.with_changes({name: torch.zeros_like(change) for name, change in tasks.changes(own).items()})
        with TemporaryDirectory() as folder:
            fm_delta.extract_lora(tasks.folders[task], tasks.base, folder, rank=rank)
            config = json.loads(Path(folder, "adapter_config.json").read_text())
            factors = load_file(Path(folder, "adapter_model.safetensors"))
        for key, a in factors.items():
            if key.endswith(".lora_A.weight"):
                name = key.removeprefix("base_model.model.").replace(".lora_A", "")
                merged[name] += config["lora_alpha"] / config["r"] * (factors[key.replace("lora_A", "lora_B")] @ a).float()
        return merged

    return Point(f"LoRA, rank {rank}", rank * 16 * sum(map(sum, layers)) / tasks.parameters, weights)


def merged(tasks: Tasks, name: str, out: Path, **options) -> Point:
    """A merge by hf_ext, whose tasks are extracted from its folder."""
    emr.merge(tasks.base, tasks.folders, out, accept_conflicts=True, **options)

    def weights(task: str, own: Weights) -> Weights:
        with TemporaryDirectory() as plain:
            emr.extract(out, task, plain)
            return load_file(Path(plain, "model.safetensors"))

    return Point(name, tasks.bits(size_of(out, "*.safetensors")), weights)


def switched(tasks: Tasks, out: Path, bits: float | None) -> Point:
    """`method="switch"` of hf_ext, at its default without a size."""
    if bits is None:
        return merged(tasks, f"{OURS}, default", out, method="switch")
    return merged(tasks, f"{OURS}, bits={bits}", out, method="switch", bits=bits)


def compressed(tasks: Tasks, out: Path) -> Point:
    for task, folder in tasks.folders.items():
        fm_delta.compress_checkpoint(folder, tasks.base, out / task)
    return Point("FM-Delta, exact", tasks.bits(size_of(out, "*.safetensors")))


def points(tasks: Tasks, bits: Sequence[float], scratch: Path) -> Iterator[Point]:
    """All methods, those of a chosen size at each of `bits`. The first two are the single models and the base."""
    yield Point("single models", tasks.bits(sum(size_of(folder, "model.safetensors") for folder in tasks.folders.values())))
    yield Point("base", 0.0, lambda task, own: tasks.prior)
    yield compressed(tasks, scratch / "compressed")
    for i, size in enumerate((None, *bits)):
        yield switched(tasks, scratch / f"switch{i}", size)
    for size in bits:
        yield task_switch(tasks, size)
    for size in bits:
        yield lora(tasks, size)
    yield bit_delta(tasks)
    yield merged(tasks, "EMR", scratch / "emr")
    yield ties_merging(tasks)


# ---- comparison ------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What a method reaches: for each task, its hits by test item, and its L2 distance from the task's own model, relative to
    that of the base."""

    bits: float
    hits: dict[str, np.ndarray]
    relative: dict[str, float]

    @property
    def accuracy(self) -> float:
        return statistics.mean(float(hits.mean()) for hits in self.hits.values())


def measured(tasks: Tasks, point: Point, hits: Callable[[str, Weights], np.ndarray], single: Result | None) -> Result:
    if point.weights is None and single:
        return Result(point.bits, single.hits, single.relative)
    result = Result(point.bits, {}, {})
    for task in tasks.folders:
        own = tasks.own(task)
        weights = point.weights(task, own) if point.weights else own
        result.hits[task] = hits(task, weights)
        changes = tasks.changes(own)
        rest = sum(float((weights[name].float() - own[name].float()).double().square().sum()) for name in changes)
        result.relative[task] = (rest / sum(float(change.double().square().sum()) for change in changes.values())) ** 0.5
    return result


def difference(ours: Result, peer: Result) -> tuple[float, float]:
    """Returns the difference of the mean accuracies, and half of its interval of 95 %: the items are the same, tasks count the
    same."""
    paired = [hits.astype(float) - peer.hits[task] for task, hits in ours.hits.items()]
    variance = sum(d.var() / len(d) for d in paired) / len(paired) ** 2
    return statistics.mean(float(d.mean()) for d in paired), 1.96 * variance**0.5


def compare(title: str, tasks: Tasks, every: Iterator[Point], hits: Callable[[str, Weights], np.ndarray]) -> dict:
    """Prints the table of all methods, and returns its numbers. The last column is the difference of our largest point that is
    at most 5 % larger than the method's."""
    results: dict[str, Result] = {}
    for point in every:
        results[point.name] = result = measured(tasks, point, hits, results.get("single models"))
        print(f"{point.name}: {result.bits:.3f} bits, {result.accuracy:.4f}", flush=True)
    curve = {name: result for name, result in results.items() if name.startswith(OURS)}
    rows = []
    for name, result in results.items():
        best = max((ours for ours in curve.values() if ours.bits <= 1.05 * result.bits), key=lambda r: r.bits, default=None)
        paired = "–"
        if best and name not in curve:
            mean, half = difference(best, result)
            paired = f"{100 * mean:+.1f} ± {100 * half:.1f} ({best.bits:.2f})"
        figures = [f"{result.bits:.3f}", f"{statistics.mean(result.relative.values()):.3f}", f"{result.accuracy:.4f}"]
        share = f"{100 * result.accuracy / results['single models'].accuracy:.1f} %"
        rows.append([name, *figures, share, paired, *(f"{right.mean():.4f}" for right in result.hits.values())])
    counts = ", ".join(f"{task} {len(right)}" for task, right in results["single models"].hits.items())
    header = ["method", "bits", "relative L2", "mean", "of single", "ours − it, points (our bits)", *tasks.folders]
    print_table(f"{title} (test items: {counts})", header, rows)
    return {
        name: {"bits": r.bits, "relative": r.relative, "hits": {task: right.tolist() for task, right in r.hits.items()}}
        for name, r in results.items()
    }
