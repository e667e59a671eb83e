"""TRL's trainers publish their weights by the same callback."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from datasets import Dataset
from safetensors.torch import load_file
from tiny_runs import same
from tiny_transfers import build_tokenizer

from hf_ext.weight_sync import LocalCheckpoint, PlaceTransfer, Publisher, PublishWeights, Subscriber

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


def test_the_asynchronous_trainer_sends_its_weights_through_a_place(tmp_path: Path, monkeypatch):
    """Its rollout worker is a stub; the follower is a folder that a server could load."""
    async_grpo = pytest.importorskip("trl.experimental.async_grpo")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    from parts.trl_on_cpu import train_on_cpu

    train_on_cpu()
    tokenizer = build_tokenizer(64)
    for folder in ("base", "served"):
        tiny_models.llama(vocabulary=len(tokenizer)).save_pretrained(tmp_path / folder)
    seen = []

    class Worker:
        """Gives the trainer samples, one for each version of the weights."""

        def __init__(self) -> None:
            self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()

        def start(self) -> None: ...

        def stop(self) -> None: ...

        def check_health(self, stale_after_s: float) -> None: ...

        def update_model_version(self, model_version: int) -> None:
            weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
            seen.append(same(load_file(tmp_path / "served/model.safetensors"), dict(weights)))
            for number in range(8):
                self.rollout_buffer.put(
                    async_grpo.async_grpo_trainer.RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.random.default_rng(number).integers(4, 60, 6),
                        completion_mask=np.array([0, 0, 0, 1, 1, 1]),
                        old_log_probs=np.full(6, -1.0, np.float32),
                        advantage=float(number),
                        model_version=model_version,
                        group_id=number,
                        metrics={},
                        enqueued_at=time.time(),
                    )
                )

    publisher = Publisher(tmp_path / "place")
    options = {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "learning_rate": 1e-3}
    options |= {"per_device_train_batch_size": 2, "num_generations": 2, "token_budget": 12}
    trainer = async_grpo.AsyncGRPOTrainer(
        str(tmp_path / "base"),
        lambda **_: [0.0],
        async_grpo.AsyncGRPOConfig(str(tmp_path / "run"), **options),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        processing_class=tokenizer,
        rollout_worker=Worker(),
        weight_transfer=PlaceTransfer(publisher, LocalCheckpoint(tmp_path / "served", tmp_path / "place")),
    )
    trainer.train()
    assert seen == [True, True, True] and Subscriber(tmp_path / "place").steps() == [0, 1, 2]
