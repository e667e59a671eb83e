"""TRL's trainers train PiSSA adapters: on chats that are packed and masked, and under GRPO beside a reference model."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from datasets import Dataset
from peft import PeftModel
from tiny_transfers import build_tokenizer
from training_seeds import training_seed
from transformers import PreTrainedModel

from hf_ext import PissaConfig

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.slow

TEXTS = ["pick a b c", "c b a", "a a", "b b"] * 4
CHAT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ message.content + ' ' }}{% endif %}{% endfor %}"
)


def base() -> PreTrainedModel:
    return tiny_models.llama(vocabulary=len(build_tokenizer(64)))


def sft(options: dict, tokenizer, config: PissaConfig):
    tokenizer.chat_template = CHAT
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "a b"}] for text in TEXTS]
    arguments = trl.SFTConfig(**options, max_length=16, packing=True, assistant_only_loss=True)
    data = Dataset.from_dict({"messages": chats})
    return trl.SFTTrainer(base(), arguments, train_dataset=data, processing_class=tokenizer, peft_config=config)


def grpo(options: dict, tokenizer, config: PissaConfig):
    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(text))) for text in completions]

    arguments = trl.GRPOConfig(**options, num_generations=2, max_completion_length=4, beta=0.1)
    data = Dataset.from_dict({"prompt": TEXTS})
    return trl.GRPOTrainer(base(), reward, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=config)


@pytest.mark.parametrize("make", [sft, grpo])
def test_a_pissa_adapter_trains_and_loads_as_a_lora(tmp_path: Path, make):
    options = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "use_cpu": True, "bf16": False, "report_to": []}
    options |= {"save_strategy": "no", "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1}
    options |= {"seed": training_seed()}
    trainer = make(options, build_tokenizer(64), PissaConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer.train()
    first = trainer.state.log_history[0]
    if make is grpo:  # the reference is the model without its adapter: that is the base as it was
        assert first["kl"] < 1e-5
    trainer.save_model(str(tmp_path / "adapter"))
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        trained = trainer.model(tokens).logits
        loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")(tokens).logits
        assert torch.allclose(loaded, trained, atol=1e-5)
        assert not torch.allclose(loaded, base()(tokens).logits, atol=1e-4)
