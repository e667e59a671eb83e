"""Measure merging of real fine-tunes: accuracy compared with other methods, size, speed of merging and switching, memory.

    python benchmarks/emr.py --pairs pairs --data DIR

``pairs`` is the folder that benchmarks/fine_tunes.py makes from the data sets in DIR. Every method keeps each task's own head.
benchmarks/stored_tasks.py says what the other methods are. Ten tasks in one folder:

    TASKS="trec cr subj sst2 mpqa source order halves asks length"
    python benchmarks/fine_tunes.py --data DIR --out ten --steps 40 --rate 2e-4 --tasks $TASKS
    python benchmarks/emr.py --pairs ten --data DIR --sections size accuracy --bits --test 500 --tasks $TASKS
"""

import argparse
import statistics
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import torch
from fine_tunes import FILES, MADE, minilm, read_split
from measuring import TORCH, fresh, peak_of, print_table, ratio, run_sections, size_of, timed
from safetensors.torch import load_file, save_file
from stored_tasks import Tasks, compare, points
from transformers import AutoModel, AutoTokenizer
from transformers import AutoModelForSequenceClassification as Classifier
from transformers.utils import logging

from hf_ext import emr, fm_delta

logging.disable_progress_bar()
logging.set_verbosity_error()


# ---- accuracy --------------------------------------------------------------------------------------------------------


class Hits:
    """The items of a task's test set that a model gets right, with the batches of each task made once."""

    def __init__(self, data: Path, pairs: Path, count: int | None):
        self.data, self.pairs, self.count, self.batches = data, pairs, count, {}
        self.tokenizer = AutoTokenizer.from_pretrained(minilm())

    def __call__(self, task: str, weights: dict[str, torch.Tensor]) -> np.ndarray:
        if task not in self.batches:
            test = sorted(read_split(self.data, task)[1][: self.count], key=lambda pair: len(pair[1]))
            parts = [test[i : i + 128] for i in range(0, len(test), 128)]
            options = {"truncation": True, "max_length": 64, "padding": True, "return_tensors": "pt"}
            self.batches[task] = [
                (self.tokenizer([text for _, text in part], **options), torch.tensor([label for label, _ in part]))
                for part in parts
            ]
        model = Classifier.from_pretrained(self.pairs / task).eval()
        model.load_state_dict(weights, strict=False)
        with torch.inference_mode():
            right = [(model(**inputs).logits.argmax(-1) == labels) for inputs, labels in self.batches[task]]
        return torch.cat(right).numpy()


def tasks_of(args: argparse.Namespace) -> Tasks:
    base = {f"bert.{name}": weight for name, weight in load_file(minilm() / "model.safetensors").items()}
    return Tasks(minilm(), base, {task: args.pairs / task for task in args.tasks})


def accuracy(args: argparse.Namespace) -> dict:
    """Returns hits, error and bits of each method at each size."""
    tasks, hits = tasks_of(args), Hits(args.data, args.pairs, args.test)
    with tempfile.TemporaryDirectory() as scratch:
        return compare("Test accuracy", tasks, points(tasks, args.bits, Path(scratch)), hits)


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
    """Returns the bytes of the folders of all tasks, everything in them, by type."""
    results = {}
    for dtype in TORCH:
        with tempfile.TemporaryDirectory() as scratch:
            base, tasks = half(args, dtype, Path(scratch))
            for task, folder in tasks.items():
                fm_delta.compress_checkpoint(folder, base, Path(scratch, "compressed", task))
            for method in ("emr", "switch"):
                emr.merge(base, tasks, Path(scratch, method), method=method, accept_conflicts=True)
            results[dtype] = {"fine-tunes": sum(map(size_of, tasks.values()))}
            results[dtype] |= {method: size_of(Path(scratch, method)) for method in ("compressed", "emr", "switch")}
            results[dtype]["elected"] = size_of(Path(scratch, "emr"), "model.safetensors")
    header = ["type", "fine-tunes, MB", "FM-Delta (exact), MB", "EMR, MB", "switch, MB", "EMR's elected weights, MB"]
    rows = [[dtype, *(f"{size / 1e6:.1f}" for size in sizes.values())] for dtype, sizes in results.items()]
    print_table(f"Size on disk of {len(args.tasks)} tasks, everything in the folders", header, rows)
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


def elected(base: Path, tasks: dict[str, Path], out: Path) -> None:
    emr.merge(base, tasks, out, accept_conflicts=True)


def coded(base: Path, tasks: dict[str, Path], out: Path) -> None:
    emr.merge(base, tasks, out, method="switch")


def nothing(base: Path, tasks: dict[str, Path], out: Path) -> None:
    """Does nothing, to measure the memory of a process that has loaded the libraries."""


def merging(args: argparse.Namespace) -> dict:
    """Returns the seconds from folders to folder, and the peak memory of fresh processes."""
    tasks = {task: args.pairs / task for task in args.tasks}
    ways = {"formula in PyTorch": formula, "hf_ext, emr": elected, "hf_ext, switch": coded}
    results = {name: {"seconds": []} for name in [*ways, "libraries alone"]}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(args.runs):
            for i, (name, way) in enumerate(ways.items()):
                results[name]["seconds"].append(timed(way, minilm(), tasks, Path(scratch, str(i))))
        for i, name in enumerate(ways):
            results[name]["bytes"] = size_of(Path(scratch, str(i)))
        for name, way in (ways | {"libraries alone": nothing}).items():
            results[name]["peak"] = fresh(peak_of, way, minilm(), tasks, Path(scratch, f"peak of {way.__name__}"))
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
    for dtype, merge in product(TORCH, (elected, coded)):
        with tempfile.TemporaryDirectory() as scratch:
            base, tasks = half(args, dtype, Path(scratch))
            merge(base, tasks, Path(scratch, "out"))
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
                results[f"{dtype}, {merge.__name__}, {count} threads"] = times
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
    parser.add_argument("--tasks", nargs="+", default=list(FILES), choices=[*FILES, *MADE])
    parser.add_argument("--test", type=int, help="test items of each task, all by default")
    parser.add_argument("--bits", nargs="*", type=float, default=[0.05, 0.1, 0.3, 0.5, 0.9], help="sizes of the methods")
    run_sections(parser, SECTIONS)


if __name__ == "__main__":
    main()
