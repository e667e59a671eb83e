"""The whole transfer from names of models, as the command line runs it."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from hf_ext.errors import HfExtError
from hf_ext.storage.files import require_another_folder
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.discriminator import Discriminator, read_record, require_better_than_chance, require_discriminator
from hf_ext.trans_lora.encoding import load_tokenizer, loading
from hf_ext.trans_lora.generation import Generator
from hf_ext.trans_lora.trainer import TransLoraTrainer

ADVICE = "Give the model that its adapter_config.json names."


@dataclass(frozen=True)
class TransferRequest:
    """An adapter to move, and the models to move it from and to, by their names.

    Attributes:
        source_model, source_adapter, target_model: folders or Hub ids.
        seeds: a few real inputs of the task, without answers.
        args: settings of the run, whose files are in args.output_dir.
        peft_config: configuration of the new adapter, of any type.
        discriminator: folder or Hub id; None for a filter without one.
        discriminator_model: base of the discriminator. Defaults to `source_model`; another one is used in a chain of transfers.
        synthesizer: a `Server` that writes the inputs. By default, the target model writes them.

    Raises:
        CheckpointError: args.output_dir is the folder of one of these models or adapters.
    """

    source_model: str
    source_adapter: str
    target_model: str
    seeds: Sequence[str]
    args: TransLoraConfig
    peft_config: PeftConfig
    discriminator: str | None = None
    discriminator_model: str | None = None
    synthesizer: Generator | None = None

    def __post_init__(self) -> None:
        read = (self.source_model, self.source_adapter, self.target_model, self.discriminator, self.discriminator_model)
        require_another_folder(Path(self.args.output_dir), [Path(name) for name in read if name and os.path.isdir(name)])

    def require_target(self) -> None:
        """Checks, without the weights, that the target model has a tokenizer and the layers of its new adapter.

        Raises:
            HfExtError: it lacks one of them.
        """
        with loading(self.target_model):
            config = AutoConfig.from_pretrained(self.target_model)
            load_tokenizer(self.target_model)
        modules = getattr(self.peft_config, "target_modules", None)
        if not modules or modules == "all-linear":
            return
        with torch.device("meta"):
            model = _class_of(config).from_config(config)
        layers = [path for path, _ in model.named_modules()]
        patterns = {modules: modules} if isinstance(modules, str) else {module: re.escape(module) for module in modules}
        missing = [name for name, end in patterns.items() if not any(re.fullmatch(rf"(.*\.)?({end})", path) for path in layers)]
        if missing:
            linear = {
                path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
            }
            raise HfExtError(
                f"The model '{self.target_model}' has no layer {', '.join(sorted(missing))} for target_modules "
                f'(--target-modules). It has {", ".join(sorted(linear))}; "all-linear" stands for all of them but the last.'
            )

    def trainer(self, source: Source, args: TransLoraConfig, **options: Any) -> TransLoraTrainer:
        """Loads the target model and returns its trainer.

        Args:
            args: settings of this training.
            options: further arguments of `TransLoraTrainer`.
        """
        target, tokenizer = load_model(self.target_model)
        return TransLoraTrainer(
            target,
            args,
            processing_class=tokenizer,
            teacher=source.teacher,
            teacher_processing_class=source.tokenizer,
            seeds=self.seeds,
            discriminator=source.discriminator,
            peft_config=copy.deepcopy(self.peft_config),
            synthesizer=self.synthesizer,
            **options,
        )


def transfer(request: TransferRequest, *, real_inputs: Sequence[str] = ()) -> TransLoraTrainer:
    """Loads the models, runs the transfer and saves the new adapter to args.output_dir.

    Args:
        request: the adapter, the models and the settings.
        real_inputs: real inputs of the task, where you still have them; only the report uses them.

    Raises:
        HfExtError: the models, the adapter and the discriminator do not fit together.
    """
    require_discriminator(request.discriminator, request.args)
    request.require_target()
    trainer = request.trainer(Source(request), request.args, real_inputs=real_inputs)
    trainer.train(request.args.resume_from_checkpoint)
    trainer.save_model()
    return trainer


class Source:
    """The source model with its adapter, and the discriminator of its task if there is one, loaded by their names.

    Raises:
        HfExtError: they do not go together, or the discriminator is no better than chance.
    """

    def __init__(self, request: TransferRequest):
        name = request.discriminator
        if name is not None:
            require_better_than_chance(read_record(name)["metrics"], f"The discriminator {name}")
        try:
            PeftConfig.from_pretrained(request.source_adapter)
        except ValueError as error:
            raise HfExtError(f"{request.source_adapter} is no adapter: {error}") from error
        base, self.tokenizer = load_model(request.source_model)
        self.teacher = with_adapter(base, request.source_adapter, request.source_model)
        self.discriminator: Discriminator | None = None
        if name is not None:
            other = request.discriminator_model
            model, tokenizer = (self.teacher, self.tokenizer) if other is None else load_model(other)
            self.discriminator = Discriminator.from_pretrained(name, model, tokenizer)


def with_adapter(model: PreTrainedModel, adapter: str, name: str) -> PeftModel:
    """Puts a saved adapter on the model called `name`.

    Raises:
        HfExtError: the adapter was trained on another model.
    """
    try:
        adapted = PeftModel.from_pretrained(model, adapter)
        # PEFT ignores layers that only the adapter or only the model has, and reports them here alone.
        result = adapted.load_adapter(adapter, adapted.active_adapter)
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).strip().splitlines()[:3])
        raise HfExtError(f"{_misfit(adapter, name)}: {reason} {ADVICE}") from error
    differences = (("which the model lacks", result.unexpected_keys), ("which the adapter lacks", result.missing_keys))
    if parts := [f"{len(keys)} weights {side}, such as '{keys[0]}'" for side, keys in differences if keys]:
        raise HfExtError(f"{_misfit(adapter, name)}: {' and '.join(parts)}. {ADVICE}")
    return adapted


def _misfit(adapter: str, name: str) -> str:
    return f"The adapter {adapter} does not fit the source model {name}"


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a language model and its tokenizer from a folder or the Hub.

    A tokenizer without a padding token pads with the end-of-text token.

    Raises:
        HfExtError: there is no such model.
    """
    with loading(name):
        kind = _class_of(AutoConfig.from_pretrained(name))
        return kind.from_pretrained(name, dtype="auto"), load_tokenizer(name)


def _class_of(config: PretrainedConfig) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def read_inputs(path: str | os.PathLike) -> list[str]:
    """Returns the inputs in a JSON lines file. Each line is a text, or an object with the text as "input".

    Raises:
        HfExtError: the file cannot be read, or a line is neither of these.
    """
    return [text for (text,) in _texts(path, ("input",))]


def read_pairs(path: str | os.PathLike) -> list[tuple[str, str]]:
    """Returns the inputs and correct answers in a JSON lines file. Each line is an object with "input" and "output".

    Raises:
        HfExtError: the file cannot be read, or a line is something else.
    """
    return [(text, answer.strip()) for text, answer in _texts(path, ("input", "output"))]


def _texts(path: str | os.PathLike, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the texts of these names of each line of a file; a line that is only a text has it as the first name."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise HfExtError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            texts = tuple(record[name] for name in names) if isinstance(record, dict) else (record,)
        except (ValueError, KeyError):
            texts = ()
        if len(texts) != len(names) or not all(isinstance(text, str) for text in texts):
            form = ", ".join(f'"{name}": "…"' for name in names)
            raise HfExtError(f"Line {number} of {path} is not of the form {{{form}}}.")
        records.append(texts)
    return records
