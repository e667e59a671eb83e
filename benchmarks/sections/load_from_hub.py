"""Load a model from the Hub, then from what was downloaded, and print the seconds of both as JSON.

benchmarks/links.py runs it in a process of its own, as `huggingface_hub` reads once which Hub to ask.
"""

import argparse
import json
import statistics
import time

import torch
from transformers import AutoModelForSequenceClassification as Classifier

import hf_ext  # noqa: F401


def load_and_read(name: str, **options) -> None:
    """Loads a model and reads a byte of every page of its weights, since a plain file is only mapped, not read."""
    for weight in Classifier.from_pretrained(name, **options).parameters():
        weight.detach().reshape(-1).view(torch.uint8)[::4096].sum()


def seconds(name: str, **options) -> float:
    start = time.perf_counter()
    load_and_read(name, **options)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--warm-up", required=True, help="folder of a model that is loaded before, so that all is imported")
    parser.add_argument("--runs", type=int, default=5, help="loads of what was downloaded; the median counts")
    args = parser.parse_args()
    load_and_read(args.warm_up)
    first = seconds(args.model)
    again = statistics.median(seconds(args.model, local_files_only=True) for _ in range(args.runs))
    print(json.dumps([first, again]))


if __name__ == "__main__":
    main()
