"""Measure merging of fine-tunes that generate answers: exact matches compared with other methods.

    python benchmarks/emr_generation.py --lm lm --data DIR --bbh BBH --out generation     # an hour on one core

``lm`` is the folder that benchmarks/language_model.py makes; DIR holds the texts (see there), BBH is the folder bbh of
github.com/suzgunmirac/BIG-Bench-Hard. SmolLM2-135M-Instruct is fine-tuned, all weights of it, on three tasks:

    trec       the type of the answer to a question, one of six words
    sort       three to five words in alphabetical order. The words are those of BIG-Bench Hard's word_sorting; lists of the
               test are of words that no list of the training has
    boolean    the value of a Boolean expression. The test is BIG-Bench Hard's 250 boolean_expressions, and 50 items that a
               program makes in the same form, as it makes those of the training; none is in both

Weights are trained in float32 and saved in bf16, as ``generation/TASK``. Existing folders are skipped. With several folders at
--out, one for each seed, the accuracy is that of all. All methods have their weights in bf16 on disk and compute in float32,
since few CPUs compute in bf16; with --bf16 also in bf16. Decoding is greedy. An answer is right if its first line equals the
expected one exactly. benchmarks/stored_tasks.py says what the methods are, and how sizes count.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from fine_tunes import read_split
from language_model import save, train
from measuring import run_sections
from safetensors.torch import load_file
from stored_tasks import Tasks, compare
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, PreTrainedModel, set_seed
from transformers.utils import logging

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from parts.prompted_tasks import answers, encoded, load_tokenizer, prompted  # noqa: E402

STEPS = {"trec": 80, "sort": 120, "boolean": 120}
HELD_OUT = 100  # training items that judge the training
NEW_TOKENS = {"trec": 2, "sort": 18, "boolean": 2}  # no expected answer is longer
Pairs = list[tuple[str, str]]

logging.disable_progress_bar()
logging.set_verbosity_error()


# ---- tasks -----------------------------------------------------------------------------------------------------------


def expression(draw: random.Random, words: int) -> str:
    """Returns a Boolean expression of so many words."""
    if words == 1:
        return draw.choice(["True", "False"])
    form = draw.choice(["not", "brackets", "and", "or"] if words > 2 else ["not"])
    if form == "not":
        return f"not {expression(draw, words - 1)}"
    if form == "brackets":
        return f"( {expression(draw, words - 2)} )"
    left = draw.randrange(1, words - 1)
    return f"{expression(draw, left)} {form} {expression(draw, words - 1 - left)}"


def word_lists(draw: random.Random, words: list[str]) -> Iterator[tuple[str, str]]:
    while True:
        chosen = draw.sample(words, draw.randint(3, 5))
        yield f"Sort the words alphabetically: {' '.join(chosen)}\nSorted:", " ".join(sorted(chosen))


@cache
def items(data: Path, bbh: Path, task: str, count: int) -> tuple[Pairs, Pairs]:
    """Prompts with answers, to train on and to test on: 5000, fewer where a set has fewer, and `count`."""
    draw = random.Random(0)
    if task == "trec":
        train, test = (prompted(task, rows) for rows in read_split(data, task))
        train = sorted(set(train) - set(test))
        draw.shuffle(train)
        draw.shuffle(test)
    elif task == "sort":
        examples = json.loads((bbh / "word_sorting.json").read_text())["examples"]
        words = sorted({word for example in examples for word in example["target"].split() if word.isalpha()})
        draw.shuffle(words)
        parts = (words[len(words) // 4 :], words[: len(words) // 4])
        train, test = ([item for _, item in zip(range(5000), word_lists(draw, part))] for part in parts)
    else:
        examples = json.loads((bbh / "boolean_expressions.json").read_text())["examples"]
        test = [(example["input"], example["target"]) for example in examples]
        length = len(test[0][0].split()) - 1
        made = {expression(draw, length): None for _ in range(20000)}
        train = [(f"{text} is", str(eval(text))) for text in made if f"{text} is" not in dict(test)]
        draw.shuffle(train)
        train.sort(key=lambda item: item[1])  # as many of the one as of the other
        half = min(sum(answer == value for _, answer in train) for value in ("True", "False"))
        train = [item for pair in zip(train[:half], train[-half:]) for item in pair]
        train, test = train[:-50], test + train[-50:]
    return train[:5000], test[:count]


# ---- training --------------------------------------------------------------------------------------------------------


def batches(pairs: Pairs, tokenizer, args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of items that are about as long as each other, in random order."""
    rows = sorted(encoded(pairs, tokenizer, args.max_length), key=lambda row: len(row["input_ids"]))
    parts = [rows[start : start + args.batch_size] for start in range(0, len(rows), args.batch_size)]
    random.Random(0).shuffle(parts)
    collate = DataCollatorForSeq2Seq(tokenizer, padding=True)
    yield from (collate(part) for part in parts)


