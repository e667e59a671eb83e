"""Text generation: by a model in memory, in batches, or by a server with OpenAI's protocol."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.utils.logging import tqdm

from hf_ext.errors import HfExtError, ServerError
from hf_ext.integration.modes import evaluating
from hf_ext.trans_lora.encoding import Encoder, batches

# Overrides of a model's generation_config.json. A penalty on repetition punishes the words of the seeds, and the warpers would
# restrict the sampling without a request. Every prompt gets one text (of both lengths min_new_tokens is what counts).
PLAIN: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}
GREEDY: dict[str, Any] = PLAIN | {"do_sample": False}
SAMPLING: dict[str, Any] = PLAIN | {
    "do_sample": True,
    "top_k": 0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
# The same for servers, in fields that vLLM and SGLang add to OpenAI's. Other servers ignore or refuse them.
NEUTRAL: dict[str, Any] = {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0}
ONE_EACH: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False, "min_new_tokens": 0}


@dataclass(frozen=True)
class Completion:
    """A text that a model wrote after a prompt."""

    text: str
    ended: bool  # by itself, not by the limit of tokens


class Generator(Protocol):
    """The interface of text generators: a model in memory or a server."""

    def __call__(
        self, prompts: Sequence[str], max_new_tokens: int, seed: int | None = None, **sampling: Any
    ) -> list[Completion]:
        """Returns a completion of each prompt.

        Args:
            seed: of sampling; None takes the likeliest token each time.
            sampling: temperature; top_p; `stop`, a text that ends the output; and `longest`, the limit of tokens of a list's
                item, after which generation may stop.
        """


@dataclass
class ModelGenerator:
    """Generates texts with a model in memory, with its `generate`, in batches of prompts of similar length. The model generates
    in evaluation mode; afterwards, its mode is restored."""

    model: PreTrainedModel | PeftModel
    encoder: Encoder
    batch_size: int
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of `generate` for sampling

    def __call__(
        self, prompts: Sequence[str], max_new_tokens: int, seed: int | None = None, **sampling: Any
    ) -> list[Completion]:
        rows = [{"input_ids": row} for row in self.encoder.tokens(prompts)]
        room = 0 if self.encoder.encoder_decoder else max_new_tokens
        for row in rows:
            self.encoder.require_room(len(row["input_ids"]) + room, f"A prompt with {room} tokens to write")
        stop, longest = sampling.pop("stop", None), sampling.pop("longest", None)
        settings: dict[str, Any] = GREEDY if seed is None else SAMPLING | sampling | self.options
        settings = settings | ONE_EACH | {"max_new_tokens": max_new_tokens, "pad_token_id": self.encoder.tokenizer.pad_token_id}
        settings["eos_token_id"] = ends = self._ends()
        written: dict[int, Completion] = {}
        devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # all of which `manual_seed` seeds
        with evaluating(self.model), torch.random.fork_rng(devices, enabled=seed is not None), torch.no_grad():
            if seed is not None:
                torch.manual_seed(seed)
            # With virtual tokens PEFT leaves out position ids, and padding on the left would shift absolute positions.
            alike = isinstance(self.model, PeftModel) and self.model.active_peft_config.is_prompt_learning
            for batch in batches(rows, self.batch_size, alike):
                for i, tokens in zip(batch, self._write([rows[i] for i in batch], settings, stop, longest), strict=True):
                    written[i] = self._completion(tokens, ends, stop)
        return [written[i] for i in range(len(rows))]

    def _write(self, rows: list[dict], settings: dict[str, Any], stop: str | None, longest: int | None) -> list[list[int]]:
        decodes = not self.encoder.encoder_decoder
        batch = self.encoder.batch(rows, on_left=decodes)  # an encoder's absolute positions (BART) count from the left
        start = batch["input_ids"].shape[1] if decodes else 0
        total, quiet = len(rows) * settings["max_new_tokens"], not PartialState().is_main_process
        with tqdm(total=total, desc="Writing", unit=" tokens", leave=False, delay=2, disable=quiet) as bar:
            end = StoppingCriteriaList([_End(self.encoder.tokenizer, start, stop, longest, bar.update)])
            inputs = {name: part.to(self.model.device) for name, part in batch.items()}
            out = self.model.generate(**inputs, stopping_criteria=end, **settings)
        return out[:, start:].tolist()

    def _completion(self, tokens: list[int], ends: list[int], stop: str | None) -> Completion:
        tokens = tokens[1:] if self.encoder.encoder_decoder else tokens  # the first one starts the decoder
        at = next((i for i, token in enumerate(tokens) if token in ends), None)
        text = self.encoder.tokenizer.decode(tokens[:at], skip_special_tokens=True)
        kept, stopped, _ = text.partition(stop) if stop else (text, "", "")
        return Completion(kept, at is not None or bool(stopped))

    def _ends(self) -> list[int]:
        """Returns the tokens that end a text: those of the model (chat models have several) and of the tokenizer."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return sorted({token for token in [*ends, self.encoder.tokenizer.eos_token_id] if token is not None})


