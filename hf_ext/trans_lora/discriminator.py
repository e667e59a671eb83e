"""The discriminator: an adapter of the source model that tells the task's own inputs from synthetic ones."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import CommitInfo
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import cached_file

from hf_ext.display import percent
from hf_ext.errors import HfExtError
from hf_ext.integration.cards import drop_card_for
from hf_ext.integration.save_hooks import upload
from hf_ext.storage.files import staged_folder
from hf_ext.trans_lora.config import MEMBERSHIP, TransLoraConfig
from hf_ext.trans_lora.encoding import Encoder, require_texts
from hf_ext.trans_lora.generation import Generator
from hf_ext.trans_lora.models import adapters_kept, bare, base_sample, load_model, load_tokenizer, loading, on_device, only
from hf_ext.trans_lora.scoring import AnswerTrainer, log_odds
from hf_ext.trans_lora.stages import begin_training, is_run
from hf_ext.trans_lora.synthesis import Prompts, write_inputs

YES, NO = "Yes", "No"
NAME = "discriminator"  # of the adapter
FILE = "discriminator.json"
ANSWER_LENGTH = 8  # tokens of YES or NO, at most
Answers = list[tuple[str, str]]  # inputs with YES or NO


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
        self.encoder = _encoder(tokenizer, model)

    def question(self, text: str) -> str:
        """Returns the prompt with the question to the model about an input."""
        return self.encoder.prompt(question(text, self.task, self.prompt))

    def fits(self, text: str) -> bool:
        """Checks whether the question about an input, with its answer, fits into the model's context."""
        return self.encoder.fits(self.question(text), ANSWER_LENGTH)

    def score(self, inputs: Sequence[str], batch_size: int = 32, device: torch.device | None = None) -> list[float]:
        """Returns p(yes) / (p(yes) + p(no)) for each input. A score above 0.5 means a real input of the task.

        Args:
            device: device to compute on; by default the model's.
        """
        if not inputs:
            return []
        prompts = [self.question(text) for text in inputs]
        with adapters_kept(self.model), on_device(self.model, device or self.model.device):
            only(self.model, NAME)
            odds = log_odds(self.model, self.encoder, prompts, (YES, NO), batch_size)
        return torch.tensor(odds).sigmoid().tolist()

    def require_better_than_chance(self, name: str) -> None:
        """Raises HfExtError, in which it has this name, if it keeps as many synthetic as real inputs of those that it was not
        trained on."""
        real, synthetic = self.metrics.get("real_kept"), self.metrics.get("synthetic_kept")
        if real is not None and synthetic is not None and real <= synthetic:
            raise HfExtError(
                f"{name} is no better than chance: of inputs that it was not trained on, it keeps {percent(real, 0)} of the "
                f"real ones and {percent(synthetic, 0)} of the synthetic ones. Train another one in a new folder, on more "
                "inputs (hundreds), for more epochs or at a higher learning_rate; or transfer with --filter none."
            )

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, overwrite: bool = False, **kwargs: Any
    ) -> None:
        """Writes the adapter, as PEFT does, with the discriminator's task, question and base model.

        Args:
            overwrite: replace files of a folder that holds something else than a discriminator.
            kwargs: arguments of `push_to_hub`, such as repo_id, to push the adapter too.
        """
        folder = Path(save_directory)
        record = {"task": self.task, "prompt": self.prompt, "base_sample": base_sample(self.model), "metrics": self.metrics}
        with staged_folder(folder, overwrite=overwrite or partial(is_run, folder, FILE)) as stage:
            self.model.save_pretrained(stage, selected_adapters=[NAME])
            for path in (stage / NAME).iterdir():  # PEFT puts adapters that are not called "default" into folders
                shutil.move(path, stage / path.name)
            (stage / NAME).rmdir()
            drop_card_for(folder, stage)
            (stage / FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo:
        """Pushes the discriminator to a repository on the Hub, which is created if it does not exist.

        Args:
            kwargs: private, token, revision, and further arguments of `HfApi.upload_folder`, such as commit_message and
                create_pr.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return upload(Path(folder), repo_id, **kwargs)

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
        record = _read_record(name, **kwargs)
        sample = torch.tensor(record["base_sample"])
        access = {key: kwargs[key] for key in ("token", "cache_dir", "local_files_only") if key in kwargs}
        base = PeftConfig.from_pretrained(name, **kwargs).base_model_name_or_path
        if model is None:
            model, saved_tokenizer = load_model(base, **access)
            tokenizer = tokenizer or saved_tokenizer
        current = torch.tensor(base_sample(model))
        if current.shape != sample.shape or torch.cosine_similarity(current, sample, dim=0) < 0.97:
            raise HfExtError(
                f"The discriminator in {name} was trained on {base}, but {model.name_or_path or 'the given model'} is another "
                "model. In a chain of transfers, it needs its own base: load it without `model`."
            )
        tokenizer = tokenizer or load_tokenizer(bare(model).name_or_path or base, **access)
        with adapters_kept(model), _second_adapter():
            model = PeftModel.from_pretrained(bare(model), name, adapter_name=NAME, **kwargs)
        return cls(model.eval(), tokenizer, record["task"], record["metrics"], record["prompt"])


def train_discriminator(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    real_inputs: Sequence[str],
    *,
    task: str,
    args: TransLoraConfig,
    peft_config: PeftConfig | None = None,
    seeds: Sequence[str] | None = None,
    synthetic_inputs: Sequence[str] | None = None,
    synthesizer: Generator | None = None,
) -> Discriminator:
    """Trains the discriminator while you have the task's data, on real inputs and inputs that the source model writes.

    The model that writes inputs sees only the seeds of the real inputs, and no real input is saved. args.output_dir receives
    the synthetic inputs and the checkpoints of the training. A killed run resumes from these.

    Args:
        model: the source model, with or without the teacher's adapter. It gets the adapter "discriminator", which is active
            only while it scores.
        real_inputs: the task's inputs, without answers.
        task: name of the task in the question to the model.
        args: settings of the training and of the writing of synthetic inputs, as for the transfer, and the question
            (`discriminator_prompt`).
        peft_config: configuration of the adapter; by default a LoRA on PEFT's default layers.
        seeds: example inputs for the synthetic inputs; by default as many as a prompt shows, drawn from the real inputs.
        synthetic_inputs: existing synthetic inputs, to use instead of writing new ones.
        synthesizer: a `Server` that writes the synthetic inputs. By default, the model writes them.

    Raises:
        HfExtError: there are too few inputs, the tokenizer lacks a token, or the model has adapters of another kind.
    """
    require_texts(real_inputs=real_inputs, seeds=seeds, synthetic_inputs=synthetic_inputs)
    real, least = list(dict.fromkeys(text.strip() for text in real_inputs if text.strip())), max(2, args.num_shots)
    if len(real) < least:
        raise HfExtError(f"There are {len(real)} different real inputs; give at least {least}, better hundreds.")
    if synthetic_inputs is not None and not any(text.strip() for text in synthetic_inputs):
        raise HfExtError("synthetic_inputs is empty. Give some, or leave it out to let the model write them.")
    encoder = _encoder(tokenizer, model)
    questions = {text: encoder.prompt(question(text, task, args.discriminator_prompt)) for text in real}
    encoder.require_inputs(questions, ANSWER_LENGTH)
    peft_config = peft_config or LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM if encoder.encoder_decoder else TaskType.CAUSAL_LM)
    if getattr(peft_config, "modules_to_save", None):
        raise HfExtError("A discriminator shares the source model, so it cannot replace modules: leave out modules_to_save.")
    settings = {"kind": "discriminator", "task": task, "model": bare(model).name_or_path, "seed": args.seed}
    settings |= {"real inputs (a checksum)": xxhash.xxh3_64("\n".join(real).encode()).hexdigest()}
    if synthetic_inputs is None:
        seeds = seeds or random.Random(args.seed).sample(real, args.num_shots)
        candidates = write_inputs(synthesizer or model, Prompts(seeds, args, encoder), len(real), settings)
        synthetic_inputs = [candidate.input for candidate in candidates if candidate.kept]
    synthetic = list(dict.fromkeys(text.strip() for text in synthetic_inputs if text.strip()))
    held_out, rows = _split(real, synthetic[: len(real)], args.seed)
    with adapters_kept(model):
        set_seed(args.seed)  # as Trainer does, but before the adapter is made
        with _second_adapter():
            model = get_peft_model(bare(model), peft_config, NAME)
        only(model, NAME, trainable=True)
        discriminator = Discriminator(model, tokenizer, task, prompt=args.discriminator_prompt)
        _train(discriminator, args, settings, rows, held_out)
    model.eval()
    scores = discriminator.score([text for text, _ in held_out], args.generation_batch_size)
    for name, answer in (("real_kept", YES), ("synthetic_kept", NO)):
        if kept := [score > 0.5 for score, (_, correct) in zip(scores, held_out) if correct == answer]:
            discriminator.metrics[name] = sum(kept) / len(kept)
    return discriminator


def _train(
    discriminator: Discriminator, args: TransLoraConfig, settings: dict[str, Any], rows: Answers, held_out: Answers
) -> None:
    """Trains the adapter on inputs with their answers, from the last checkpoint in args.output_dir if there is one."""
    encoder = discriminator.encoder

    def samples(pairs: Answers) -> list[dict[str, list[int]]]:
        return encoder.samples([discriminator.question(text) for text, _ in pairs], [answer for _, answer in pairs])

    settings = settings | args.training_settings(discriminator.model.peft_config[NAME])
    settings |= {"discriminator_prompt": discriminator.prompt}
    checkpoint = begin_training(Path(args.output_dir), settings, args.resume_from_checkpoint)
    trainer = AnswerTrainer(
        model=discriminator.model,
        args=args,
        train_dataset=samples(rows),
        eval_dataset=samples(held_out),
        data_collator=encoder.batch,
        processing_class=discriminator.tokenizer,
    )
    trainer.train(resume_from_checkpoint=checkpoint)


def _split(real: list[str], synthetic: list[str], seed: int) -> tuple[Answers, Answers]:
    """Returns a tenth of both kinds for evaluation, and the rest for training, as inputs with their answers. Trains on all if
    there are few. Repeats the smaller kind, because a discriminator trained on unequal kinds answers with the larger one."""
    held_out: Answers = []
    rows: Answers = []
    longer = max(len(texts) - len(texts) // 10 for texts in (real, synthetic))
    for texts, answer in ((real, YES), (synthetic, NO)):
        pairs = [(text, answer) for text in texts]
        random.Random(seed).shuffle(pairs)
        count = len(pairs) // 10
        held_out += pairs[:count]
        rows += itertools.islice(itertools.cycle(pairs[count:]), longer)
    return held_out, rows


def question(text: str, task: str, template: str = MEMBERSHIP) -> str:
    """Returns the question about an input, whose answer is YES or NO (section 3.2)."""
    # In one pass, so that braces in the text or in the task's name stay.
    return re.sub(r"\{(input|task)\}", lambda match: text if match[1] == "input" else task, template)


def _encoder(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel) -> Encoder:
    """Returns the encoder of the discriminator's questions: a chat, or the question alone."""
    return Encoder(tokenizer, model, None if tokenizer.chat_template else "{input}", "The discriminator's")


def _read_record(name: str, **kwargs: Any) -> dict[str, Any]:
    """Returns the record of a discriminator, from a folder or from the Hub. Raises HfExtError if there is no valid one."""
    with loading(name, "discriminator"):
        path = cached_file(name, FILE, _raise_exceptions_for_missing_entries=False, **kwargs)
    if path is None:
        raise HfExtError(
            f"{name} is no discriminator: it has no {FILE}. train_discriminator, or `hf-ext train-discriminator`, makes one."
        )
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        torch.tensor(record["base_sample"])
        return {key: record[key] for key in ("task", "prompt", "base_sample", "metrics")}
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise HfExtError(f"{path} is not a valid record of a discriminator; save the discriminator again.") from error


@contextmanager
def _second_adapter() -> Iterator[None]:
    """Silences PEFT's warning about a second adapter in a model, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(second time|multiple adapters|Already found).*")
        yield
