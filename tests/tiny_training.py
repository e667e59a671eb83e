"""Trainings of a few steps, the same on every run."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import VOCABULARY
from transformers import Trainer, TrainingArguments


def examples(count: int, causal: bool = False) -> list[dict]:
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(5, VOCABULARY, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row if causal else row[0] % 3} for row in rows]


def train(model, out: Path, resume: str | bool | None = None, callbacks=(), causal=False, metrics=None, **options) -> Trainer:
    settings = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 2}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(out), **(settings | options))
    data = {"train_dataset": examples(16, causal), "eval_dataset": examples(8, causal)}
    trainer = Trainer(model, arguments, **data, callbacks=[*callbacks], compute_metrics=metrics)
    trainer.train(resume_from_checkpoint=resume)
    return trainer
