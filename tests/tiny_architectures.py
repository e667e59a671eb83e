"""Architectures whose weights have odd names, ties, shapes or buffers: tiny, seeded, with inputs and fine-tunes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from tiny_models import SIZES, VOCABULARY, bert, gpt2, llama, mixtral, perturb, t5
from transformers import PreTrainedModel

BODY = SIZES | {"hidden_size": 32, "intermediate_size": 48}
PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
} | {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
PIXELS = {"image_size": 32, "patch_size": 8}


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(2 * 6).reshape(2, 6) * 5 % 80 + 3}


def pair() -> dict[str, torch.Tensor]:
    return tokens() | {"decoder_input_ids": tokens()["input_ids"][:, :4]}


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": noise(1, 3, 32, 32)}


def audio() -> dict[str, torch.Tensor]:
    return {"input_values": noise(1, 400)}


def spectrum() -> dict[str, torch.Tensor]:
    return {"input_features": noise(1, 8, 40), "decoder_input_ids": tokens()["input_ids"][:1]}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Architecture(NamedTuple):
    """How to build a model, and inputs of it. `bare` means that its base is saved without the head."""

    build: Callable[[], PreTrainedModel]
    inputs: Callable[[], dict[str, torch.Tensor]]
    bare: bool = False


def model(name: str, head: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**settings))

    return build


ARCHITECTURES = {
    "llama, tied": Architecture(lambda: llama(tied=True), tokens),
    "T5, one embedding under three names": Architecture(t5, pair),
    "BART, one embedding under four names": Architecture(model("Bart", "ForConditionalGeneration", **PAIR), pair),
    "Marian, positions that are not saved": Architecture(model("Marian", "MTModel", **PAIR), pair),
    "BERT of a bare base": Architecture(bert, tokens, bare=True),
    "DistilBERT": Architecture(
        model("DistilBert", "ForSequenceClassification", vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4),
        tokens,
    ),
    "GPT-2, transposed": Architecture(gpt2, tokens),
    "Mixtral, fused experts": Architecture(mixtral, tokens),
    "GLM-4-MoE, a dense layer and shared experts": Architecture(
        model(
            "Glm4Moe",
            "ForCausalLM",
            **BODY,
            num_key_value_heads=2,
            moe_intermediate_size=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
        ),
        tokens,
    ),
    "Mamba-2, an infinite number": Architecture(
        model(
            "Mamba2",
            "ForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=1,
            num_heads=4,
            head_dim=16,
            n_groups=1,
            chunk_size=4,
        ),
        tokens,
    ),
    "Qwen2-VL, sequential layers": Architecture(
        model(
            "Qwen2VL",
            "ForConditionalGeneration",
            text_config=BODY
            | {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8},
        ),
        tokens,
    ),
    "Whisper": Architecture(
        model(
            "Whisper",
            "ForConditionalGeneration",
            **PAIR,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=16,
            bos_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        spectrum,
    ),
    "CLIP, two towers": Architecture(
        model(
            "CLIP",
            "Model",
            text_config=VISION | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2},
            vision_config=VISION | PIXELS,
            projection_dim=16,
        ),
        lambda: tokens() | pixels(),
    ),
    "LeViT, batch norms": Architecture(
        model(
            "Levit",
            "ForImageClassification",
            image_size=32,
            hidden_sizes=[16, 16, 16],
            num_attention_heads=[2, 2, 2],
            depths=[1, 1, 1],
            key_dim=[8, 8, 8],
            mlp_ratio=[2, 2, 2],
            attention_ratio=[2, 2, 2],
            patch_size=16,
            num_labels=3,
        ),
        pixels,
    ),
    "ConvNeXt": Architecture(
        model("ConvNext", "ForImageClassification", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3), pixels
    ),
    "Wav2Vec2, weight norm": Architecture(
        model(
            "Wav2Vec2",
            "ForCTC",
            **BODY,
            conv_dim=(16, 16),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
        ),
        audio,
    ),
}


@torch.no_grad()
def fine_tune(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A copy with other weights, and other statistics of batch norms."""
    tuned = perturb(model, seed)
    for name, buffer in tuned.named_buffers():
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            buffer += seed
    return tuned
