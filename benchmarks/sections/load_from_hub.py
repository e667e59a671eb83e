"""Load a model from the Hub, then from what was downloaded, and print the seconds of both as JSON.

benchmarks/sections/links.py runs it in a process of its own, as `huggingface_hub` reads once which Hub to ask.
"""

import argparse
import json
import os
import statistics
import time

import torch
from transformers import AutoConfig
from transformers import AutoModelForSequenceClassification as Classifier

import hf_ext  # noqa: F401


def load_and_read(name: str | os.PathLike, kind: type = Classifier, **options) -> None:
    """Loads a model and reads a byte of every page of its weights, since a plain file is only mapped, not read."""
    for weight in kind.from_pretrained(name, **options).parameters():
        weight.detach().reshape(-1).view(torch.uint8)[::4096].sum()


def empty_model(folder: str | os.PathLike, kind: type = Classifier) -> None:
    """Builds the model of a folder without weights: the part of a load that does not depend on them."""
    with torch.device("meta"):
        kind.from_config(AutoConfig.from_pretrained(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--warm-up", required=True, help="folder of a model that is loaded before, so that all is imported")
    parser.add_argument("--runs", type=int, default=5, help="loads of what was downloaded; the median counts")
    args = parser.parse_args()
    load_and_read(args.warm_up)
    times = []
    for turn in range(args.runs + 1):
        start = time.perf_counter()
        load_and_read(args.model, local_files_only=turn > 0)
        times.append(time.perf_counter() - start)
    print(json.dumps([times[0], statistics.median(times[1:])]))


if __name__ == "__main__":
    main()
