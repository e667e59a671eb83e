"""Models with adapters as training would leave them, and what they compute."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from packaging.version import Version
from peft import PeftConfig, PeftModel, get_peft_model
from tiny_models import VOCABULARY, inputs
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
FP4_IN_FLOATS = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.float32}
INT8 = {"load_in_8bit": True}


def needs_peft(version: str, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(Version(peft.__version__) < Version(version), reason=f"needs peft>={version}: {reason}")


SAVED_BIASES = needs_peft("0.21", "older versions do not save the biases that bias= trains")
SAVED_RESIDUALS = needs_peft("0.21", "older versions save only A and B of an adapter type that they do not know")


def load(folder: Path, quantization: dict | None = None) -> PreTrainedModel:
    options = {} if quantization is None else {"quantization_config": BitsAndBytesConfig(**quantization)}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def small_llama() -> PreTrainedModel:
    """bitsandbytes' inference on some CPUs takes only widths that are multiples of 64."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=False, **sizes))


def small_gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, **sizes))


def trained(model: PreTrainedModel, config: PeftConfig, seed: int = 1) -> PeftModel:
    """The model with an adapter, all trainable weights of which have moved a little."""
    return moved(get_peft_model(model, config), seed)


@torch.no_grad()
def moved(model: nn.Module, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs(model)).logits


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()
