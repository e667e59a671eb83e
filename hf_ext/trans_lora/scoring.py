"""Computes likelihoods of given answers under a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import PeftModel
from torch.nn import functional
from transformers import PreTrainedModel

from hf_ext.integration.modes import evaluating
from hf_ext.trans_lora.adapters import bare
from hf_ext.trans_lora.encoding import Encoder


def answer_log_probs(
    model: PreTrainedModel | PeftModel, encoder: Encoder, samples: Sequence[dict[str, list[int]]], batch_size: int
) -> list[torch.Tensor]:
    """Returns log p of each token of each answer, given its prompt and the tokens before.

    Args:
        model: a causal or a sequence-to-sequence language model, with adapters or without. Dropout is off.
        samples: as the encoder makes them.
    """
    log_probs: list[torch.Tensor] = [torch.empty(0)] * len(samples)
    for i, scores, labels in _answers(model, encoder, samples, batch_size):
        log_probs[i] = scores.gather(-1, labels[:, None])[:, 0].cpu()
    return log_probs


def log_odds(
    model: PreTrainedModel | PeftModel, encoder: Encoder, prompts: Sequence[str], answers: tuple[str, str], batch_size: int
) -> list[float]:
    """Returns log p(first answer) − log p(second answer) for each prompt. Answers of one token share a forward pass."""
    first, second = (encoder.samples(prompts, [answer] * len(prompts), end=False) for answer in answers)
    odds = [0.0] * len(prompts)
    if any(sum(label != -100 for label in sample["labels"]) > 1 for sample in first + second):
        both = (answer_log_probs(model, encoder, samples, batch_size) for samples in (first, second))
        return [(one.sum() - other.sum()).item() for one, other in zip(*both)]
    for i, scores, labels in _answers(model, encoder, first, batch_size):
        odds[i] = (scores[0, labels[0]] - scores[0, second[i]["labels"][-1]]).item()
    return odds


@torch.inference_mode()
def _answers(
    model: PreTrainedModel | PeftModel, encoder: Encoder, samples: Sequence[dict[str, list[int]]], batch_size: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields a sample's number, log p of every token at the positions of its answer, (n, vocabulary), and the answer's tokens,
    (n,)."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]["input_ids"]))  # to need little padding
    with evaluating(model):
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = {name: part.to(model.device) for name, part in encoder.batch([samples[i] for i in rows]).items()}
            if encoder.encoder_decoder:
                labels = batch["labels"]
                logits = model(**batch).logits[labels != -100]
            else:
                labels = batch.pop("labels")[:, 1:]
                logits = _logits_at(model, batch, labels != -100)
            counts = (labels != -100).sum(1).tolist()
            parts = logits.to(labels.device).float().log_softmax(-1).split(counts), labels[labels != -100].split(counts)
            yield from zip(rows, *parts)


def _logits_at(model: PreTrainedModel | PeftModel, batch: dict[str, torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    """Returns a decoder's logits at some positions of a batch, (positions, vocabulary)."""
    with logits_at(model, places) as chosen:
        logits = model(**batch).logits
    return logits[0] if logits.shape[:2] == (1, int(places.sum())) else chosen(logits)[0]


@contextmanager
def logits_at(model: PreTrainedModel | PeftModel, places: torch.Tensor) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Makes a decoder compute logits only at some positions of a batch, (1, positions, vocabulary), within the block.

    The output layer gets only the hidden states at these positions. At all positions, a vocabulary of 152,000 takes gigabytes.

    Args:
        places: (batch, tokens - 1), true at each position whose next token is needed.

    Yields:
        A function that selects the positions from (batch, tokens, n).
    """

    def chosen(hidden: torch.Tensor) -> torch.Tensor:
        width = places.shape[1] + 1
        return hidden[:, -width:-1][places.to(hidden.device)][None]  # after the virtual tokens of an adapter

    head = bare(model).get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: (chosen(inputs[0]), *inputs[1:]))
    try:
        yield chosen
    finally:
        hook.remove()


def aligned(logits: torch.Tensor, labels: torch.Tensor, encoder_decoder: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Aligns logits with their labels: a decoder's come one token earlier, and after those of virtual tokens.

    Args:
        logits: (batch, virtual tokens + tokens, vocabulary).
        labels: (batch, tokens).

    Returns:
        (batch, n, vocabulary) and (batch, n).
    """
    logits = logits[:, -labels.shape[1] :]
    return (logits, labels) if encoder_decoder else (logits[:, :-1], labels[:, 1:])


def kl_divergence(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, encoder_decoder: bool, temperature: float
) -> torch.Tensor:
    """Returns KL(teacher ‖ student) of the distributions at a temperature, summed over the tokens of the answers.

    Args:
        student, teacher: logits, as for `aligned`; models pad their vocabularies differently.
        labels: (batch, tokens).
    """
    student, at = aligned(student, labels, encoder_decoder)
    teacher, _ = aligned(teacher.to(student.device), labels, encoder_decoder)
    chosen, size = at != -100, min(student.shape[-1], teacher.shape[-1])
    log_p, log_q = ((x[chosen][:, :size].float() / temperature).log_softmax(-1) for x in (teacher, student))
    return functional.kl_div(log_q, log_p, reduction="sum", log_target=True)


def token_excess(with_adapter: Sequence[torch.Tensor], without: Sequence[torch.Tensor]) -> list[float]:
    """Returns the mean over an answer's tokens of log p(with the adapter) − log p(without) (TiTok, arXiv 2510.04682)."""
    return [(one - other).mean().item() for one, other in zip(with_adapter, without)]
