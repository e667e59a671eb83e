"""TRL's trainers publish their weights by the same callback."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from datasets import Dataset
from tiny_runs import same
from tiny_transfers import build_tokenizer

from hf_ext.weight_sync import PublishWeights, Subscriber

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.slow

TEXTS = ["pick a b c", "c b a", "a a", "b b"] * 4


def sft(options: dict, tokenizer, callback: PublishWeights):
    arguments, data = trl.SFTConfig(**options, max_length=16), Dataset.from_dict({"text": TEXTS})
    model = tiny_models.llama(vocabulary=len(tokenizer))
    return trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[callback])


def grpo(options: dict, tokenizer, callback: PublishWeights):
    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(text))) for text in completions]

    arguments = trl.GRPOConfig(**options, num_generations=2, max_completion_length=4)
    model, data = tiny_models.llama(vocabulary=len(tokenizer)), Dataset.from_dict({"prompt": TEXTS})
    return trl.GRPOTrainer(model, reward, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[callback])


@pytest.mark.parametrize("make", [sft, grpo])
def test_every_step_is_published(tmp_path: Path, make):
    options = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "use_cpu": True, "bf16": False, "report_to": []}
    options |= {"save_strategy": "no", "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    subscriber, published = Subscriber(tmp_path / "place"), []

    def on_step(step: int) -> None:
        subscriber.update(step=step)
        weights = {name: tensor.bfloat16() for name, tensor in trainer.model.state_dict().items()}
        published.append((step, same(subscriber.tensors, weights), len(subscriber.changed) > 0))

    trainer = make(options, build_tokenizer(64), PublishWeights(tmp_path / "place", on_step=on_step))
    trainer.train()
    assert published == [(0, True, True), (1, True, True), (2, True, True)]
