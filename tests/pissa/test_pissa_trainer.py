"""Trainer resumes PiSSA and QPiSSA as if it had never stopped, and picks the best checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_training
import torch
from peft import PeftModel, get_peft_model
from stop_after import StopAfter
from tiny_adapters import NF4, difference, load, logits
from training_seeds import training_seed
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from hf_ext import PissaConfig, QPissaConfig

OPTIONS = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
KINDS = {
    "pissa": (PissaConfig, OPTIONS, None),
    "pissa rslora": (PissaConfig, OPTIONS | {"use_rslora": True, "lora_alpha": 3}, None),
    "pissa dora": (PissaConfig, OPTIONS | {"use_dora": True}, None),
    "qpissa": (QPissaConfig, OPTIONS, NF4),
}
every_kind = pytest.mark.parametrize(
    ("kind", "options", "quantization"),
    [pytest.param(*kind, id=name, marks=[pytest.mark.slow] * (" " in name)) for name, kind in KINDS.items()],
)


def train(model: PeftModel, out: Path, **options) -> Trainer:
    on_cpu = model.device.type == "cpu"  # bitsandbytes has chosen
    return tiny_training.train(model, out, causal=True, learning_rate=1e-2, seed=training_seed(), use_cpu=on_cpu, **options)


@every_kind
def test_a_resumed_run_gives_what_a_whole_one_gives(tmp_path, llama_base, kind, options, quantization):
    def fresh() -> PeftModel:
        return get_peft_model(load(llama_base, quantization), kind(**options))

    whole = fresh()
    start, before = logits(whole), {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    train(whole, tmp_path / "whole")
    assert difference(logits(whole), start) > 1e-3
    train(fresh(), tmp_path / "parts", callbacks=[StopAfter(4)])
    resumed = fresh()
    trainer = train(resumed, tmp_path / "parts", resume=get_last_checkpoint(tmp_path / "parts"))
    assert trainer.state.global_step == 6
    expected = dict(whole.named_parameters())
    for name, parameter in resumed.named_parameters():
        if parameter.requires_grad:
            moved = torch.linalg.norm(expected[name] - before[name])
            assert torch.linalg.norm(parameter - expected[name]) <= 0.01 * moved, name  # a checkpoint of PiSSA is rounded
    assert difference(logits(resumed), logits(whole)) < 0.01 * difference(logits(whole), start)


@every_kind
def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path, llama_base, kind, options, quantization):
    hits = iter([0.2, 0.9, 0.4])
    model = get_peft_model(load(llama_base, quantization), kind(**options))
    trainer = train(
        model, tmp_path, metrics=lambda outputs: {"hits": next(hits)}, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_hits", greater_is_better=True,
    )  # fmt: skip
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-4"
    assert difference(logits(PeftModel.from_pretrained(load(llama_base, quantization), best)), logits(model)) < 1e-5
