"""Compares methods that store many fine-tunes of one base: size, accuracy and error, each method at several sizes.

For benchmarks/emr.py and benchmarks/emr_generation.py. A size is in bits per parameter and task. T-Switch and UltraDelta have
the sizes of hf_ext's merges.

- hf_ext and EMR, FM-Delta: all safetensors files of their folders.
- T-Switch (arXiv 2412.00054): a mask of the largest changes of a task, their signs and one scale that keeps the length of the
  task vector. The size is that of an ideal code of mask and signs.
- UltraDelta (arXiv 2505.13563v3): `ultra_delta` has its steps. The size is that of an ideal code of the layers' values, zeros
  included, which is less than the paper's Golomb code of their gaps takes. Vectors are the task's own at no cost; embeddings
  are the base's, as in the authors' code.
- BitDelta (arXiv 2402.10193): of each matrix, the signs of its change and one scale, without the training of the scales. Other
  tensors are kept. Zeros stay zeros, which its one bit cannot say.
"""

import json
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
from safetensors.torch import load_file

from hf_ext import emr, fm_delta

Weights = dict[str, torch.Tensor]
Measure = Callable[[str, Weights], np.ndarray]  # the hits of a task by its name and weights
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

    @cached_property
    def layers(self) -> list[str]:
        """The names of all matrices except the embeddings."""
        return [name for name, weight in self.prior.items() if weight.dim() == 2 and "embed" not in name]

    @cached_property
    def trace_norms(self) -> dict[str, float]:
        """The sum of all singular values of the layers' changes, by task."""
        changes = {task: self.changes(self.own(task)) for task in self.folders}
        return {task: sum(float(torch.linalg.svdvals(v[name]).sum()) for name in self.layers) for task, v in changes.items()}

    def bits(self, size: float) -> float:
        """Returns the bits per parameter and task of so many bytes for all tasks."""
        return 8 * size / self.parameters / len(self.folders)

    def with_changes(self, changes: Weights) -> Weights:
        return {name: self.prior[name].float() + change for name, change in changes.items()}


# ---- methods ---------------------------------------------------------------------------------------------------------


def entropy(share):
    """Returns the bits per item of an ideal code that says which items are among this share of all."""
    return -share * np.log2(share) - (1 - share) * np.log2(1 - share)


def task_switch(tasks: Tasks, name: str, bits: float) -> Point:
    """T-Switch with the share of changes whose mask and signs take so many bits."""
    shares = np.linspace(1e-4, 0.6, 10000)
    share = float(np.interp(bits, shares + entropy(shares), shares))

    def weights(task: str, own: Weights) -> Weights:
        vectors = tasks.changes(own)
        sizes = torch.cat([vector.abs().flatten() for vector in vectors.values()])
        kept = int(share * sizes.numel())
        threshold = float(np.partition(sizes.numpy(), -kept)[-kept])
        scale = sizes.norm() / kept**0.5
        return tasks.with_changes({name: scale * v.sign() * (v.abs() >= threshold) for name, v in vectors.items()})

    return Point(name, bits, weights)


