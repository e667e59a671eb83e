"""The loss on texts of a base, of a fine-tune, and of the base with the LoRA that was extracted from the fine-tune."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ext.errors import CheckpointError, HfExtError
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


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a fine-tune.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no tokenizer, which the texts require: {error}") from error


def losses(
    fine_tune: Path, base: str, revision: str | None, adapter: Path, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]
) -> dict[str, float]:
    """Returns the mean loss of a token, in nats, of "base", "base + LoRA" and "fine-tune". Loads one model at a time.

    Args:
        texts: only the first 1024 tokens of each count.
    """
    tokens = [tokenizer(text, return_tensors="pt", truncation=True, max_length=MOST_TOKENS).input_ids for text in texts]
    model = AutoModelForCausalLM.from_pretrained(base, revision=revision, dtype="auto")
    results = {"base": _loss(model, tokens)}
    results["base + LoRA"] = _loss(PeftModel.from_pretrained(model, adapter), tokens)
    del model
    return results | {"fine-tune": _loss(AutoModelForCausalLM.from_pretrained(fine_tune, dtype="auto"), tokens)}


@torch.inference_mode()
def _loss(model: PreTrainedModel | PeftModel, texts: list[torch.Tensor]) -> float:
    total = count = 0.0
    with progress("Evaluating", len(texts)) as bar:
        for tokens in texts:
            if tokens.shape[1] > 1:
                total += float(model.eval()(input_ids=tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
                count += tokens.shape[1] - 1
            bar.update()
    return total / max(count, 1)
