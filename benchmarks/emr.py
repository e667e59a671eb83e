"""Measure merging of real fine-tunes: accuracy compared with other methods, size, speed of merging and switching, memory.

    python benchmarks/emr.py --pairs pairs --data DIR

``pairs`` is the folder that benchmarks/fine_tunes.py makes from the data sets in DIR. Every method keeps each task's own head,
as the paper does; simple average, task arithmetic (scale 0.3) and TIES are PEFT's (peft.utils.merge_utils). T-Switch
(arXiv 2412.00054) stores of each task a mask of its largest changes, their signs and one scale.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from fine_tunes import FILES, minilm, read_split
from measuring import TORCH, fresh, peak_of, print_table, ratio, run_sections, size_of, timed
from peft.utils.merge_utils import task_arithmetic, ties
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer
from transformers import AutoModelForSequenceClassification as Classifier
from transformers.utils import logging

from hf_ext import emr

REFERENCE_TASKS = ["trec", "cr", "subj", "sst2"]
SWITCHED = (0.5, 0.2, 0.05)  # shares of the changes that T-Switch keeps

logging.disable_progress_bar()
logging.set_verbosity_error()


# ---- accuracy --------------------------------------------------------------------------------------------------------


class Accuracy:
    """Test accuracy of a model on a task, with the batches of each task made once."""

    def __init__(self, data: Path):
        self.data, self.batches = data, {}
        self.tokenizer = AutoTokenizer.from_pretrained(minilm())

    def __call__(self, model: torch.nn.Module, task: str) -> float:
        if task not in self.batches:
            test = sorted(read_split(self.data, task)[1], key=lambda pair: len(pair[1]))
            parts = [test[i : i + 128] for i in range(0, len(test), 128)]
            options = {"truncation": True, "max_length": 64, "padding": True, "return_tensors": "pt"}
            self.batches[task] = [
                (self.tokenizer([text for _, text in part], **options), torch.tensor([label for label, _ in part]))
                for part in parts
            ]
        right = [(model.eval()(**inputs).logits.argmax(-1) == labels) for inputs, labels in self.batches[task]]
        return float(torch.cat(right).float().mean())


def combined(
    base: dict[str, torch.Tensor],
    tasks: list[dict[str, torch.Tensor]],
    combine: Callable[[list[torch.Tensor]], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Returns the base's weights plus the result of `combine` on the task vectors, tensor by tensor."""
    return {
        name: weight + combine([task[name] - weight for task in tasks])
        for name, weight in base.items()
        if name in tasks[0] and weight.is_floating_point()
    }


def peers(count: int) -> dict[str, Callable[[list[torch.Tensor]], torch.Tensor]]:
    """Returns other merging methods, each of which makes one task vector from many."""
    one = torch.ones(count)
    return {
        "simple average": lambda vectors: task_arithmetic(vectors, one / count),
        "task arithmetic": lambda vectors: task_arithmetic(vectors, 0.3 * one),
        "TIES (density 0.2, scale 1)": lambda vectors: ties(vectors, one, density=0.2),
    }


