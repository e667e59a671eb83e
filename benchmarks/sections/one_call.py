"""Print the seconds of one call, and its CPU seconds, in a process of its own, which benchmarks/commands.py starts.

    python -m sections.one_call NAME FOLDER [OTHER]

Everything is imported, and the model that a call changes is loaded before the clock starts.
"""

import sys
import time
from collections.abc import Callable

import torch
from measuring import load_and_read, timed
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from hf_ext.fm_delta import switch


def load(folder: str) -> Callable:
    return lambda: load_and_read(folder, AutoModelForCausalLM)


def first_set_task(folder: str) -> Callable:
    model = loaded(folder)
    return lambda: model.set_task("other")


def next_set_task(folder: str) -> Callable:
    model = loaded(folder)
    model.set_task("other")
    return lambda: model.set_task("one")


def switch_to(folder: str, other: str) -> Callable:
    model = loaded(folder)
    return lambda: switch(model, other)


def loaded(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


if __name__ == "__main__":
    logging.disable_progress_bar()
    name, *folders = sys.argv[1:]
    with torch.no_grad():
        call, before = globals()[name](*folders), time.process_time()
        print(timed(call), time.process_time() - before)
