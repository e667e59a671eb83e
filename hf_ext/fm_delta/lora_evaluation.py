"""The loss on texts of a base, of a fine-tune, and of the base with the LoRA that was extracted from the fine-tune."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_ext.errors import HfExtError
from hf_ext.storage.prefetch import progress

MOST_TOKENS = 1024  # of a text


def read_texts(path: str | os.PathLike) -> list[str]:
    """Reads a file with an object {"text": "…"} in each line.

    Raises:
        HfExtError: the file cannot be read, or has other contents.
    """
    try:
        texts = [json.loads(line)["text"] for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("a text is missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HfExtError(f'{path} must hold an object {{"text": "…"}} in each line: {error}') from error
    return texts


class Evaluation:
    """The comparison of a LoRA with the base and the fine-tune, on texts.

    Args:
        folder: of the fine-tune.
        task: PEFT's type of task.
        base, revision: folder or Hub id of the base, and its commit.
        texts: only the first 1024 tokens of each count.

    Raises:
        HfExtError: the models are not causal language models, or the fine-tune has no tokenizer.
    """

    def __init__(self, folder: Path, task: str | None, base: str, revision: str | None, texts: Iterable[str]):
        if task != "CAUSAL_LM":
            raise HfExtError(f"{folder} is not a causal language model: texts (--eval) cannot evaluate it.")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise HfExtError(f"{folder} has no tokenizer, which texts (--eval) require: {error}") from error
        options = {"return_tensors": "pt", "truncation": True, "max_length": MOST_TOKENS}
        self._texts = [tokenizer(text, **options).input_ids for text in texts]
        self._folder, self._base, self._revision = folder, base, revision

    def losses(self, adapter: Path) -> dict[str, float]:
        """Returns the mean loss of a token, in nats, of "base", "base + LoRA" and "fine-tune". Loads one model at a time."""
        model = AutoModelForCausalLM.from_pretrained(self._base, revision=self._revision or "main", dtype="auto")
        results = {"base": self._loss(model)}
        results["base + LoRA"] = self._loss(PeftModel.from_pretrained(model, adapter))
        del model
        return results | {"fine-tune": self._loss(AutoModelForCausalLM.from_pretrained(self._folder, dtype="auto"))}

    @torch.inference_mode()
    def _loss(self, model: PreTrainedModel | PeftModel) -> float:
        total = count = 0.0
        with progress("Evaluating", len(self._texts)) as bar:
            for tokens in self._texts:
                if tokens.shape[1] > 1:
                    total += float(model.eval()(input_ids=tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
                    count += tokens.shape[1] - 1
                bar.update()
        return total / max(count, 1)
