"""Shared by examples and benchmarks with language models: prompts with answers, training on them, and generating answers."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

PROMPTS = {
    "trec": "Question: {}\nType of the answer:",
    "cr": "Review: {}\nSentiment:",
    "subj": "Sentence: {}\nOpinion or plot:",
    "sst2": "Review: {}\nSentiment:",
    "mpqa": "Phrase: {}\nSentiment:",
}
LABELS = {
    "trec": ("description", "entity", "abbreviation", "person", "place", "number"),
    "cr": ("negative", "positive"),
    "subj": ("opinion", "plot"),
    "sst2": ("negative", "positive"),
    "mpqa": ("negative", "positive"),
}


def prompted(task: str, rows: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Returns prompts and their answers for texts with labels of a task."""
    return [(PROMPTS[task].format(text.strip()), LABELS[task][label]) for label, text in rows]


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model, set up for prompts in batches: their ends are what the answers follow."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", truncation_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def encoded(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[dict[str, list[int]]]:
    """Returns the tokens of prompts and answers. Labels are those of the answer and of the end of the text alone.

    Args:
        max_length: tokens of a prompt that are used, the last ones.
    """
    rows = []
    for prompt, answer in pairs:
        asked = tokenizer(prompt, truncation=True, max_length=max_length)["input_ids"]
        answered = tokenizer(f" {answer}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
        rows.append({"input_ids": asked + answered, "labels": [-100] * len(asked) + answered})
    return rows


def learn(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, list[int]]], out: Path, **options
) -> list[tuple[int, float]]:
    """Trains a model on rows of `encoded`; returns the loss by step.

    Args:
        out: folder for the Trainer.
        **options: of `TrainingArguments`.
    """
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": torch.cuda.is_available()}
    arguments = TrainingArguments(str(out), **quiet, **options)
    trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer, padding=True), rows)
    trainer.train()
    return [(entry["step"], float(entry["loss"])) for entry in trainer.state.log_history if "loss" in entry]


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], max_length: int, **options
) -> list[str]:
    """Returns the first line that a model writes after each prompt, choosing the likeliest token each time.

    Args:
        max_length: as for `encoded`.
        **options: of `generate`.
    """
    options |= {"do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    texts = []
    for start in range(0, len(prompts), 25):
        batch = prompts[start : start + 25]
        tokens = tokenizer(batch, return_tensors="pt", padding=True, truncation=True, max_length=max_length)
        with torch.inference_mode():
            written = model.generate(**tokens.to(model.device), **options)
        texts += tokenizer.batch_decode(written[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip().partition("\n")[0] for text in texts]