def fine_tune(args: argparse.Namespace, task: str, seed: int) -> Path:
    """Returns the folder of a task's fine-tune, which is trained unless it is there. Seeds learn from different items."""
    folder = args.out[seed] / task
    if folder.exists():
        return folder
    set_seed(seed)
    tokenizer = load_tokenizer(args.lm / "base")
    pairs, _ = items(args.data, args.bbh, task, args.test)
    model = AutoModelForCausalLM.from_pretrained(args.lm / "base", dtype=torch.float32)
    before = right(model, tokenizer, task, pairs[:HELD_OUT], args)
    chosen = random.Random(seed).sample(pairs[HELD_OUT:], STEPS[task] * args.batch_size)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16, cache_enabled=False):
        list(train(model, batches(chosen, tokenizer, args), args.rate, STEPS[task]))
    after = right(model, tokenizer, task, pairs[:HELD_OUT], args)
    print(f"{task}: {after:.3f} of the held-out training items are right, {before:.3f} before", flush=True)
    save(model, tokenizer, folder)
    return folder


# ---- accuracy --------------------------------------------------------------------------------------------------------


def hits(model: PreTrainedModel, tokenizer, task: str, pairs: Pairs, args: argparse.Namespace) -> np.ndarray:
    """Returns which prompts of a task a model answers exactly."""
    prompts, expected = zip(*pairs)
    written = answers(model, tokenizer, list(prompts), args.max_length, max_new_tokens=NEW_TOKENS[task])
    return np.array(written) == np.array(expected)


def right(*args) -> float:
    """Returns the share of prompts that a model answers exactly; the arguments are those of `hits`."""
    return float(hits(*args).mean())


def accuracy(args: argparse.Namespace) -> dict:
    """Returns the items that are right, error and bits of each method at each size."""
    base, tests = args.lm / "base", {}
    for task in args.tasks:
        tests[task] = sorted(items(args.data, args.bbh, task, args.test)[1], key=lambda item: len(item[0]))
    dtype, tokenizer = torch.bfloat16 if args.bf16 else torch.float32, load_tokenizer(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)

    def measure(task: str, weights: dict[str, torch.Tensor]) -> np.ndarray:
        model.load_state_dict(weights, strict=False)  # the head is the embedding
        return hits(model, tokenizer, task, tests[task], args)

    prior = load_file(base / "model.safetensors")
    folders = [{task: fine_tune(args, task, seed) for task in args.tasks} for seed in range(len(args.out))]
    seeds = [(Tasks(base, prior, tasks), measure) for tasks in folders]
    return compare("Exact matches of generated answers", seeds, args.bits, args.keep)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, required=True, help="folder made by benchmarks/language_model.py")
    parser.add_argument("--data", type=Path, required=True, help="folder with TREC.train.all and TREC.test.all")
    parser.add_argument("--bbh", type=Path, required=True, help="folder with word_sorting.json, boolean_expressions.json")
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="where the fine-tunes go, a folder for each seed")
    parser.add_argument("--tasks", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--rate", type=float, default=3e-5, help="learning rate")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=64, help="tokens of a prompt that are used, the last ones")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, faster on processors that do so")
    parser.add_argument("--test", type=int, default=200, help="test items of each task")
    parser.add_argument("--bits", nargs="*", type=float, default=[0.1, 0.25, 0.5, 1.0], help="sizes of the methods")
    parser.add_argument("--keep", type=Path, help="folder for merges and results; what is there is not measured again")
    run_sections(parser, {"accuracy": accuracy})
