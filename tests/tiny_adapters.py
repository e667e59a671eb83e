"""Models with adapters as training would leave them, and what they compute."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from tiny_models import VOCABULARY, inputs
from torch import nn
from torch.nn import functional
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
INPUTS = {1: (2, 3, 20), 2: (2, 3, 12, 12), 3: (2, 3, 6, 6, 6)}  # of `Convolutions`


def load(folder: Path, quantization: dict | None = None, **options) -> PreTrainedModel:
    options |= {} if quantization is None else {"quantization_config": BitsAndBytesConfig(**quantization)}
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


class Convolutions(nn.Module):
    """Two convolutions of a number of dimensions, the second with a kernel of size 1."""

    def __init__(self, dimensions: int):
        super().__init__()
        torch.manual_seed(0)
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        self.wide, self.pointwise = kind(3, 8, 3, stride=2, padding=1), kind(8, 6, 1, bias=False)
        self.inputs = torch.randn(INPUTS[dimensions])

    def forward(self) -> torch.Tensor:
        return self.pointwise(functional.gelu(self.wide(self.inputs)))


class Hidden(nn.Module):
    """A wrapper that leaves its name out of the state dict."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def state_dict(self, *args, **kwargs):
        return self.inside.state_dict(*args, **kwargs)


def trained(model: PreTrainedModel, config: PeftConfig, seed: int = 1) -> PeftModel:
    """The model with an adapter, all trainable weights of which have moved a little."""
    return moved(get_peft_model(model, config), seed)


@torch.no_grad()
def moved(model: nn.Module, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    """The logits of a model of Transformers, or the output of `Convolutions`."""
    if not hasattr(getattr(model, "config", None), "is_encoder_decoder"):
        return model.eval()()
    return model.eval()(**inputs(model)).logits


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first.cpu() - second.cpu()).abs().max().item()


def loaded(base: PreTrainedModel, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(copy.deepcopy(base), adapter)


def products(model: nn.Module) -> dict[str, torch.Tensor]:
    """The change that the adapter makes in each layer."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    return {name.removeprefix("base_model.model."): layer.get_delta_weight("default") for name, layer in layers.items()}