def ultra_delta(tasks: Tasks, name: str, bits: float) -> Point:
    """UltraDelta with the share of changes that takes so many bits.

    1. Each layer's changes are rounded to 16 values at equal distances, from the least to the largest change.
    2. Layers are sorted by variance and parted in thirds of the parameters. The first third keeps two thirds of the share, the
       last one four thirds: the distances of the authors' code at their sparsity of 97 % (0.01), in proportion at others.
    3. A layer keeps its share at random, the same of each of its 16 values.
    4. What is kept is divided by the share, and multiplied by a factor that is the smaller, the larger the trace norm of the
       task's changes: 1 for the task of the smallest norm, and at least 0.5, the end of the paper's range.
    """

    def weights(task: str, own: Weights) -> Weights:
        changes = tasks.changes(own)
        order = sorted(tasks.layers, key=lambda layer: float(changes[layer].var()))
        counts = np.array([changes[layer].numel() for layer in order])
        factors = np.choose(np.minimum(3 * np.cumsum(counts) / counts.sum() - 1e-9, 2).astype(int), [2 / 3, 1, 4 / 3])
        values, codes, costs = [], [], []
        for layer in order:
            low, high = changes[layer].aminmax()
            values.append(torch.linspace(float(low), float(high), 16))
            codes.append(((changes[layer] - low) / ((high - low) / 15).clamp_min(1e-30)).round().byte())
            used = codes[-1].flatten().bincount(minlength=16) / changes[layer].numel()
            costs.append(float(torch.special.entr(used).sum() / np.log(2)))
        shares = np.linspace(1e-4, 0.74, 2000)[:, None] * factors
        sizes = ((entropy(shares) + shares * costs) * counts).sum(1) / tasks.parameters
        kept = np.array([np.interp(bits, sizes, share) for share in shares.T])
        scale = max(0.5, min(tasks.trace_norms.values()) / tasks.trace_norms[task]) / np.average(kept, weights=counts)
        generator = torch.Generator().manual_seed(0)
        result = {layer: change if change.dim() == 1 else torch.zeros_like(change) for layer, change in changes.items()}
        for layer, share, value, code in zip(order, kept, values, codes):
            for i in range(16):
                places = (code.flatten() == i).nonzero().flatten()
                chosen = torch.randperm(len(places), generator=generator)[: round(share * len(places))]
                result[layer].view(-1)[places[chosen]] = scale * value[i]
        return tasks.with_changes(result)

    return Point(name, bits, weights)


def bit_delta(tasks: Tasks) -> Point:
    def weights(task: str, own: Weights) -> Weights:
        changes = tasks.changes(own)
        return tasks.with_changes({name: v.abs().mean() * v.sign() if v.dim() > 1 else v for name, v in changes.items()})

    bits = sum(weight.numel() if weight.dim() > 1 else 8 * weight.nbytes for weight in tasks.prior.values())
    return Point("BitDelta", bits / tasks.parameters, weights)


def merged(tasks: Tasks, name: str, out: Path, **options) -> Point:
    """A merge by hf_ext, whose tasks are extracted from its folder. An existing folder is used."""
    if not out.exists():
        emr.merge(tasks.base, tasks.folders, out, accept_conflicts=True, **options)

    def weights(task: str, own: Weights) -> Weights:
        with TemporaryDirectory() as plain:
            emr.extract(out, task, plain)
            return load_file(Path(plain, "model.safetensors"))

    return Point(name, tasks.bits(size_of(out, "*.safetensors")), weights)


def compressed(tasks: Tasks, out: Path) -> Point:
    for task, folder in tasks.folders.items():
        if not (out / task).exists():
            fm_delta.compress_checkpoint(folder, tasks.base, out / task)
    return Point("FM-Delta, exact", tasks.bits(size_of(out, "*.safetensors")))


def points(tasks: Tasks, bits: Sequence[float], folder: Path) -> Iterator[Point]:
    """All methods, those of a chosen size at each size of ours. The first two are the single models and the base."""
    yield Point("single models", tasks.bits(sum(size_of(folder, "model.safetensors") for folder in tasks.folders.values())))
    yield Point("base", 0.0, lambda task, own: tasks.prior)
    yield compressed(tasks, folder / "compressed")
    sizes = []
    for size in bits:
        ours = merged(tasks, f"{OURS}, bits={size}", folder / f"switch-{size}", method="switch", bits=size)
        sizes.append((f"bits={size}", ours.bits))
        yield ours
    for method, name in {ultra_delta: "UltraDelta", task_switch: "T-Switch"}.items():
        for size, counted in sizes:
            yield method(tasks, f"{name}, {size}", counted)
    yield bit_delta(tasks)
    yield merged(tasks, "EMR", folder / "emr", method="emr")