def task_switch(state: dict[str, torch.Tensor], base: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """Returns the weights of one task under T-Switch: the base and, for this share of the changes, the largest ones of the
    model, their signs times one scale that keeps the length of the task vector."""
    vectors = {name: state[name] - weight for name, weight in base.items() if name in state and weight.is_floating_point()}
    sizes = torch.cat([vector.abs().flatten() for vector in vectors.values()])
    kept = max(1, int(share * sizes.numel()))
    threshold = sizes.kthvalue(sizes.numel() - kept + 1).values
    scale = sizes.norm() / kept**0.5
    return {name: base[name] + scale * vector.sign() * (vector.abs() >= threshold) for name, vector in vectors.items()}


def switch_bits(share: float) -> float:
    """Returns the bits per parameter and task that the mask and the signs of T-Switch take with an ideal code."""
    return share - share * math.log2(share) - (1 - share) * math.log2(1 - share)


def switch_name(share: float) -> str:
    return f"T-Switch, {100 * share:.0f} % of the changes ({switch_bits(share):.2f} bits a parameter and task)"


def values_of(base: dict[str, torch.Tensor], task: dict[str, torch.Tensor]) -> int:
    """Returns the number of parameters that are merged."""
    return sum(weight.numel() for name, weight in base.items() if name in task and weight.is_floating_point())


def accuracy(args: argparse.Namespace) -> dict:
    """Returns test accuracies as {group: {method: {task: accuracy}}}, for the four tasks of the reference and for all."""
    measure, results = Accuracy(args.data), {}
    groups = {"four tasks": [task for task in args.tasks if task in REFERENCE_TASKS], "all tasks": args.tasks}
    base = {f"bert.{name}": weight for name, weight in load_file(minilm() / "model.safetensors").items()}
    with torch.inference_mode():
        single = {task: measure(Classifier.from_pretrained(args.pairs / task), task) for task in args.tasks}
    for group, tasks in groups.items():
        folders = {task: args.pairs / task for task in tasks}
        rows = {"single models": {task: single[task] for task in tasks}}
        with torch.inference_mode():
            states = [load_file(folder / "model.safetensors") for folder in folders.values()]
            for name, combine in peers(len(tasks)).items():
                merged = combined(base, states, combine)
                rows[name] = {}
                for task in tasks:
                    model = Classifier.from_pretrained(args.pairs / task)
                    model.load_state_dict(merged, strict=False)
                    rows[name][task] = measure(model, task)
        for share in SWITCHED:
            method = switch_name(share)
            rows[method] = {}
            for task, state in zip(tasks, states):
                model = Classifier.from_pretrained(args.pairs / task)
                model.load_state_dict(task_switch(state, base, share), strict=False)
                with torch.inference_mode():
                    rows[method][task] = measure(model, task)
        for rescale in ("paper", "tensor_mean", "tensor"):
            with tempfile.TemporaryDirectory() as out:
                emr.merge(minilm(), folders, out, rescale=rescale, accept_conflicts=True)
                model = Classifier.from_pretrained(out)
                rows[f"EMR, rescale {rescale}"] = {}
                for task in tasks:
                    model.set_task(task)
                    with torch.inference_mode():
                        rows[f"EMR, rescale {rescale}"][task] = measure(model, task)
        mean = {name: statistics.mean(row.values()) for name, row in rows.items()}
        print_table(
            f"Test accuracy, {group}",
            ["method", "mean", "of single", *tasks],
            [
                [name, *(f"{value:.4f}" for value in (mean[name], mean[name] / mean["single models"], *row.values()))]
                for name, row in rows.items()
            ],
        )
        results[group] = rows
    return results


# ---- size ------------------------------------------------------------------------------------------------------------


def half(args: argparse.Namespace, dtype: str, scratch: Path) -> tuple[Path, dict[str, Path]]:
    """Returns base and fine-tunes in another float type."""
    if dtype == "fp32":
        return minilm(), {task: args.pairs / task for task in args.tasks}
    AutoModel.from_pretrained(minilm(), dtype=TORCH[dtype]).save_pretrained(scratch / "base")
    for task in args.tasks:
        Classifier.from_pretrained(args.pairs / task, dtype=TORCH[dtype]).save_pretrained(scratch / task)
    return scratch / "base", {task: scratch / task for task in args.tasks}


def size(args: argparse.Namespace) -> dict:
    """Returns the bytes of the merge of all tasks and of its parts, by type."""
    results = {}
    for dtype in TORCH:
        with tempfile.TemporaryDirectory() as scratch:
            base, tasks = half(args, dtype, Path(scratch))
            report = emr.merge(base, tasks, Path(scratch, "out"), accept_conflicts=True)
            one = (tasks[args.tasks[0]] / "model.safetensors").stat().st_size
            results[dtype] = {
                "one fine-tune": one,
                "merge": size_of(Path(scratch, "out")),
                "elected": Path(scratch, "out", "model.safetensors").stat().st_size,
                "mask bits": {task.task: task.mask_bits for task in report.tasks},
            }
    rows = []
    for dtype, f in results.items():
        one, merge, elected = (f[what] / 1e6 for what in ("one fine-tune", "merge", "elected"))
        bits = list(f["mask bits"].values())
        sizes = [f"{one:.1f}", f"{merge:.1f}", f"{100 * merge / one:.1f} %", f"{elected:.1f}"]
        rows.append([dtype, *sizes, f"{statistics.mean(bits):.3f}", f"{max(bits):.3f}"])
    header = ["type", "one fine-tune, MB", "merge, MB", "of one", "elected weights, MB", "mask bits/parameter, mean", "most"]
    print_table(f"Size on disk of {len(args.tasks)} tasks, everything in the folder", header, rows)
    return results


# ---- merging ---------------------------------------------------------------------------------------------------------


def formula(base: Path, tasks: dict[str, Path], out: Path) -> None:
    """Computes the paper's formula in plain PyTorch over whole state dicts, and saves the results as tensors and masks of
    bools."""
    prior = {f"bert.{name}": weight for name, weight in load_file(base / "model.safetensors").items()}
    states = [load_file(folder / "model.safetensors") for folder in tasks.values()]
    names = [name for name in prior if name in states[0] and prior[name].is_floating_point()]
    vectors = [{name: state[name] - prior[name] for name in names} for state in states]
    unified, masks, moved, kept = {}, [{} for _ in states], [0.0] * len(states), [0.0] * len(states)
    for name in names:
        stacked = torch.stack([vector[name] for vector in vectors])
        sign = torch.where(stacked.sum(0) > 0, 1.0, -1.0)
        unified[name] = sign * (stacked * sign).clamp(min=0).amax(0)
        for task, vector in enumerate(vectors):
            mask = vector[name] * unified[name] > 0
            masks[task][name] = mask
            moved[task] += float(vector[name].abs().sum())
            kept[task] += float((mask * unified[name]).abs().sum())
    out.mkdir(parents=True, exist_ok=True)
    save_file(unified, out / "unified.safetensors")
    for task, name in enumerate(tasks):
        heads = {key: value for key, value in states[task].items() if key not in names}
        save_file(masks[task] | heads, out / f"{name}.safetensors", {"scale": str(moved[task] / kept[task])})


def ours(base: Path, tasks: dict[str, Path], out: Path) -> None:
    emr.merge(base, tasks, out, accept_conflicts=True)


def nothing(base: Path, tasks: dict[str, Path], out: Path) -> None:
    """Does nothing, to measure the memory of a process that has loaded the libraries."""


def merging(args: argparse.Namespace) -> dict:
    """Returns the seconds from folders to folder, and the peak memory of fresh processes."""
    tasks = {task: args.pairs / task for task in args.tasks}
    ways = {"formula in PyTorch": formula, "hf_ext": ours}
    results = {name: {"seconds": []} for name in [*ways, "libraries alone"]}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(args.runs):
            for i, (name, way) in enumerate(ways.items()):
                results[name]["seconds"].append(timed(way, minilm(), tasks, Path(scratch, str(i))))
        for i, name in enumerate(ways):
            results[name]["bytes"] = size_of(Path(scratch, str(i)))
        for name, way in (ways | {"libraries alone": nothing}).items():
            results[name]["peak"] = fresh(peak_of, way, minilm(), tasks, Path(scratch, "peak"))
    least = results["libraries alone"]["peak"]
    plain = results["formula in PyTorch"]
    rows = []
    for name in ways:
        seconds, extra = results[name]["seconds"], results[name]["peak"] - least
        memory = [f"{results[name]['peak']:.0f}", f"{extra:.0f} ({extra / (plain['peak'] - least):.2f})"]
        speed = [f"{statistics.median(seconds):.2f}", f"{ratio(plain['seconds'], seconds):.2f} ×"]
        rows.append([name, *speed, *memory, f"{results[name]['bytes'] / 1e6:.1f}"])
    header = ["way", "seconds", "speed", "peak, MB", "above the libraries', MB", "on disk, MB"]
    print_table(f"Merging {len(tasks)} tasks from folders to a folder, median of {args.runs}", header, rows)
    return results


# ---- switching -------------------------------------------------------------------------------------------------------


def switching(args: argparse.Namespace) -> dict:
    """Returns the seconds of a switch and of copying all weights of the model in memory, by type and number of threads."""
    results, threads = {}, torch.get_num_threads()
    for dtype in TORCH:
        with tempfile.TemporaryDirectory() as scratch:
            base, tasks = half(args, dtype, Path(scratch))
            emr.merge(base, tasks, Path(scratch, "out"), accept_conflicts=True)
            model = Classifier.from_pretrained(Path(scratch, "out"))
            weights = [weight.detach() for weight in model.parameters()]
            copies = [weight.clone() for weight in weights]

            def copy(weights=weights, copies=copies):
                for target, weight in zip(copies, weights):
                    target.copy_(weight)

            first = timed(model.set_task, model.tasks[1])
            for task in model.tasks:
                model.set_task(task)
            for count in sorted({1, threads}):
                torch.set_num_threads(count)
                times = {"first switch": [first], "switch": [], "copy": []}
                for i in range(max(args.runs, 20)):
                    times["switch"].append(timed(model.set_task, model.tasks[i % len(model.tasks)]))
                    times["copy"].append(timed(copy))
                results[f"{dtype}, {count} threads"] = times
            torch.set_num_threads(threads)
    rows = []
    for name, times in results.items():
        switch, copied, first = (1000 * statistics.median(times[what]) for what in ("switch", "copy", "first switch"))
        rows.append([name, f"{switch:.1f}", f"{copied:.1f}", f"{switch / copied:.2f}", f"{first:.0f}"])
    header = ["type", "switch, ms", "copy of the weights, ms", "ratio", "first switch, ms"]
    print_table("Switching a model of 22.7 M parameters between tasks, warm medians", header, rows)
    return results


SECTIONS = {"accuracy": accuracy, "size": size, "merging": merging, "switching": switching}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="folder made by benchmarks/fine_tunes.py")
    parser.add_argument("--data", type=Path, required=True, help="folder with TREC.train.all, custrev.all, …")
    parser.add_argument("--tasks", nargs="+", default=list(FILES))
    run_sections(parser, SECTIONS)


if __name__ == "__main__":
    main()
