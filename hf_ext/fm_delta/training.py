"""A Trainer callback that saves the checkpoints of a run compressed, and resumes from them.

Each checkpoint is stored against the base alone, so it can be moved and deleted like a plain one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import MethodType
from typing import Any

from accelerate.utils import extract_model_from_parallel
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.fm_delta.saving import CompressedSaving, attach, saving_of
from hf_ext.integration.in_place import require_plain
from hf_ext.storage.source import TensorSource

logger = logging.get_logger(__name__)

CHECKPOINT = re.compile(r"checkpoint-\d+")


class CompressCheckpoints(TrainerCallback):
    """Saves the checkpoints of a run compressed against the base, and lets Trainer resume from them.

    ```python
    trainer = Trainer(model, args, callbacks=[fm_delta.CompressCheckpoints()], …)
    ```

    From then on, the model's `save_pretrained` compresses what it saves to folders `checkpoint-N` in the `output_dir`, and its
    `load_state_dict` reads compressed weights. All other saves stay plain. `save_total_limit`, `load_best_model_at_end` and
    `resume_from_checkpoint` work as usual. If a checkpoint cannot be compressed, it stays plain, and the training goes on.
    Checkpoints that contain only an adapter do not change. `fm_delta.disable(model)` undoes it.

    Give the callback to the constructor of Trainer: one that is added later compresses, but cannot resume. With `model_init=`,
    call `fm_delta.enable` in that function instead.

    Args:
        base: folder or Hub id of the model that is fine-tuned; defaults to the name that it was loaded from.
        revision: branch, tag or commit of the base on the Hub; the commit it leads to is recorded.

    Raises:
        BaseModelError: the base cannot be read. Trainer's constructor raises both errors.
        CheckpointError: there is no `base`, and the model was not loaded from a folder or the Hub; the base is a checkpoint of
            the run; the model is quantized or not of Transformers; or `fm_delta.enable` compresses its saves already.
    """

    def __init__(self, base: str | os.PathLike | None = None, revision: str | None = None):
        self.base = base
        self.revision = revision

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any):
        self._attach(args, model)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any):
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        if saving_of(model) is None:  # the callback was added later, or `model_init` made another model
            self._attach(args, model)

    def _attach(self, args: TrainingArguments, model: PreTrainedModel) -> None:
        if hasattr(model, "peft_config"):
            return  # its checkpoints hold only the adapter
        require_plain(model, type(self).__name__, "", "can be compressed")
        if type(saving_of(model)) is CompressedSaving:
            raise CheckpointError(
                "fm_delta.enable compresses this model's saves already. Call fm_delta.disable(model), or omit this callback."
            )
        base, revision = self.base or model.name_or_path, self.revision
        if not base:
            raise CheckpointError("The model was not loaded from a folder or the Hub. Give CompressCheckpoints its base=.")
        if revision is None and base == model.name_or_path:
            revision = getattr(model.config, "_commit_hash", None)
        attach(model, base, revision, lambda checkpoint: CheckpointSaving(model, checkpoint, Path(args.output_dir).absolute()))


class CheckpointSaving(CompressedSaving):
    """Compresses the checkpoints of a run. Saves to other folders as the model did before."""

    def __init__(self, model: PreTrainedModel, base: TensorSource, run: Path):
        super().__init__(model, base)
        self.run = run
        for path in base.paths:
            if self._is_checkpoint(path.resolve().parent, run.resolve()):
                raise CheckpointError(
                    f"The base {base} is read from {path.parent}, which is a checkpoint of the run itself and may be deleted. "
                    "Give CompressCheckpoints the model that was fine-tuned."
                )

    @staticmethod
    def _is_checkpoint(folder: Path, run: Path) -> bool:
        return CHECKPOINT.fullmatch(folder.name) is not None and folder.is_relative_to(run)

    def __call__(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        if self._is_checkpoint(Path(save_directory).absolute(), self.run):
            super().__call__(save_directory, *args, **kwargs)
        else:
            plain = self.replaced.get("save_pretrained") or MethodType(type(self.model).save_pretrained, self.model)
            plain(save_directory, *args, **kwargs)

    def save(self, folder: Path, **kwargs: Any) -> list[str]:
        try:
            return super().save(folder, **kwargs)
        except HfExtError as error:  # the training goes on
            logger.warning(f"{folder} is not compressed: {error}")
            self.plain_save(folder, **kwargs)
            return []
