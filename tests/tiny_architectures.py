"""The architectures of Transformers with a head, each built from its configuration's defaults made small: seeded, with inputs
and fine-tunes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from tiny_models import VOCABULARY, perturb
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

LARGEST = 3_000_000  # parameters
#: Kinds of heads on bodies that other kinds have too, and models without a head.
LEFT_OUT = {"backbone", "multiple choice", "next sentence prediction", "question answering", "text encoding"}
LEFT_OUT |= {"token classification"}

#: The settings of configurations that determine a model's size, by value.
SIZES = {
    1: "first_k_dense_replace moe_num_shared_experts n_group n_shared_experts topk_group",
    2: "decoder_layers decoder_num_layers depth encoder_layers encoder_num_layers linear_num_key_heads moe_k moe_topk n_layer "
    "n_layers num_conv_pos_embedding_groups num_decoder_layers num_encoder_layers num_experts_per_tok num_hidden_layers "
    "num_key_value_heads num_kv_heads num_layers type_vocab_size",
    3: "conv_kernel_size num_labels",
    4: "decoder_attention_heads decoder_num_attention_heads encoder_attention_heads linear_num_value_heads moe_num_experts "
    "n_head n_heads n_routed_experts num_attention_heads num_experts num_heads num_local_experts num_queries",
    8: "attention_window d_kv head_dim kv_channels linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state "
    "mamba_dt_rank mamba_n_heads num_conv_pos_embeddings num_mel_bins patch_size qk_nope_head_dim qk_rope_head_dim rotary_dim "
    "ssm_state_size state_size time_step_rank v_head_dim",
    16: "codevector_dim kv_lora_rank proj_codevector_dim q_lora_rank sliding_window",
    24: "moe_intermediate_size shared_expert_intermediate_size",
    32: "d_embed d_model decoder_hidden_size dim emb_dim embed_dim embedding_dim embedding_size encoder_hidden_size "
    "hidden_size image_size lru_width n_embd out_hidden_size output_hidden_size projection_dim word_embed_proj_dim",
    48: "d_ff dff decoder_ffn_dim decoder_intermediate_size dense_intermediate_size dim_feedforward encoder_ffn_dim ffn_dim "
    "ffn_hidden_size hidden_dim intermediate_size mlp_dim n_inner",
    64: "max_position_embeddings max_seq_len max_source_positions max_target_positions n_ctx n_positions",
    VOCABULARY: "char_vocab_size entity_vocab_size pronunciation_vocab_size shape_vocab_size t2u_vocab_size vocab_size "
    "vocab_size_per_layer_input",
}
SETTINGS = {name: size for size, names in SIZES.items() for name in names.split()}
SETTINGS |= {"pad_token_id": 0, "decoder_start_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SETTINGS |= {"initializer_range": 0.02}  # SAM's default makes weights that are smaller than the changes of a fine-tune
#: Settings that have an entry for each stage of a model, and the entry.
STAGES = dict.fromkeys(("conv_dim", "embed_dims", "hidden_sizes", "neck_hidden_sizes", "out_channels", "tdnn_dim"), 16)
STAGES |= dict.fromkeys(("depths", "num_blocks"), 1) | dict.fromkeys(("num_attention_heads", "num_heads"), 2)


def classes() -> dict[str, str]:
    """Returns the names of all model classes that Transformers' auto classes know for a kind of head, each with the kind."""
    kinds = {}
    for attribute in sorted(vars(modeling_auto)):
        if attribute.startswith("MODEL_FOR_") and attribute.endswith("_MAPPING_NAMES"):
            kind = attribute.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES").replace("_", " ").lower()
            for names in getattr(modeling_auto, attribute).values():
                kinds |= {name: kinds.get(name, kind) for name in ([names] if isinstance(names, str) else names)}
    return {name: kind for name, kind in kinds.items() if kind not in LEFT_OUT}


def build(name: str) -> PreTrainedModel:
    """Returns a small model of a class.

    Raises:
        ValueError: it would not be small.
    """
    kind = getattr(transformers, name)
    config = small(kind.config_class())
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{name} has {size} parameters with all known settings made small")
    torch.manual_seed(0)
    return kind(small(kind.config_class()))  # some classes change theirs


def small(default: PretrainedConfig) -> PretrainedConfig:
    """Returns a configuration with small sizes, as far as its class accepts them."""
    settings = dict(_small_settings(default))
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))[:3]
    if types and "num_hidden_layers" in settings:
        settings["layer_types"] = [*types, *types][: max(2, len(types))]
        settings["num_hidden_layers"] = len(settings["layer_types"])
    accepted: dict[str, Any] = {}
    for tried in (settings, *({name: value} for _ in range(2) for name, value in settings.items())):
        try:
            config = type(default)(**accepted | tried)
        except Exception:  # each configuration checks in a way of its own
            continue
        accepted |= tried
        if len(accepted) == len(settings):
            return config
    return type(default)(**accepted)


def _small_settings(default: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            yield name, small(value)
        elif isinstance(value, list | tuple):
            if (entry := STAGES.get(name, SETTINGS.get(name))) is not None and not name.endswith("_id"):
                yield name, type(value)([entry] * len(value))
        elif name in SETTINGS and type(value) in (int, float):
            yield name, SETTINGS[name]
    yield "num_labels", SETTINGS["num_labels"]


def inputs(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Returns what the model's forward may take."""
    tokens = torch.arange(2 * 6).reshape(2, 6) * 5 % 80 + 3
    noise = torch.Generator().manual_seed(0)
    for batch in (
        {"input_ids": tokens},
        {"pixel_values": torch.randn(2, 3, 32, 32, generator=noise)},
        {"pixel_values": torch.randn(2, 3, 32, 32, generator=noise), "input_ids": tokens},
        {"input_values": torch.randn(2, 4000, generator=noise)},
        {"input_features": torch.randn(2, 8, 128, generator=noise)},
    ):
        if model.main_input_name in batch:
            batch = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in batch.items()}
            yield batch
            yield batch | {"decoder_input_ids": tokens[:, :4]}


@torch.no_grad()
def fine_tune(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A copy with other weights, and other statistics of batch norms."""
    tuned = perturb(model, seed)
    for name, buffer in tuned.named_buffers():
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            buffer += seed
    return tuned