@dataclass
class _End(StoppingCriteria):
    """A stopping rule: ends a text after `stop`, or after `longest` tokens without a line that begins with a number, as such a
    text delays its batch. Transformers' own stop strings would search the vocabulary anew for each batch, which takes a
    second."""

    tokenizer: PreTrainedTokenizerBase
    start: int  # position of the first token that the model writes
    stop: str | None
    longest: int | None
    wrote: Callable[[int], Any] = lambda count: None  # gets the number of unfinished texts after each step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.wrote(int((input_ids[:, -1] != self.tokenizer.pad_token_id).sum()))
        written = input_ids[:, self.start :]
        ended = [False] * len(written)
        if self.stop:  # a token is at least a character of it, and the last one completes it
            ended = [self.stop in text for text in self.tokenizer.batch_decode(written[:, -len(self.stop) - 1 :])]
        if self.longest and written.shape[1] % self.longest == 0:
            recent = self.tokenizer.batch_decode(written[:, -self.longest :])
            ended = [done or not re.search(r"\n\d+\.", text) for done, text in zip(ended, recent)]
        return torch.tensor(ended, device=input_ids.device)


@dataclass
class Server:
    """Generates texts through /completions of a server with OpenAI's protocol, such as vLLM or `transformers serve`.

    The server must sample if a request has a temperature. `transformers serve` does so only if the model's
    generation_config.json sets do_sample. Requests disable the penalties of generation_config.json if the server supports such
    fields (vLLM, SGLang).

    Args:
        url: address including the version, such as http://localhost:8000/v1.
        model: name of the model on the server.
        api_key: API key; by default OPENAI_API_KEY of the environment.
        concurrency: number of requests at the same time, which the server batches.
        retries: number of retries of a failed request, after waits that grow from half a second to eight seconds.
        timeout: seconds that one request may take.
        options: further fields of the request, such as {"min_p": 0.05} for vLLM.

    Raises:
        HfExtError: openai is not installed.
    """

    url: str
    model: str
    api_key: str | None = None
    concurrency: int = 16
    retries: int = 5
    timeout: float = 600.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            import openai
        except ImportError as error:
            raise HfExtError("Asking a server needs openai: pip install openai.") from error
        key = self.api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.OpenAI(base_url=self.url, api_key=key, max_retries=self.retries, timeout=self.timeout)
        self._errors = openai.OpenAIError
        self._refusals = openai.BadRequestError, openai.UnprocessableEntityError
        self._neutral = NEUTRAL

    def __call__(
        self, prompts: Sequence[str], max_new_tokens: int, seed: int | None = None, **sampling: Any
    ) -> list[Completion]:
        """Returns a completion of each prompt, as `Generator` says.

        Raises:
            ServerError: the server does not answer, or refuses the request.
        """
        stop, _ = sampling.pop("stop", None), sampling.pop("longest", None)
        request = {"model": self.model, "max_tokens": max_new_tokens}
        request |= {"temperature": 0.0} if seed is None else sampling
        request |= {"stop": [stop]} if stop else {}

        def ask(number: int, prompt: str) -> Completion:
            seeded = {} if seed is None else {"seed": seed + number}
            fields, neutral = {"prompt": prompt, **request, **seeded}, self._neutral
            try:
                answer = self._client.completions.create(**fields, extra_body=neutral | self.options)
            except self._refusals:
                if not neutral:
                    raise
                answer = self._client.completions.create(**fields, extra_body=self.options)
                self._neutral = {}
            choice = answer.choices[0]
            text, stopped, _ = choice.text.partition(stop) if stop else (choice.text, "", "")
            return Completion(text, ended=choice.finish_reason == "stop" or bool(stopped))

        with ThreadPoolExecutor(self.concurrency) as pool:
            requests = [pool.submit(ask, number, prompt) for number, prompt in enumerate(prompts)]
            try:
                return [answer.result() for answer in requests]
            except self._errors as error:
                pool.shutdown(cancel_futures=True)
                raise ServerError(
                    f"{self.url} does not answer after {self.retries} retries, or rejects the request: {error} Inputs and "
                    "labels written so far are kept; run again to resume."
                ) from error
