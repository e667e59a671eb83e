"""The teacher: the source model with its adapter, in memory or on a server, and its answers to inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ext.errors import HfExtError
from hf_ext.trans_lora.adapters import adapter_digest, bare, base_of, on_device
from hf_ext.trans_lora.config import TransLoraConfig, chat_variables
from hf_ext.trans_lora.encoding import Encoder, prompt, without_bos
from hf_ext.trans_lora.generation import Completion, Generator, ModelGenerator, Server
from hf_ext.trans_lora.scoring import answer_log_probs, token_excess
from hf_ext.trans_lora.synthesis import in_shares


class Teacher:
    """
    Attributes:
        model: the source model, of any PEFT type or merged; None if a server has it.
        encoder: of the model's prompts; None with a server.
    """

    def __init__(
        self, source: PreTrainedModel | PeftModel | Generator, tokenizer: PreTrainedTokenizerBase, args: TransLoraConfig
    ):
        self.model: PreTrainedModel | PeftModel | None = None
        self.encoder: Encoder | None = None
        self.generator: Generator
        self.tokenizer, self.args = tokenizer, args
        if isinstance(source, nn.Module):
            self.model = source
            self.encoder = teacher_encoder(tokenizer, source, args)
            self.generator = ModelGenerator(source, self.encoder, args.generation_batch_size)
        else:
            self.generator = source

    @property
    def name(self) -> str:
        return name_of(self.generator if self.model is None else self.model)

    @property
    def digest(self) -> str | None:
        """Returns a checksum of its adapter."""
        return None if self.model is None else adapter_digest(self.model)

    def on(self, device: torch.device) -> contextlib.AbstractContextManager:
        """Moves the teacher to a device within the block."""
        return contextlib.nullcontext() if self.model is None else on_device(self.model, device)

    def answers(self, inputs: Sequence[str]) -> list[str | None]:
        """Returns the likeliest answers; None for an incomplete one."""
        return [label(one) for one in self.completions(inputs)]

    def completions(self, inputs: Sequence[str]) -> list[Completion]:
        """Returns the answers to inputs."""
        args = self.args
        prompts = [
            prompt(text, self.tokenizer, args.teacher_prompt_template, args.teacher_system_prompt, chat_variables(args))
            for text in inputs
        ]
        if isinstance(self.generator, Server):
            prompts = without_bos(prompts, self.tokenizer)
        return self.generator(prompts, args.max_label_length)

    def excess(self, inputs: Sequence[str]) -> list[tuple[float | None, str | None]]:
        """Returns each input's token excess and label; neither for an incomplete answer.

        The tokens are those that the teacher wrote, because another tokenization of the same text is less likely.
        """
        assert self.model is not None and self.encoder is not None  # require_for refuses a server
        completions = self.completions(inputs)
        whole = {i: one.tokens for i, one in enumerate(completions) if label(one) and one.tokens is not None}
        prompts = self.encoder.tokens([self.encoder.prompt(inputs[i]) for i in whole])
        samples = self.encoder.joined(prompts, list(whole.values()))
        taught = answer_log_probs(self.model, self.encoder, samples, self.args.generation_batch_size)
        with base_of(self.model) as base:
            untaught = answer_log_probs(base, self.encoder, samples, self.args.generation_batch_size)
        scores = dict(zip(whole, token_excess(taught, untaught)))
        return [(scores.get(i), label(one)) for i, one in enumerate(completions)]

    def settings(self) -> dict[str, Any]:
        """Returns what its labels depend on."""
        names = ("max_label_length", "teacher_prompt_template", "teacher_system_prompt", "chat_template_kwargs")
        settings = {"teacher": self.name, "teacher's adapter (a checksum)": self.digest}
        return settings | {name: getattr(self.args, name) for name in names}

    def require_tokens_of(self, student: Encoder) -> None:
        """Checks that the student can be compared with the teacher token by token.

        Raises:
            HfExtError: the student does not read and write the same tokens.
        """
        if self.encoder is None:
            raise HfExtError("logits_weight needs a teacher at hand, not one on a server.")
        teacher = self.encoder
        alike = student.encoder_decoder == teacher.encoder_decoder
        alike = alike and student.tokenizer.get_vocab() == teacher.tokenizer.get_vocab()
        probe = student.prompt("A text, 1 2 3.")
        if not alike or probe != teacher.prompt("A text, 1 2 3.") or student.tokens([probe]) != teacher.tokens([probe]):
            raise HfExtError(
                "logits_weight compares teacher and student token by token, so both need the same tokenizer, the same kind of "
                "model and the same prompt template. Use logits_weight=0, which needs none of them."
            )

    def require_inputs(self, inputs: Collection[str]) -> None:
        """Checks that inputs of the user fit into the model's context with their answers.

        Raises:
            HfExtError: one does not fit.
        """
        if self.encoder is not None:
            self.encoder.require_inputs({text: self.encoder.prompt(text) for text in inputs}, self.args.max_label_length)

    def require_for(self, args: TransLoraConfig) -> None:
        """Checks that the teacher has what the filter requires.

        Raises:
            HfExtError: it lacks something.
        """
        if args.filter == "token_excess" and not isinstance(self.model, PeftModel):
            raise HfExtError("filter='token_excess' compares the teacher with and without its adapter: give it as a PeftModel.")


def agreement(
    model: PreTrainedModel | PeftModel, encoder: Encoder, pairs: Sequence[tuple[str, str]], args: TransLoraConfig
) -> float:
    """Returns the share of inputs to which a model gives the answers that come with them, word for word."""
    writer = ModelGenerator(model, encoder, args.generation_batch_size)
    prompts = [encoder.prompt(text) for text, _ in pairs]
    with on_device(model, args.device):
        answers = in_shares(prompts, lambda part: [one.text.strip() for one in writer(part, args.max_label_length)])
    return sum(answer == expected for answer, (_, expected) in zip(answers, pairs)) / len(pairs)


def teacher_encoder(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel, args: TransLoraConfig, whose: str = "The teacher's"
) -> Encoder:
    """Returns the encoder of prompts for the teacher's adapter."""
    return Encoder(tokenizer, model, args.teacher_prompt_template, whose, args.teacher_system_prompt, chat_variables(args))


def label(completion: Completion) -> str | None:
    """Returns the answer if it is complete and not empty."""
    return completion.text.strip() or None if completion.ended else None


def name_of(model: PreTrainedModel | PeftModel | Generator) -> str:
    if not isinstance(model, nn.Module):
        return getattr(model, "model", type(model).__name__)
    return bare(model).name_or_path or type(bare(model)).__name__
