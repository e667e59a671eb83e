"""Texts of a task as tokens of a model: prompts, and prompts with their answers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_ext.errors import HfExtError


class Encoder:
    """How one model is asked.

    Args:
        template: text with `{input}` in it; None for the tokenizer's chat template, or, if it has none, the input and a line
            break.
        whose: in errors: "the teacher's".

    Raises:
        HfExtError: the tokenizer has no token for padding or for the end of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: nn.Module, template: str | None = None, whose: str = "the"):
        self.tokenizer = tokenizer
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        self.limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # T5 and its kin have none
        self.whose = whose
        self.chats = template is None and bool(tokenizer.chat_template)
        self.template = template
        if tokenizer.eos_token_id is None:
            raise HfExtError(f"{whose} tokenizer has no token that ends a text; set tokenizer.eos_token.")
        if tokenizer.pad_token_id is None:
            raise HfExtError(
                f"{whose} tokenizer has no token to pad with; set tokenizer.pad_token, if there is no other choice to "
                "tokenizer.eos_token."
            )

    def prompt(self, text: str) -> str:
        """What the model reads when asked for the answer to an input."""
        return prompt(text, self.tokenizer, self.template)

    def tokens(self, prompts: Sequence[str]) -> list[list[int]]:
        """Prompts as tokens; a chat template has put the special ones in already."""
        return self.tokenizer(list(prompts), add_special_tokens=not self.chats)["input_ids"] if prompts else []

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """How many tokens texts have, by themselves."""
        return [len(row) for row in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []

    def answer_tokens(self, prompts: Sequence[str], asked: Sequence[list[int]], answers: Sequence[str]) -> list[list[int]]:
        """Answers as a model writes them after prompts, without what ends them: after a space, unless the prompt (a decoder's)
        ends with one or is a chat, and with the tokens that the whole text has there, if the prompt's stay the same in it."""
        if not answers:
            return []
        if not self.encoder_decoder and not self.chats:
            answers = [answer if prompt[-1:].isspace() else f" {answer}" for prompt, answer in zip(prompts, answers)]
        alone = self.tokenizer(list(answers), add_special_tokens=False)["input_ids"]
        if self.encoder_decoder:
            return alone
        whole = self.tokens([prompt + answer for prompt, answer in zip(prompts, answers)])
        return [both[len(row) :] if both[: len(row)] == row else answer for row, both, answer in zip(asked, whole, alone)]

    def samples(self, prompts: Sequence[str], answers: Sequence[str], end: bool = True) -> list[dict[str, list[int]]]:
        """Samples to train on or to score: of decoders prompt and answer in one row, of encoder-decoders apart.

        Args:
            end: whether the answer is followed by the token that ends a text.

        Raises:
            HfExtError: one is longer than the model's context.
        """
        ends = [self.tokenizer.eos_token_id] if end else []
        samples, rows = [], self.tokens(prompts)
        for asked, answer in zip(rows, self.answer_tokens(prompts, rows, answers)):
            answer = answer + ends
            if self.encoder_decoder:
                row = {"input_ids": asked, "labels": answer}
            else:
                row = {"input_ids": asked + answer, "labels": [-100] * len(asked) + answer}
            self.require_room(len(row["input_ids"]), "a prompt with its answer")
            samples.append(row | {"attention_mask": [1] * len(row["input_ids"])})
        return samples

    def require_room(self, length: int, what: str) -> None:
        """
        Raises:
            HfExtError: so many tokens do not fit into the model's context.
        """
        if self.limit is not None and length > self.limit:
            raise HfExtError(
                f"{what} takes {length} tokens, and {self.whose} model's context holds {self.limit}. Use fewer or shorter "
                "seeds (num_shots, num_items), or lower max_input_length or max_label_length."
            )


def prompt(text: str, tokenizer: PreTrainedTokenizerBase | None, template: str | None) -> str:
    """An input as a model is asked for its answer: by the template, else as a chat, else with a line break after it."""
    if template is None and tokenizer is not None and tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return (template or "{input}\n").replace("{input}", text)
