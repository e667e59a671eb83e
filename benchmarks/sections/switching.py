"""Measure time and memory of switching a model in memory to another fine-tune: a section of benchmarks/fm_delta.py."""

import argparse
import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import torch
from measuring import fresh, in_turns, print_table, ratio
from sections.load_from_hub import load_and_read
from sections.pairs import write_models
from transformers import AutoModelForSequenceClassification as Classifier

from hf_ext.fm_delta import switch
from hf_ext.storage.open import open_checkpoint
from hf_ext.storage.prefetch import Prefetcher


def switching(args: argparse.Namespace, dtype: str) -> dict:
    """Seconds to switch to and fro between fine-tunes, beside decoding the same checkpoint and nothing else, and beside
    `from_pretrained`, all warm; and the memory that it takes above the model, without what is mapped from files."""
    first, *others = heads(args)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_models(args, dtype, Path(scratch), [first, *others])
        rows = []
        for other in others:
            here, there = (Path(scratch, f"{task}-packed") for task in (first, other))
            model = Classifier.from_pretrained(here)
            require_same(switch(model, there), Classifier.from_pretrained(Path(scratch, f"{other}-plain")))
            ways = {
                "switch": lambda model=model, here=here, there=there: (switch(model, here), switch(model, there)),
                "decode": lambda here=here, there=there: (decode(here), decode(there)),
                "from_pretrained": lambda here=here, there=there: (load_and_read(here), load_and_read(there)),
                "plain": lambda first=first, other=other: [
                    load_and_read(Path(scratch, f"{task}-plain")) for task in (first, other)
                ],
            }
            times = {way: [pair / 2 for pair in pairs] for way, pairs in in_turns(ways, args.runs).items()}
            above = fresh(memory_above, here, there)
            heads_of = "/".join(str(Classifier.from_pretrained(folder).num_labels) for folder in (here, there))
            results[other] = {"seconds": times, "megabytes_above": above}
            row = [f"{first} and {other}", heads_of]
            row += [f"{statistics.median(times[way]):.3f}" for way in ways]
            row += [f"{ratio(times['switch'], times[way]):.2f}" for way in ("decode", "from_pretrained", "plain")]
            rows.append([*row, f"{above:.1f}"])
    header = ["models", "labels", "switch", "decoding", "from_pretrained", "plain from_pretrained"]
    header += ["× decoding", "× from_pretrained", "× plain", "MB above the model"]
    print_table(f"{dtype}: seconds until a model in memory is another one, median of {args.runs} rounds", header, rows)
    return results


def heads(args: argparse.Namespace) -> list[str]:
    """Returns up to three tasks: the first, one with as many labels, and one with another number of labels."""
    labels = {task: Classifier.from_pretrained(args.pairs / task).num_labels for task in args.tasks}
    first = next((task for task in labels if list(labels.values()).count(labels[task]) > 1), args.tasks[0])
    alike = [task for task in labels if task != first and labels[task] == labels[first]]
    other = [task for task in labels if labels[task] != labels[first]]
    return [first, *alike[:1], *other[:1]]


def decode(folder: Path) -> None:
    """Opens a checkpoint, with all checks, and decodes each tensor once."""
    source = open_checkpoint(folder)
    entries = {name: source.entry(name) for name in source.names()}
    for _ in Prefetcher(source.read, {name: entry.nbytes for name, entry in entries.items()}):
        pass


def require_same(model: torch.nn.Module, other: torch.nn.Module) -> None:
    expected = other.state_dict()
    if any(not torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items()):
        raise SystemExit("the switched model has not the weights of the plain one")


def memory_above(here: Path, there: Path) -> float:
    """Megabytes that one switch takes above the model."""
    model = Classifier.from_pretrained(here)
    switch(model, here)
    return anonymous_peak(lambda: switch(model, there))


def anonymous_peak(action: Callable[[], object]) -> float:
    """Megabytes of memory, without what is mapped from files, that a call takes at most above what there was before."""

    def memory() -> float:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000

    before, most, done = memory(), [0.0], Event()

    def watch() -> None:
        while not done.wait(0.0005):
            most.append(memory() - before)

    watcher = Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return max(most)
