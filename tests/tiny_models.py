"""Models of a few thousand weights, built in code and seeded, and fine-tunes of them as training would leave them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 96
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2}


def llama(tied: bool = False, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = GROUPED | {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 96}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).to(dtype)


def gpt2() -> PreTrainedModel:
    """Its Conv1D layers hold their weights transposed."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


def bert(labels: int = 3) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 48, "intermediate_size": 64, "max_position_embeddings": 32}
    return BertForSequenceClassification(BertConfig(**sizes, num_labels=labels))


def t5(width: int = 32) -> PreTrainedModel:
    """Keeps some of its weights in float32 when loaded in float16."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": width, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def mixtral(width: int = 32, inner: int = 48) -> PreTrainedModel:
    """Its experts are many tensors in a file and one in memory."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**GROUPED, hidden_size=width, intermediate_size=inner, num_local_experts=4))


def qwen_moe(width: int = 32, inner: int = 24) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = GROUPED | {"hidden_size": width, "intermediate_size": 48, "moe_intermediate_size": inner, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))


def gpt_oss() -> PreTrainedModel:
    """Its experts are one tensor in a file, too."""
    torch.manual_seed(0)
    sizes = GROUPED | {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256, "head_dim": 8}
    return GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))


@dataclass(frozen=True)
class Tiny:
    build: Callable[[], PreTrainedModel]
    auto: type


MODELS = {
    "llama": Tiny(llama, AutoModelForCausalLM),
    "llama_tied": Tiny(lambda: llama(tied=True), AutoModelForCausalLM),
    "llama_bf16": Tiny(lambda: llama(dtype=torch.bfloat16), AutoModelForCausalLM),
    "gpt2": Tiny(gpt2, AutoModelForCausalLM),
    "bert": Tiny(bert, AutoModelForSequenceClassification),
    "t5": Tiny(t5, AutoModelForSeq2SeqLM),
    "mixtral": Tiny(mixtral, AutoModelForCausalLM),
    "qwen_moe": Tiny(qwen_moe, AutoModelForCausalLM),
}


def perturb(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """A copy that has learned a little: most rows of each weight moved by 2 % of its spread, the others not at all."""
    tuned = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in tuned.parameters():
            delta = torch.randn(weight.shape, generator=generator) * (0.02 * weight.float().std(correction=0) + 1e-4)
            moved = torch.rand(weight.shape[:1] or (1,), generator=generator) < 0.8
            moved[0] = True
            weight += (delta * moved.reshape([*weight.shape[:1], *[1] * (weight.dim() - 1)])).to(weight.dtype)
    return tuned


def fine_tuned(model: PreTrainedModel, folder: str | os.PathLike, **options) -> PreTrainedModel:
    """Saves the model to `folder`/base and a fine-tune of it, which is returned, to `folder`/tuned with `options`."""
    tuned = perturb(model)
    model.save_pretrained(Path(folder) / "base")
    tuned.save_pretrained(Path(folder) / "tuned", **options)
    return tuned


def tokenizer() -> PreTrainedTokenizerBase:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCABULARY - 5))]
    return BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=32)


def in_own_memory(model: torch.nn.Module) -> torch.nn.Module:
    """Moves the weights to new memory, away from the files that they are mapped from: models with equal weights then compute
    equal bits. Kernels may sum in another order at other alignments."""
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model


def inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    tokens = torch.arange(2 * 9).reshape(2, 9) * 5 % VOCABULARY
    more = {"decoder_input_ids": tokens[:, :4]} if model.config.is_encoder_decoder else {}
    return placed({"input_ids": tokens} | more, model)


def placed(inputs: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The inputs on the model's device: bitsandbytes, pipelines and `Trainer` move models to an accelerator by themselves."""
    device = torch.device("cpu") if model.device.type == "meta" else model.device  # "meta": its weights are on the disk
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compares values and types; the tensors may be on two devices."""
    first, second = first.cpu(), second.cpu()
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and torch.equal(first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8))
    )


def assert_same_weights(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Both are of one class and have the same state dict to the last bit, ties and types included."""
    assert type(model) is type(other)
    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    different = [name for name in state if not same_bits(state[name], expected[name])]
    assert not different, different
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in other.named_parameters()]
