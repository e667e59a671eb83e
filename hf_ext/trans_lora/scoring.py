"""Likelihoods of given answers under a model, and training on answers alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_ext.integration.modes import evaluating
from hf_ext.trans_lora.encoding import Encoder, batches
from hf_ext.trans_lora.models import bare


def answer_log_probs(
    model: PreTrainedModel | PeftModel, encoder: Encoder, samples: Sequence[dict[str, list[int]]], batch_size: int
) -> list[torch.Tensor]:
    """Returns log p of each token of each answer, given its prompt and the tokens before. Dropout is off."""
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
    with evaluating(model):
        for rows in batches(samples, batch_size):
            batch = {name: part.to(model.device) for name, part in encoder.batch([samples[i] for i in rows]).items()}
            if encoder.encoder_decoder:
                labels = batch["labels"]
                logits = model(**batch).logits[labels != -100]
            else:
                labels = batch.pop("labels")[:, 1:]
                with logits_at(model, labels != -100) as chosen:
                    logits = model(**batch).logits
                spared = logits.shape[:2] == (1, int((labels != -100).sum()))
                logits = (logits if spared else chosen(logits))[0]
            counts = (labels != -100).sum(1).tolist()
            parts = logits.to(labels.device).float().log_softmax(-1).split(counts), labels[labels != -100].split(counts)
            yield from zip(rows, *parts)


@contextlib.contextmanager
def logits_at(model: PreTrainedModel | PeftModel, places: torch.Tensor) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Makes a decoder compute logits only at some positions of a batch, (1, positions, vocabulary), within the block: `places`
    (batch, tokens - 1) is true at each whose next token is needed. At all positions, a vocabulary of 152,000 takes gigabytes.
    Yields a function that selects the positions from (batch, tokens, n)."""

    def chosen(hidden: torch.Tensor) -> torch.Tensor:
        width = places.shape[1] + 1
        return hidden[:, -width:-1][places.to(hidden.device)][None]  # after the virtual tokens of an adapter

    head = bare(model).get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: (chosen(inputs[0]), *inputs[1:]))
    try:
        yield chosen
    finally:
        hook.remove()


class AnswerTrainer(Trainer):
    """A Trainer whose model computes logits only where an answer's tokens are predicted. The loss is the same. At all
    positions, the logits of a batch of 8 × 512 tokens over Gemma's vocabulary of 262,000 take 4 GB."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if bare(self.model).config.is_encoder_decoder:
            # T5, BART and others accept num_items_in_batch and ignore it, so Trainer must divide by the accumulated steps.
            self.model_accepts_loss_kwargs = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        inner = self.accelerator.unwrap_model(model)
        spare: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self._may_spare_logits(inner) and not return_outputs and "labels" in inputs:
            labels = inputs["labels"][:, 1:]
            inputs = inputs | {"shift_labels": labels[labels != -100][None]}
            spare = logits_at(inner, labels != -100)
        with spare:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _may_spare_logits(self, model: PreTrainedModel | PeftModel) -> bool:
        """Checks whether Transformers' own loss is used, which accepts labels that are shifted already."""
        prompts = isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning
        plain = self.label_smoother is None and self.compute_loss_func is None and self.model_accepts_loss_kwargs
        whole = self.args.n_gpu <= 1  # not split among devices by nn.DataParallel
        # Liger's forward spares the logits itself: it reads the output layer's weight. torch.compile breaks graphs at the hook.
        hooked = not (self.args.use_liger_kernel or self.args.torch_compile)
        inner = bare(model)
        decoder = not inner.config.is_encoder_decoder and getattr(inner, "loss_function", None) is ForCausalLMLoss
        return plain and whole and hooked and decoder and not prompts
