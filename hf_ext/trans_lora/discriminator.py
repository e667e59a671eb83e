"""The discriminator: an adapter of the source model that tells the task's own inputs from synthetic ones."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi
from peft import PeftConfig, PeftModel, TaskType
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from hf_ext.display import percent
from hf_ext.errors import HfExtError
from hf_ext.integration.cards import CARD, drop_card_for
from hf_ext.storage.files import staged_folder
from hf_ext.trans_lora.adapters import adapters_kept, bare, base_sample, on_device, only
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.encoding import Encoder, load_tokenizer, loading
from hf_ext.trans_lora.prompts import MEMBERSHIP, NO, YES, membership_question
from hf_ext.trans_lora.scoring import log_odds

NAME = "discriminator"  # of the adapter
FILE = "discriminator.json"
ANSWER_LENGTH = 8  # tokens of YES or NO, at most


class Discriminator:
    """Scores how likely an input is a real one of the task (Trans-LoRA, arXiv 2405.17258, section 3.2).

    Attributes:
        model: the source model with the adapter "discriminator", and its other adapters, if any. The adapter is active only
            while inputs are scored, so it does not change other computations of the model.
        task: name of the task in the question to the model.
        metrics: shares of real and synthetic inputs that it keeps, among those that it was not trained on.
        prompt: the question to the model, with {input} and {task} in it.
    """

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        task: str,
        metrics: dict[str, float] | None = None,
        prompt: str = MEMBERSHIP,
    ):
        self.model, self.tokenizer, self.task, self.metrics, self.prompt = model, tokenizer, task, metrics or {}, prompt
        self.encoder = encoder_of(tokenizer, model)

    def question(self, text: str) -> str:
        """Returns the question to the model about an input."""
        return membership_question(text, self.task, self.prompt)

    def score(self, inputs: Sequence[str], batch_size: int = 32, device: torch.device | None = None) -> list[float]:
        """Returns p(yes) / (p(yes) + p(no)) for each input. A score above 0.5 means a real input of the task.

        Args:
            device: device to compute on; by default the model's.
        """
        if not inputs:
            return []
        prompts = [self.encoder.prompt(self.question(text)) for text in inputs]
        with adapters_kept(self.model), on_device(self.model, device or self.model.device):
            only(self.model, NAME)
            odds = log_odds(self.model, self.encoder, prompts, (YES, NO), batch_size)
        return torch.tensor(odds).sigmoid().tolist()

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes the adapter, as PEFT does, with the discriminator's task, question and base model.

        Args:
            kwargs: arguments of `push_to_hub`, such as repo_id, to push the adapter too.
        """
        record = {"task": self.task, "prompt": self.prompt, "base_sample": base_sample(self.model), "metrics": self.metrics}
        with staged_folder(save_directory) as stage:
            self.model.save_pretrained(stage, selected_adapters=[NAME])
            for path in (stage / NAME).iterdir():  # PEFT puts adapters that are not called "default" into folders
                shutil.move(path, stage / path.name)
            (stage / NAME).rmdir()
            drop_card_for(Path(save_directory), stage)
            (stage / FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload discriminator",
        create_pr: bool = False,
    ) -> CommitInfo:
        """Pushes the discriminator to a repository on the Hub, which is created if it does not exist."""
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                create_pr=create_pr,
                ignore_patterns=[CARD] if api.file_exists(repo_id, CARD, revision=revision) else None,
            )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        model: PreTrainedModel | PeftModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> Discriminator:
        """Loads a discriminator from a folder or the Hub.

        Args:
            model: the source model that the discriminator was trained on, with or without the teacher's adapter, so that memory
                holds only one copy of it. By default, the model that the adapter names is loaded.
            tokenizer: tokenizer of that model; by default, the one that the adapter names.
            kwargs: revision, token, cache_dir and others; token and cache_dir apply to the model too.

        Raises:
            HfExtError: this is not a discriminator, or `model` is not the one that it was trained on.
        """
        name = os.fspath(pretrained_model_name_or_path)
        record = read_record(name, **kwargs)
        task, sample, metrics, prompt = record["task"], torch.tensor(record["base_sample"]), record["metrics"], record["prompt"]
        access = {key: kwargs[key] for key in ("token", "cache_dir", "local_files_only") if key in kwargs}
        config = PeftConfig.from_pretrained(name, **kwargs)
        base = config.base_model_name_or_path
        if model is None:
            kind = AutoModelForSeq2SeqLM if config.task_type == TaskType.SEQ_2_SEQ_LM else AutoModelForCausalLM
            model = kind.from_pretrained(base, dtype="auto", **access)
        current = torch.tensor(base_sample(model))
        if current.shape != sample.shape or torch.cosine_similarity(current, sample, dim=0) < 0.97:
            raise HfExtError(
                f"The discriminator in {name} was trained on {base}, but {model.name_or_path or 'the given model'} is another "
                "model. In a chain of transfers, it needs its own base: load it without `model`."
            )
        tokenizer = tokenizer or load_tokenizer(bare(model).name_or_path or base, **access)
        with adapters_kept(model), second_adapter():
            model = PeftModel.from_pretrained(bare(model), name, adapter_name=NAME, **kwargs)
        return cls(model.eval(), tokenizer, task, metrics, prompt)


def read_record(name: str, **kwargs: Any) -> dict[str, Any]:
    """Returns the record of a discriminator, from a folder or downloaded from the Hub.

    Raises:
        HfExtError: there is none, or it is damaged.
    """
    with loading(name, "discriminator"):
        path = cached_file(name, FILE, _raise_exceptions_for_missing_entries=False, **kwargs)
    if path is None:
        raise HfExtError(
            f"{name} is no discriminator: it has no {FILE}. train_discriminator, or `hf-ext train-discriminator`, makes one."
        )
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        torch.tensor(record["base_sample"])
        return {"prompt": MEMBERSHIP} | {key: record[key] for key in ("task", "base_sample", "metrics")} | record
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise HfExtError(f"{path} is not a valid record of a discriminator; save the discriminator again.") from error


def require_better_than_chance(metrics: dict[str, float], name: str) -> None:
    """Raises an error for a discriminator that keeps as many synthetic inputs as real ones.

    Args:
        metrics: its shares on held-out inputs; without them it passes.

    Raises:
        HfExtError: it is no better than chance.
    """
    real, synthetic = metrics.get("real_kept"), metrics.get("synthetic_kept")
    if real is not None and synthetic is not None and real <= synthetic:
        raise HfExtError(
            f"{name} is no better than chance: of inputs that it was not trained on, it keeps {percent(real, 0)} of the real "
            f"ones and {percent(synthetic, 0)} of the synthetic ones. Train another one in a new folder, on more inputs "
            "(hundreds), for more epochs or at a higher learning_rate; or transfer with --filter token_excess."
        )


def require_discriminator(discriminator: object, args: TransLoraConfig) -> None:
    """Raises HfExtError if the filter is a discriminator and none is given."""
    if args.filter == "discriminator" and discriminator is None:
        raise HfExtError(
            "filter='discriminator' needs a discriminator (--discriminator on the command line); without one take "
            "filter='token_excess' or 'none'."
        )


def encoder_of(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel) -> Encoder:
    """Returns the encoder of the discriminator's questions: a chat, or the question alone."""
    return Encoder(tokenizer, model, None if tokenizer.chat_template else "{input}", "The discriminator's")


@contextmanager
def second_adapter() -> Iterator[None]:
    """Silences PEFT's warning about a second adapter in a model, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(second time|multiple adapters|Already found).*")
        yield
