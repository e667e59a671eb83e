"""Measure merging of real fine-tunes: accuracy compared with other methods, speed of merging and switching.

    python benchmarks/emr.py --pairs pairs --data DIR

``pairs`` is the folder that benchmarks/fine_tunes.py makes from the data sets in DIR. With several folders, one for each seed,
accuracy is that of all. Every method keeps each task's own head. benchmarks/stored_tasks.py says what the other methods are.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from fine_tunes import FILES, minilm, read_split
from measuring import one_thread, print_table, run_sections, size_of, timed
from safetensors.torch import load_file
from stored_tasks import Tasks, compare
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer
from transformers.utils import logging

from hf_ext import emr

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


def accuracy(args: argparse.Namespace) -> dict:
    """Returns hits, error and bits of each method at each size."""
    base = {f"bert.{name}": weight for name, weight in load_file(minilm() / "model.safetensors").items()}
    seeds = [
        (Tasks(minilm(), base, {task: pairs / task for task in args.tasks}), Hits(args.data, pairs, args.test))
        for pairs in args.pairs
    ]
    return compare("Test accuracy", seeds, args.bits, args.keep)


# ---- merging ---------------------------------------------------------------------------------------------------------


def elected(base: Path, tasks: dict[str, Path], out: Path) -> None:
    emr.merge(base, tasks, out, method="emr", accept_conflicts=True)


def coded(base: Path, tasks: dict[str, Path], out: Path) -> None:
    emr.merge(base, tasks, out, method="switch")


def merging(args: argparse.Namespace) -> dict:
    """Returns the seconds from folders to folder, and the size."""
    tasks, results, rows = {task: args.pairs[0] / task for task in args.tasks}, {}, []
    for name, merge in {"emr": elected, "switch": coded}.items():
        with tempfile.TemporaryDirectory() as scratch:
            results[name] = [timed(merge, minilm(), tasks, Path(scratch, str(i))) for i in range(args.runs)]
            rows.append([name, f"{statistics.median(results[name]):.2f}", f"{size_of(Path(scratch, '0')) / 1e6:.1f}"])
    title = f"Merging {len(tasks)} tasks from folders to a folder, median of {args.runs}"
    print_table(title, ["method", "seconds", "on disk, MB"], rows)
    return results


# ---- switching -------------------------------------------------------------------------------------------------------


def switching(args: argparse.Namespace) -> dict:
    """Returns the seconds of a switch and of copying all weights of the model in memory, on one thread."""
    results, tasks = {}, {task: args.pairs[0] / task for task in args.tasks}
    for name, merge in {"emr": elected, "switch": coded}.items():
        with tempfile.TemporaryDirectory() as scratch, one_thread():
            merge(minilm(), tasks, Path(scratch, "out"))
            model = Classifier.from_pretrained(Path(scratch, "out"))
            weights = [weight.detach() for weight in model.parameters()]
            copies = [weight.clone() for weight in weights]

            def copy(weights=weights, copies=copies):
                for target, weight in zip(copies, weights):
                    target.copy_(weight)

            times = results[name] = {"first switch": [timed(model.set_task, model.tasks[1])], "switch": [], "copy": []}
            for task in model.tasks:
                model.set_task(task)
            for i in range(max(args.runs, 20)):
                times["switch"].append(timed(model.set_task, model.tasks[i % len(model.tasks)]))
                times["copy"].append(timed(copy))
    rows = []
    for name, times in results.items():
        switch, copied, first = (1000 * statistics.median(times[what]) for what in ("switch", "copy", "first switch"))
        rows.append([name, f"{switch:.1f}", f"{copied:.1f}", f"{first:.0f}"])
    header = ["method", "switch, ms", "copy of the weights, ms", "first switch, ms"]
    print_table("Switching a model of 22.7 M parameters between tasks, fp32, one thread, warm medians", header, rows)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, nargs="+", required=True, help="folders made by benchmarks/fine_tunes.py")
    parser.add_argument("--data", type=Path, required=True, help="folder with TREC.train.all, custrev.all, …")
    parser.add_argument("--tasks", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--test", type=int, help="test items of each task, all by default")
    parser.add_argument("--bits", nargs="*", type=float, default=[0.1, 0.25, 0.5, 1.0], help="sizes of the methods")
    parser.add_argument("--keep", type=Path, help="folder for merges and results; what is there is not measured again")
    run_sections(parser, {"accuracy": accuracy, "merging": merging, "switching": switching}, has_runs=True)


if __name__ == "__main__":
    main()
