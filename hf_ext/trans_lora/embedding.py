"""Embeds texts as points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ext.integration.modes import evaluating
from hf_ext.trans_lora.adapters import bare


@torch.inference_mode()
def embed(
    texts: Sequence[str], model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 32
) -> torch.Tensor:
    """Returns the mean of the last layer's hidden states over a text's tokens, at unit length: (texts, width), float32.

    Args:
        model: an encoder, a decoder with a head or without, or an encoder-decoder, of which the encoder is used.
    """
    encoder = model.get_encoder() if model.config.is_encoder_decoder else bare(model).base_model  # without its head
    means = [torch.empty(0, model.config.get_text_config().hidden_size)]
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or 512)
    with evaluating(model):
        for start in range(0, len(texts), batch_size):
            part = list(texts[start : start + batch_size])
            rows = tokenizer(
                part, padding=True, padding_side="right", truncation=True, max_length=longest, return_tensors="pt"
            ).to(model.device)
            rows.pop("token_type_ids", None)
            states = encoder(**rows, output_hidden_states=True).hidden_states[-1].float()
            weights = rows["attention_mask"][..., None].float()
            means.append(((states * weights).sum(1) / weights.sum(1).clamp_min(1)).cpu())
    return nn.functional.normalize(torch.cat(means), dim=-1)


def load_encoder(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a sentence encoder and its tokenizer from a folder or the Hub."""
    return AutoModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
