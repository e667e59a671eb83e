"""Training on answers alone."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_ext.trans_lora.adapters import bare
from hf_ext.trans_lora.scoring import logits_at


class AnswerTrainer(Trainer):
    """A Trainer whose model computes logits only where an answer's tokens are predicted.

    The loss is the same. At all positions, the logits of a batch of 8 × 512 tokens over Gemma's vocabulary of 262,000 take 4
    GB.
    """

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
