"""Saving compressed checkpoints with `save_pretrained`, `push_to_hub` and Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import CommitInfo
from safetensors import SafetensorError
from transformers.utils import logging

from hf_ext.errors import CheckpointError
from hf_ext.fm_delta.compress import write_with_card
from hf_ext.fm_delta.folder import ModelFolder
from hf_ext.integration import versions
from hf_ext.integration.cards import CARD, has_card
from hf_ext.integration.in_place import require_model
from hf_ext.integration.save_hooks import PushToHub, Saving, is_diffusers_model
from hf_ext.storage.config_file import is_merge, quantization_of
from hf_ext.storage.delta.codec import decode_raw
from hf_ext.storage.delta.payload import is_payload, read_header
from hf_ext.storage.delta.source import read_base
from hf_ext.storage.files import require_another_folder, staged_folder
from hf_ext.storage.hub import absolute
from hf_ext.storage.layout import all_weights
from hf_ext.storage.open import require_depth
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import open_checkpoint, open_counterpart

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)


def enable(model: Model, base: str | os.PathLike, revision: str | None = None) -> Model:
    """Makes a model save compressed checkpoints: in `save_pretrained`, in `push_to_hub`, and in Trainer.

    Changes only this object (three attributes of the instance); `disable` undoes it. The model's `load_state_dict` then reads
    compressed weights too, so that Trainer can resume and load its best model.

    Args:
        model: any PreTrainedModel, or model of diffusers (a component of a pipeline) that is not quantized.
        base: folder or Hub id of the model that it is fine-tuned from, quantized as the model is. Whoever loads a pushed
            checkpoint needs access to it.
        revision: branch, tag or commit of the base on the Hub; the commit it leads to is recorded.

    Returns:
        The same model.

    Raises:
        BaseModelError: the base cannot be read, or is not quantized as the model is.
        CheckpointError: it is a quantized model of diffusers, or the base is at the end of a long chain of compressed
            checkpoints.
    """
    is_of_diffusers = is_diffusers_model(model)
    if not is_of_diffusers:
        versions.require(
            "Saving compressed checkpoints", "transformers>=5.16.1", advice="save the model, then `hf-ext compress`."
        )
        advice = "Of PEFT, pass get_base_model(); of a SentenceTransformer, model[0].auto_model; of a pipeline, a component."
        require_model(model, "enable", advice)
    elif getattr(model, "is_quantized", False):
        raise CheckpointError("This model of diffusers is quantized. Save it, then `hf-ext compress` the folder.")
    attach(model, base, revision, lambda checkpoint: CompressedSaving(model, checkpoint))
    if hasattr(model, "active_task"):
        logger.warning(f"Of the merge, only the active task is saved then; now it is '{model.active_task}'.")
    if not is_of_diffusers:  # diffusers' own uploads what `save_pretrained` writes
        vars(model)["push_to_hub"] = PushToHub(model)
    return model


def attach(
    model: Any, base: str | os.PathLike, revision: str | None, saving_for: Callable[[TensorSource], CompressedSaving]
) -> None:
    """Replaces `save_pretrained` of a model by the saving that `saving_for` makes for the opened base, and lets
    `load_state_dict` read what it saves. See `enable`."""
    # A save may happen in another working directory.
    config = {} if is_diffusers_model(model) else model.config.to_dict()
    checkpoint = open_counterpart(absolute(base), "", revision, quantization_of(config))
    require_depth(checkpoint)
    names = model.state_dict().keys()
    if not any(checkpoint.twin_of(name) for name in names):
        logger.warning(f"No tensor name of {checkpoint} matches {type(model).__name__}; is this the right base?")
    disable(model)
    # Plain objects on the instance, so that copies and pickles of the model keep them.
    saving = model.save_pretrained = saving_for(checkpoint)
    model._fm_delta_hook = model.register_load_state_dict_pre_hook(saving.decode_state_dict)


def saving_of(model: object) -> CompressedSaving | None:
    """Returns the saving that `attach` gave a model; None for other models."""
    saving = getattr(model, "__dict__", {}).get("save_pretrained")
    return saving if isinstance(saving, CompressedSaving) else None


def disable(model: Model) -> Model:
    """Makes an enabled model save plain checkpoints again. Returns the same model."""
    if saving := saving_of(model):
        del model.save_pretrained
        model.__dict__.pop("push_to_hub", None)
        model.__dict__.pop("_fm_delta_hook").remove()
        model.__dict__.update(saving.replaced)
    return model


class CompressedSaving(Saving):
    """Saves with the method of the model's class, then compresses the weights."""

    def __init__(self, model: Any, base: TensorSource):
        super().__init__(model)
        self.base = base.name
        self.revision = base.revision
        # The instance's own methods that this one and PushToHub replace: those of a merge.
        self.replaced = {name: vars(model)[name] for name in ("save_pretrained", "push_to_hub") if name in vars(model)}

    def save(self, folder: Path, **kwargs: Any) -> list[str]:
        if kwargs.get("distributed_checkpoint"):
            raise CheckpointError("A distributed checkpoint cannot be compressed; call hf_ext.fm_delta.disable(model) first.")
        if kwargs.get("safe_serialization") is False:
            raise CheckpointError("Compressed weights are safetensors files: leave safe_serialization=False out.")
        if is_merge(folder):
            raise CheckpointError(f"{folder} holds a merge, whose tasks the save would replace. Save to another folder.")
        base = open_checkpoint(self.base, self.revision)
        require_another_folder(folder, base.paths)
        with staged_folder(folder) as stage:
            plain = stage / "plain"
            try:
                self.plain_save(plain, **kwargs)
            except SafetensorError as error:
                raise CheckpointError(f"{folder} could not be written: {error}") from error
            written, weights = list(plain.iterdir()), all_weights(plain)
            names = [path.name for path in written]
            for path in written:
                if path not in weights:
                    path.rename(stage / path.name)
            if weights:  # of a model with a PEFT adapter, Transformers saves only the adapter
                write_with_card(ModelFolder.open_plain(plain).models[0].sets, base, stage, folder)
                names += [CARD] if has_card(stage) else []
            for path in weights:
                path.unlink()
            plain.rmdir()
        return names

    def push(self, folder: Path, names: list[str], *args: Any, **options: Any) -> CommitInfo:
        if os.path.isdir(self.base):
            logger.warning(
                f"The base {self.base} is a local folder: others cannot load the pushed checkpoint. Enable with a Hub id."
            )
        return super().push(folder, names, *args, **options)

    def decode_state_dict(self, module: torch.nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *args: Any) -> None:
        """Replaces payloads in a state dict by the decoded tensors, as a pre-hook of `load_state_dict`."""
        base = None
        for key, value in state_dict.items():
            if isinstance(value, torch.Tensor) and is_payload(value):
                data = value.reshape(-1).cpu().numpy()
                header = read_header(data, key.removeprefix(prefix))
                base = base or open_checkpoint(self.base, self.revision)
                base_tensor = read_base(base, header.base_name)
                state_dict[key] = decode_raw(data, base_tensor, header, torch.get_num_threads()).to_torch()