# ---- comparison ------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """The results of a method: for each task, its hits by seed and test item, and its L2 distance from the task's own model,
    relative to that of the base."""

    bits: float
    hits: dict[str, np.ndarray]
    relative: dict[str, float]

    @property
    def accuracy(self) -> float:
        return statistics.mean(float(hits.mean()) for hits in self.hits.values())


def measured(tasks: Tasks, point: Point, hits: Measure, single: Result | None) -> Result:
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


def results_of(tasks: Tasks, bits: Sequence[float], hits: Measure, folder: Path) -> dict[str, Result]:
    """Returns the result of each method for one seed. Does not measure again what results.json has of this size."""
    file, results = folder / "results.json", {}
    stored = json.loads(file.read_text()) if file.exists() else {}
    for point in points(tasks, bits, folder):
        if point.name in stored and stored[point.name][0] == point.bits:
            size, right, relative = stored[point.name]
            result = Result(size, {task: np.array(row) for task, row in right.items()}, relative)
        else:
            result = measured(tasks, point, hits, results.get("single models"))
            stored[point.name] = [result.bits, {task: row.tolist() for task, row in result.hits.items()}, result.relative]
            file.write_text(json.dumps(stored))
        results[point.name] = result
        print(f"{point.name}: {result.bits:.3f} bits, {result.accuracy:.4f}", flush=True)
    return results


def joined(seeds: Sequence[Result]) -> Result:
    hits = {task: np.stack([seed.hits[task] for seed in seeds]) for task in seeds[0].hits}
    relative = {task: statistics.mean(seed.relative[task] for seed in seeds) for task in seeds[0].relative}
    return Result(statistics.mean(seed.bits for seed in seeds), hits, relative)


def difference(ours: Result, peer: Result) -> tuple[float, float, float]:
    """Returns the difference of the mean accuracies, and its interval of 95 %: a bootstrap over the seeds and the items of each
    task. Items are the same for both, and tasks count the same."""
    draw, means = np.random.default_rng(0), np.zeros(2000)
    paired = [hits.astype(float) - peer.hits[task] for task, hits in ours.hits.items()]
    for d in paired:
        seeds, items = d.shape
        drawn = (d[draw.integers(seeds, size=seeds)][:, draw.integers(items, size=items)].mean() for _ in means)
        means += np.fromiter(drawn, float) / len(paired)
    return statistics.mean(float(d.mean()) for d in paired), *np.quantile(means, (0.025, 0.975))


def compare(title: str, seeds: Sequence[tuple[Tasks, Measure]], bits: Sequence[float], keep: Path | None) -> dict:
    """Prints the table of all methods, and returns its numbers. The column of differences is that of our largest point that is
    at most 5 % larger than the method's.

    Args:
        keep: where merges and results of each seed stay. What is there is used.
    """
    with TemporaryDirectory() as scratch:
        folders = [Path(keep or scratch, str(seed)) for seed in range(len(seeds))]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        every = [results_of(tasks, bits, hits, folder) for (tasks, hits), folder in zip(seeds, folders)]
    results = {name: joined([seed[name] for seed in every]) for name in every[0]}
    curve = {name: result for name, result in results.items() if name.startswith(OURS)}
    rows = []
    for name, result in results.items():
        best = max((ours for ours in curve.values() if ours.bits <= 1.05 * result.bits), key=lambda r: r.bits, default=None)
        paired = "–"
        if best and name not in curve:
            mean, low, high = (100 * figure for figure in difference(best, result))
            paired = f"{mean:+.1f} ({low:+.1f} to {high:+.1f}; {best.bits:.2f})"
        figures = [f"{result.bits:.3f}", f"{statistics.mean(result.relative.values()):.3f}", f"{result.accuracy:.4f}"]
        share = f"{100 * result.accuracy / results['single models'].accuracy:.1f} %"
        rows.append([name, *figures, share, paired, *(f"{right.mean():.4f}" for right in result.hits.values())])
    counts = ", ".join(f"{task} {right.shape[1]}" for task, right in results["single models"].hits.items())
    header = ["method", "bits", "relative L2", "mean", "of single", "ours − it, points (our bits)", *seeds[0][0].folders]
    print_table(f"{title} (seeds: {len(seeds)}; test items: {counts})", header, rows)
    return {
        name: {"bits": r.bits, "relative": r.relative, "hits": {task: right.tolist() for task, right in r.hits.items()}}
        for name, r in results.items()
    }
