"""Callbacks that keep the checkpoints of a training run compressed, and let a Trainer resume from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.fm_delta.saving import CompressedSaving
from hf_ext.fm_delta.series import checkpoints, compress_series, is_compressed, open_root, secure
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.delta.payload import is_payload, read_header
from hf_ext.storage.hub import absolute
from hf_ext.storage.layout import all_weights
from hf_ext.storage.open import open_checkpoint
from hf_ext.storage.prefetch import Prefetcher

logger = logging.get_logger(__name__)


class CompressCheckpoints(TrainerCallback):
    """Keeps the weights of a run's checkpoints compressed, each against the base or the next newer checkpoint.

    ```python
    trainer = Trainer(model, args, callbacks=[fm_delta.CompressCheckpoints()], …)
    ```

    During training, the newest and the best checkpoint stay plain, and each save compresses the others. When training ends, all
    are compressed. `save_total_limit` works. Trainer can resume from every checkpoint of the run, because the model's
    `load_state_dict` reads compressed weights. Checkpoints that contain only an adapter do not change.

    Args:
        base: folder or Hub id of the model that is fine-tuned; defaults to the name that it was loaded from.
        revision: branch, tag or commit of the base on the Hub; the commit it leads to is recorded.

    Raises:
        BaseModelError: the base cannot be read. `Trainer.train` raises both errors before the first step.
        CheckpointError: there is no `base`, and the model was not loaded from a folder or the Hub; or `fm_delta.enable`
            compresses its saves already.
    """

    def __init__(self, base: str | os.PathLike | None = None, revision: str | None = None):
        self.base = base
        self.revision = revision

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any):
        if isinstance(model, torch.nn.Module):
            model.register_load_state_dict_pre_hook(DecodeStateDict(Path(args.output_dir).absolute()))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any):
        if _saving_of(model):
            raise CheckpointError(
                "fm_delta.enable compresses this model's saves already. Call fm_delta.disable(model), or omit this callback."
            )
        if hasattr(model, "peft_config") and self.base is None:
            return  # its checkpoints hold only the adapter
        base = self.base or getattr(model, "name_or_path", None)
        if not base:
            raise CheckpointError("The model was not loaded from a folder or the Hub. Give CompressCheckpoints its base=.")
        # The working directory may change.
        self.base = absolute(base)
        if self.revision is None and self.base == getattr(model, "name_or_path", None):
            self.revision = getattr(model.config, "_commit_hash", None)
        open_root(Path(args.output_dir), self.base, self.revision)
        secure_for(args, state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if args.should_save:
            best = state.best_model_checkpoint
            self._compress(args, state, keep={f"checkpoint-{state.global_step}", Path(best or "").name})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        on_one(args, lambda: self._compress(args, state))

    def _compress(self, args: TrainingArguments, state: TrainerState, keep: Collection[str] = ()) -> None:
        run = Path(args.output_dir)
        if self.base is None or not checkpoints(run, state.global_step):
            return
        try:
            compress_series(run, self.base, self.revision, keep, state.global_step)
        except HfExtError as error:  # the training goes on; these checkpoints stay plain
            logger.warning(f"The checkpoints in {run} are not all compressed: {error}")


class ResumeCompressed(TrainerCallback):
    """Lets a Trainer resume from compressed checkpoints. `import hf_ext` adds it to the default callbacks of Trainer.

    It acts only if the `output_dir` holds compressed checkpoints. The model then reads compressed weights in `load_state_dict`
    until the training ends. Checkpoints that need another one, which the training would overwrite or delete before them, are
    stored against the base before the first step.

    Raises:
        BaseModelError: from `Trainer.train`, before the first step: the base of such a checkpoint cannot be read.
    """

    def __init__(self) -> None:
        self._hook: RemovableHandle | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any):
        run = Path(args.output_dir or ".").absolute()
        if isinstance(model, torch.nn.Module) and any(map(_seems_compressed, run.glob("checkpoint-*"))):
            self._hook = model.register_load_state_dict_pre_hook(DecodeStateDict(run))
            if saving := _saving_of(model):
                saving.has_run = True

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if self._hook is not None:
            secure_for(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any):
        if self._hook is not None:
            self._hook.remove()
            if saving := _saving_of(model):
                saving.has_run = False


class DecodeStateDict:
    """Replaces payloads in a state dict by the decoded tensors, as a pre-hook of `load_state_dict`.

    It is a plain object, so that copies and pickles of the model keep it.

    Args:
        run: folder of the checkpoints. A state dict does not record which of them it was read from, so payloads are compared.
    """

    def __init__(self, run: Path):
        self.run = run

    def __call__(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        payloads = {
            key: value.reshape(-1).cpu().numpy()
            for key, value in state_dict.items()
            if isinstance(value, torch.Tensor) and is_payload(value)
        }
        if not payloads:
            return
        names = {read_header(data, key.removeprefix(prefix)).name: key for key, data in payloads.items()}
        source = open_checkpoint(self._holder({name: payloads[key] for name, key in names.items()}))
        sizes = {name: entry.nbytes for name in names for entry in [source.entry(name)]}
        for name, tensor in Prefetcher(source.read, sizes):
            state_dict[names[name]] = tensor.to_torch()

    def _holder(self, payloads: dict[str, np.ndarray]) -> Path:
        """Returns the checkpoint that these payloads were read from."""
        for folder in filter(_seems_compressed, checkpoints(self.run)):
            files = [CompressedFile(path) for path in all_weights(folder)]
            stored = {name: file.payload(name) for file in files for name in file.original}
            if all(name in stored and np.array_equal(stored[name], data) for name, data in payloads.items()):
                return folder
        raise CheckpointError(
            f"The weights to load are compressed, but are not those of a checkpoint in {self.run}. Run `hf-ext decompress` on "
            "their folder first."
        )


def _saving_of(model: object) -> CompressedSaving | None:
    """Returns the `save_pretrained` of a model that `fm_delta.enable` changed; None for other models."""
    saving = getattr(model, "__dict__", {}).get("save_pretrained")
    return saving if isinstance(saving, CompressedSaving) else None


def _seems_compressed(folder: Path) -> bool:
    """Checks whether a folder holds compressed weights; a folder that cannot be read counts as not compressed."""
    try:
        return is_compressed(folder)
    except (HfExtError, OSError):
        return False


def secure_for(args: TrainingArguments, state: TrainerState) -> None:
    """Prepares the checkpoints in `output_dir` for a training that begins or resumes."""
    best = state.best_model_checkpoint
    on_one(args, lambda: secure(Path(args.output_dir), state.global_step, best and Path(best).name))


def on_one(args: TrainingArguments, work: Callable[[], Any]) -> None:
    """Runs work that changes folders in one process, while the others wait."""
    PartialState().wait_for_everyone()
    try:
        if args.should_save:
            work()
    finally:
        PartialState().wait_for_everyone()
