"""The whole transfer from names of models, as the command line runs it."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import PreTrainedModel

from hf_ext.errors import HfExtError
from hf_ext.storage.files import require_another_folder
from hf_ext.storage.guards import require_place
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.discriminator import Discriminator
from hf_ext.trans_lora.models import bare, load_adapted, load_model
from hf_ext.trans_lora.stages import is_run
from hf_ext.trans_lora.trainer import TransLoraTrainer

logger = logging.getLogger(__name__)


def transfer(
    source_model: str,
    source_adapter: str,
    target_model: str,
    seeds: Sequence[str],
    args: TransLoraConfig,
    peft_config: PeftConfig,
    *,
    discriminator: str | None = None,
    discriminator_model: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> TransLoraTrainer:
    """Loads the models, runs the transfer and saves the new adapter to args.output_dir.

    Args:
        source_model, source_adapter, target_model: folders or Hub ids.
        seeds: a few real inputs of the task, without answers.
        args: settings of the run, whose files are in args.output_dir.
        peft_config: configuration of the new adapter, of any type.
        discriminator: folder or Hub id; None for a filter without one.
        discriminator_model: base of the discriminator. Defaults to `source_model`; another one is used in a chain of transfers.
        overwrite: replace files of a folder that holds something else than a run.
        options: further arguments of `TransLoraTrainer`, such as synthesizer.

    Raises:
        HfExtError: the models, the adapter and the discriminator do not fit together, or the discriminator is no better than
            chance.
        CheckpointError: args.output_dir holds something else, or is the folder of one of these models or adapters.
    """
    out, read = Path(args.output_dir), (source_model, source_adapter, target_model, discriminator, discriminator_model)
    require_another_folder(out, read)
    require_place(out, overwrite or partial(is_run, out))
    teacher, teacher_tokenizer = load_adapted(source_model, source_adapter)
    judge = None
    if discriminator is not None:
        base = (teacher, teacher_tokenizer) if discriminator_model is None else load_model(discriminator_model)
        judge = Discriminator.from_pretrained(discriminator, *base)
        judge.require_better_than_chance(f"The discriminator {discriminator}")
    target, tokenizer = load_model(target_model)
    if _are_alike(bare(teacher), target):
        logger.warning(
            f"{target_model} has the layers of {source_model}. If it is a fine-tune of it, the adapter as it is may do better: "
            f"PeftModel.from_pretrained(model, '{source_adapter}')."
        )
    trainer = TransLoraTrainer(
        target,
        args,
        processing_class=tokenizer,
        teacher=teacher,
        teacher_processing_class=teacher_tokenizer,
        seeds=seeds,
        discriminator=judge,
        peft_config=peft_config,
        **options,
    )
    trainer.train(args.resume_from_checkpoint)
    trainer.save_model()
    return trainer


def _are_alike(adapted: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Checks whether a model has the weights of another one, in their shapes, without that one's adapter."""
    wrapper = re.compile(r"\.(base_layer|original_module)\b")
    shapes = {wrapper.sub("", name): weight.shape for name, weight in adapted.named_parameters()}
    return all(shapes.get(name) == weight.shape for name, weight in model.named_parameters())


def read_inputs(path: str | os.PathLike) -> list[str]:
    """Returns the inputs in a JSON lines file. Each line is a text, or an object with the text as "input".

    Raises:
        HfExtError: the file cannot be read, or a line is neither of these.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise HfExtError(f"{path} cannot be read: {error}") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        text = record.get("input") if isinstance(record, dict) else record
        if not isinstance(text, str):
            raise HfExtError(f'Line {number} of {path} is not of the form {{"input": "…"}}.')
        texts.append(text)
    return texts
