"""Texts of a task as tokens of a model: prompts, and prompts with their answers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ext.errors import HfExtError


class Encoder:
    """The prompts of one model.

    Args:
        model: the model; None if a server has it, which checks lengths itself.
        template: text with `{input}` in it; None for the tokenizer's chat template, or, if it has none, the input and a line
            break.
        whose: in errors: "the teacher's".
        system, variables: system message of its chats, and further variables of the chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel | PeftModel | None,
        template: str | None = None,
        whose: str = "the",
        system: str | None = None,
        variables: dict[str, Any] | None = None,
    ):
        self.tokenizer, self.whose = tokenizer, whose
        self.chats = template is None and bool(tokenizer.chat_template)
        self.template, self.system, self.variables = template, system, variables or {}
        if system is not None and not self.chats:
            raise HfExtError(f"{whose} model has a system prompt and no chat template: put the text into a prompt template.")
        self.limit: int | None = None
        self.encoder_decoder, self.begin = False, list[int]()
        if model is None:
            return
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        self.limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # T5 and similar models have none
        if self.limit and isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            self.limit -= model.active_peft_config.num_virtual_tokens
        if self.encoder_decoder and model.generation_config.forced_bos_token_id is not None:  # BART's
            self.begin = [model.generation_config.forced_bos_token_id]
        if tokenizer.eos_token_id is None:
            raise HfExtError(f"{whose} tokenizer has no token that ends a text; set tokenizer.eos_token.")
        if tokenizer.pad_token_id is None:
            raise HfExtError(
                f"{whose} tokenizer has no padding token; set tokenizer.pad_token, for example to tokenizer.eos_token."
            )

    def prompt(self, text: str) -> str:
        """Returns the prompt for the answer to an input: by the template, else as a chat, else with a line break after it."""
        return self._chat(text, self.system) if self.chats else (self.template or "{input}\n").replace("{input}", text)

    def request(self, text: str) -> str:
        """Returns the prompt of a chat that is not about the task, so without the system message."""
        return self._chat(text, None)

    def _chat(self, text: str, system: str | None) -> str:
        chat = [{"role": "system", "content": system}] if system is not None else []
        chat.append({"role": "user", "content": text})
        return self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **self.variables)

    def without_bos(self, prompts: Sequence[str]) -> list[str]:
        """Returns prompts for a server, which adds the token that begins a text itself if the tokenizer does."""
        bos, begin = self.tokenizer.bos_token, self.tokenizer("")["input_ids"][:1]
        return [prompt.removeprefix(bos) if bos and begin == [self.tokenizer.bos_token_id] else prompt for prompt in prompts]

    def tokens(self, prompts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of prompts. A chat template has inserted the special tokens already. Only encoders get the token
        that ends a text."""
        rows = self.tokenizer(list(prompts), add_special_tokens=not self.chats)["input_ids"] if prompts else []
        end = None if self.encoder_decoder or self.chats else self.tokenizer.eos_token_id
        return [row[:-1] if len(row) > 1 and row[-1] == end else row for row in rows]

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of tokens of each text alone."""
        return [len(row) for row in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []

    def answer_tokens(self, prompts: Sequence[str], rows: Sequence[list[int]], answers: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of answers as a model writes them after prompts, without the end token. A space precedes an
        answer, unless the prompt (of a decoder) ends with one or is a chat. The tokens are those of the whole text, if they
        begin with the prompt's."""
        if not answers:
            return []
        if not self.encoder_decoder and not self.chats:
            answers = [answer if prompt[-1:].isspace() else f" {answer}" for prompt, answer in zip(prompts, answers)]
        alone = self.tokenizer(list(answers), add_special_tokens=False)["input_ids"]
        if self.encoder_decoder:
            return alone
        whole = self.tokens([prompt + answer for prompt, answer in zip(prompts, answers)])
        return [both[len(row) :] if both[: len(row)] == row else answer for row, both, answer in zip(rows, whole, alone)]

    def samples(self, prompts: Sequence[str], answers: Sequence[str], end: bool = True) -> list[dict[str, list[int]]]:
        """Returns samples to train on or to score: for decoders with prompt and answer in one row, for encoder-decoders in
        separate rows. With `end`, the token that ends a text follows the answer. Raises HfExtError if one is longer than the
        model's context."""
        ends = [self.tokenizer.eos_token_id] if end else []
        rows, samples = self.tokens(prompts), []
        for row, written in zip(rows, self.answer_tokens(prompts, rows, answers)):
            answer = self.begin + written + ends
            if self.encoder_decoder:
                sample = {"input_ids": row, "labels": answer}
            else:
                sample = {"input_ids": row + answer, "labels": [-100] * len(row) + answer}
            self.require_room(len(sample["input_ids"]), "a prompt with its answer")
            samples.append(sample)
        return samples

    def length(self, prompt: str, room: int) -> int:
        """Returns the number of tokens that a prompt takes of the model's context, with this many further ones of a decoder."""
        return len(self.tokens([prompt])[0]) + (0 if self.encoder_decoder else room)

    def fits(self, prompt: str, room: int) -> bool:
        """Checks whether a prompt and this many further tokens fit into the model's context."""
        return self.limit is None or self.length(prompt, room) <= self.limit

    def holds(self, prompt: str, answer: str) -> bool:
        """Checks whether a prompt with its answer fits into the model's context."""
        try:
            self.samples([prompt], [answer])
        except HfExtError:
            return False
        return True

    def batch(self, samples: Sequence[dict[str, list[int]]], on_left: bool = False) -> dict[str, torch.Tensor]:
        """Returns samples as one batch with its attention mask, padded on the right, as training and scoring need: without
        position ids, padding on the left would move tokens to other absolute positions."""

        def padded(rows: list[list[int]], padding: int) -> torch.Tensor:
            fill = [[padding] * (max(map(len, rows)) - len(row)) for row in rows]
            return torch.tensor([extra + row if on_left else row + extra for row, extra in zip(rows, fill)])

        paddings = {"input_ids": self.tokenizer.pad_token_id, "labels": -100}
        batch = {name: padded([sample[name] for sample in samples], paddings[name]) for name in samples[0]}
        return batch | {"attention_mask": padded([[1] * len(sample["input_ids"]) for sample in samples], 0)}

    def require_inputs(self, prompts: Mapping[str, str], room: int) -> None:
        """Raises HfExtError unless inputs of the user, with their prompts and `room` further tokens, fit into the model's
        context."""
        for text, prompt in prompts.items():
            if not self.fits(prompt, room):
                raise HfExtError(
                    f"The input '{text[:40]}…' is too long: {self.whose.lower()} model's context holds {self.limit} tokens. "
                    f"Its prompt with {room} tokens for an answer takes more. Shorten the input, or leave it out."
                )

    def require_room(self, length: int, what: str) -> None:
        """Raises HfExtError unless a number of tokens fits into the model's context."""
        if self.limit is not None and length > self.limit:
            raise HfExtError(
                f"{what} takes {length} tokens, and {self.whose.lower()} model's context holds {self.limit}. Use fewer or "
                "shorter seeds (num_shots, num_items), or lower max_input_length or max_label_length."
            )


def batches(samples: Sequence[dict[str, list[int]]], size: int, alike: bool = False) -> list[list[int]]:
    """Returns the numbers of samples, in batches that need little padding. With `alike` they need none."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    order = sorted(range(len(samples)), key=lengths.__getitem__)
    groups = [list(group) for _, group in itertools.groupby(order, lambda i: lengths[i] if alike else 0)]
    return [group[start : start + size] for group in groups for start in range(0, len(group), size)]


def require_texts(**lists: Collection[str] | None) -> None:
    """Raises HfExtError unless arguments, by name, are lists of texts. A single text would count as a list of its letters."""
    for name, texts in lists.items():
        if isinstance(texts, str):
            raise HfExtError(f"{name}='{texts[:40]}' is a single text. Give a list; trans_lora.read_inputs(path) reads a file.")
        if not all(isinstance(text, str) for text in texts or ()):
            raise HfExtError(f"{name} contains something other than texts. Give a list of texts.")
