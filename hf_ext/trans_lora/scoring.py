"""How likely a model holds given answers to be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from hf_ext.integration.modes import evaluating
from hf_ext.trans_lora.encoding import Encoder


@torch.inference_mode()
def answer_log_probs(
    model: PreTrainedModel | PeftModel, encoder: Encoder, samples: Sequence[dict[str, list[int]]], batch_size: int
) -> list[torch.Tensor]:
    """log p of each token of each answer, given its prompt and the tokens before.

    Args:
        model: a causal or a sequence-to-sequence language model, with adapters or without; its dropout is off meanwhile.
        samples: as the encoder makes them.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]["input_ids"]))  # so that little is padded
    found: list[torch.Tensor] = [torch.empty(0)] * len(samples)
    with evaluating(model):
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = {name: part.to(model.device) for name, part in encoder.batch([samples[i] for i in rows]).items()}
            labels = batch["labels"]
            logits, labels = aligned(model(**batch).logits, labels, encoder.encoder_decoder)
            scores = torch.log_softmax(logits.float(), -1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
            for i, row, label in zip(rows, scores, labels):
                found[i] = row[label != -100].cpu()
    return found


def aligned(logits: torch.Tensor, labels: torch.Tensor, encoder_decoder: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits beside the labels that they are for: a decoder's come one token earlier, and after those of virtual tokens.

    Args:
        logits: (batch, virtual tokens + tokens, vocabulary).
        labels: (batch, tokens).

    Returns:
        (batch, n, vocabulary) and (batch, n).
    """
    logits = logits[:, -labels.shape[1] :]
    return (logits, labels) if encoder_decoder else (logits[:, :-1], labels[:, 1:])


def token_excess(with_adapter: Sequence[torch.Tensor], without: Sequence[torch.Tensor]) -> list[float]:
    """The mean over an answer's tokens of log p(with the adapter) − log p(without) (TiTok, arXiv 2510.04682)."""
    return [(one - other).mean().item() for one, other in zip(with_adapter, without)]
