"""The teacher's answers to the seeds and to the inputs, in files from which a run resumes."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from accelerate import PartialState
from transformers.utils.logging import tqdm

from hf_ext.display import table
from hf_ext.errors import HfExtError
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.generation import Completion
from hf_ext.trans_lora.stages import append_lines, claim, read_lines, write_lines
from hf_ext.trans_lora.synthesis import duration, first_line, in_shares
from hf_ext.trans_lora.teacher import Teacher, label

SEEDS, LABELS = "seed_answers.jsonl", "labels.jsonl"
Pairs = Sequence[tuple[str, str]]


def answer_seeds(teacher: Teacher, seeds: Sequence[str], args: TransLoraConfig, count: int) -> list[Completion]:
    """Returns the teacher's answers to the seeds. Writes them to seed_answers.jsonl, and prints them with an estimate of the
    time for `count` inputs."""
    path, start, main = Path(args.output_dir, SEEDS), time.monotonic(), PartialState().is_main_process
    bar = tqdm(total=len(seeds), desc="Answers to the seeds", disable=not main)
    with bar, teacher.on(args.device):
        answers = in_shares(seeds, teacher.completions)
        bar.update(len(answers))
    if main and answers:
        path.parent.mkdir(parents=True, exist_ok=True)
        pairs = list(zip(seeds, answers))
        write_lines(path, ({"input": seed, "answer": answer.text, "ended": answer.ended} for seed, answer in pairs))
        rows = [(first_line(answer.text.strip()), "yes" if answer.ended else "no", first_line(seed)) for seed, answer in pairs]
        seconds = (time.monotonic() - start) * count / len(answers)
        size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        steps = args.max_steps if args.max_steps > 0 else math.ceil(math.ceil(count / size) * args.num_train_epochs)
        ahead = f"Ahead: {count:,} labels (at this rate {duration(seconds)}) and {steps:,} steps of training."
        bar.write(f"{table(('answer', 'ended', 'seed'), rows)}\n{ahead}", file=sys.stderr)
    if answers:
        _require_labels(map(label, answers), f"{len(answers):,} seeds", path, args)
    return answers


def label_inputs(
    teacher: Teacher, inputs: Sequence[str], labels: Mapping[str, str | None], args: TransLoraConfig
) -> list[tuple[str, str]]:
    """Returns inputs with their labels, as in labels.jsonl. The teacher labels inputs that `labels` does not contain."""
    path = Path(args.output_dir, LABELS)
    claim(path.parent, "labels", teacher.settings(), [LABELS])
    records = read_lines(path)
    if [record.get("input") for record in records] != inputs[: len(records)]:
        raise HfExtError(f"{path} has labels of other inputs; delete it, or take another output_dir.")
    step, main = args.generation_batch_size * args.world_size * 4, PartialState().is_main_process
    bar = tqdm(total=len(inputs), initial=len(records), desc="Labels", disable=not main)
    with bar, teacher.on(args.device):
        for start in range(len(records), len(inputs), step):
            part = inputs[start : start + step]
            missing = [text for text in part if labels.get(text) is None]
            answers = {text: labels.get(text) for text in part} | dict(zip(missing, in_shares(missing, teacher.answers)))
            records += (new := [{"input": text, "label": answers[text]} for text in part])
            if main:
                append_lines(path, new)
            bar.update(len(new))
    _require_labels((record["label"] for record in records), f"{len(records):,} inputs", path, args)
    return [(record["input"], record["label"]) for record in records if record["label"]]


def split(pairs: Pairs, held_out: int, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the inputs to train on and the held-out inputs, in their order. Trains on at least one."""
    order = random.Random(seed).sample(range(len(pairs)), len(pairs))
    apart = set(order[: min(held_out, len(pairs) - 1)])
    return [pair for i, pair in enumerate(pairs) if i not in apart], [pairs[i] for i in sorted(apart)]


def _require_labels(labels: Iterable[str | None], inputs: str, path: Path, args: TransLoraConfig) -> None:
    if not any(labels):
        raise HfExtError(
            f"The teacher gave none of the {inputs} a whole answer within max_label_length={args.max_label_length} tokens "
            f"(see {path}). Its adapter must have learned to end an answer with the token that ends a text. Set "
            "teacher_prompt_template to what it was trained with, or raise max_label_length."
        )
