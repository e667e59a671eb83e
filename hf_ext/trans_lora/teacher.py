"""The teacher: the source model with its adapter, in memory or on a server, and its answers, from whose files a run resumes."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from accelerate import PartialState
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from hf_ext.display import table
from hf_ext.errors import HfExtError
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.generation import Completion, Generator, ModelGenerator, Server
from hf_ext.trans_lora.models import adapter_digest, name_of, on_device
from hf_ext.trans_lora.stages import SEEDS, append_lines, claim, duration, first_line, in_shares, read_lines, write_lines

LABELS = "labels.jsonl"
Pairs = list[tuple[str, str]]


class Teacher:
    """The source model with its adapter, of any PEFT type or merged, which answers inputs; `model` is None if a server has
    it."""

    def __init__(
        self, source: PreTrainedModel | PeftModel | Generator, tokenizer: PreTrainedTokenizerBase, args: TransLoraConfig
    ):
        self.args, self.name = args, name_of(source)
        self.model = source if isinstance(source, nn.Module) else None
        template, system = args.teacher_prompt_template, args.teacher_system_prompt
        self.encoder = Encoder(tokenizer, self.model, template, "The teacher's", system, args.chat_variables)
        self.generator: Generator = source  # type: ignore[assignment]
        if self.model is not None:
            self.generator = ModelGenerator(self.model, self.encoder, args.generation_batch_size)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Moves the teacher to the run's device within the block."""
        return contextlib.nullcontext() if self.model is None else on_device(self.model, self.args.device)

    def completions(self, inputs: Sequence[str]) -> list[Completion]:
        """Returns the answers to inputs."""
        prompts = [self.encoder.prompt(text) for text in inputs]
        if isinstance(self.generator, Server):
            prompts = self.encoder.without_bos(prompts)
        return self.generator(prompts, self.args.max_label_length)

    def answers(self, inputs: Sequence[str]) -> list[str | None]:
        """Returns the likeliest answers; None for an incomplete one."""
        return [_label(one) for one in self.completions(inputs)]

    def fits(self, text: str) -> bool:
        """Checks whether an input with its answer fits into the model's context."""
        return self.encoder.fits(self.encoder.prompt(text), self.args.max_label_length)

    def answer_seeds(self, seeds: Sequence[str], count: int) -> None:
        """Writes the answers to the seeds to seed_answers.jsonl, and prints them with an estimate of the time for `count`
        inputs."""
        args, main, start = self.args, PartialState().is_main_process, time.monotonic()
        path = Path(args.output_dir, SEEDS)
        bar = tqdm(total=len(seeds), desc="Answers to the seeds", disable=not main)
        with bar, self.on_device():
            answers = in_shares(seeds, self.completions)
            bar.update(len(answers))
        if main and answers:
            path.parent.mkdir(parents=True, exist_ok=True)
            pairs = list(zip(seeds, answers))
            write_lines(path, ({"input": seed, "answer": answer.text, "ended": answer.ended} for seed, answer in pairs))
            rows = [(first_line(one.text.strip()), "yes" if one.ended else "no", first_line(seed)) for seed, one in pairs]
            seconds = (time.monotonic() - start) * count / len(answers)
            size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            steps = args.max_steps if args.max_steps > 0 else math.ceil(math.ceil(count / size) * args.num_train_epochs)
            ahead = f"Ahead: {count:,} labels (at this rate {duration(seconds)}) and {steps:,} steps of training."
            bar.write(f"{table(('answer', 'ended', 'seed'), rows)}\n{ahead}", file=sys.stderr)
        if answers:
            self._require_labels(map(_label, answers), f"{len(answers):,} seeds", path)

    def label(self, inputs: Mapping[str, str | None]) -> Pairs:
        """Returns inputs with their labels, as in labels.jsonl. The teacher answers those without one. An answer is no label if
        it is empty or reached max_label_length."""
        args, texts = self.args, list(inputs)
        path = Path(args.output_dir, LABELS)
        names = ("max_label_length", "teacher_prompt_template", "teacher_system_prompt", "chat_template_kwargs")
        digest = None if self.model is None else adapter_digest(self.model)
        settings = {"teacher": self.name, "teacher's adapter (a checksum)": digest} | args.named(*names)
        claim(path.parent, "labels", settings, [LABELS])
        records = read_lines(path)
        if [record.get("input") for record in records] != texts[: len(records)]:
            raise HfExtError(f"{path} has labels of other inputs; delete it, or take another output_dir.")
        step = args.generation_batch_size * args.world_size * 4
        bar = tqdm(total=len(texts), initial=len(records), desc="Labels", disable=not PartialState().is_main_process)
        with bar, self.on_device():
            for start in range(len(records), len(texts), step):
                part = texts[start : start + step]
                missing = [text for text in part if inputs[text] is None]
                answers = {text: inputs[text] for text in part} | dict(zip(missing, in_shares(missing, self.answers)))
                records += (new := [{"input": text, "label": answers[text]} for text in part])
                append_lines(path, new)
                bar.update(len(new))
        self._require_labels((record["label"] for record in records), f"{len(records):,} inputs", path)
        return [(record["input"], record["label"]) for record in records if record["label"]]

    def _require_labels(self, labels: Iterable[str | None], inputs: str, path: Path) -> None:
        if not any(labels):
            raise HfExtError(
                f"The teacher gave none of the {inputs} a whole answer within max_label_length={self.args.max_label_length} "
                f"tokens (see {path}). Its adapter must have learned to end an answer with the token that ends a text. Set "
                "teacher_prompt_template to what it was trained with, or raise max_label_length."
            )


def _label(completion: Completion) -> str | None:
    """Returns the answer if it is complete and not empty."""
    return completion.text.strip() or None if completion.ended else None


def split(pairs: Pairs, held_out: int, seed: int) -> tuple[Pairs, Pairs]:
    """Returns the inputs to train on and the held-out inputs, in their order. Trains on at least one."""
    order = random.Random(seed).sample(range(len(pairs)), len(pairs))
    apart = set(order[: min(held_out, len(pairs) - 1)])
    return [pair for i, pair in enumerate(pairs) if i not in apart], [pairs[i] for i in sorted(apart)]


def agreement(model: PreTrainedModel | PeftModel, encoder: Encoder, pairs: Pairs, args: TransLoraConfig) -> float:
    """Returns the share of inputs to which a model gives the answers that come with them, word for word."""
    writer = ModelGenerator(model, encoder, args.generation_batch_size)
    prompts = [encoder.prompt(text) for text, _ in pairs]
    with on_device(model, args.device):
        answers = in_shares(prompts, lambda part: [one.text.strip() for one in writer(part, args.max_label_length)])
    return sum(answer == expected for answer, (_, expected) in zip(answers, pairs)) / len(pairs)
