"""Hot swap: replaces the weights of a model in memory, in place, by those of another fine-tune of its base."""

from __future__ import annotations

import os
from dataclasses import replace

from transformers import PreTrainedModel
from transformers.utils.logging import get_logger

from hf_ext.adapters.models import open_model
from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.integration import compat
from hf_ext.integration.config_change import ConfigChange, change_between, difference
from hf_ext.integration.in_place import LiveWeights, lock_of, require_plain
from hf_ext.storage.config_file import read_config
from hf_ext.storage.hub import Hub, is_local
from hf_ext.storage.layout import GENERATION
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import Stored, split_task

logger = get_logger(__name__)


def switch(
    model: PreTrainedModel,
    other: str | os.PathLike,
    revision: str | None = None,
    *,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike | None = None,
    local_files_only: bool = False,
) -> PreTrainedModel:
    """Switches a loaded model to another fine-tune of its base, in place.

    Overwrites the weights in memory; each keeps its type and device. Replaces parameters of another shape (heads, resized
    embeddings), and updates labels, configuration and generation settings. Memory: the model and a few tensors. If the
    base is in the cache, only the compressed checkpoint is downloaded. The previous weights and their gradients are lost.

    Before the first weight changes, it checks that all files are complete, that the base is the recorded one, and that each
    tensor has a parameter of its shape. Two failures can occur later: a lack of memory, and a base that was changed where its
    fingerprint takes no samples. The error then says that the model is now a mix of both checkpoints.

    One thread at a time switches a model; others wait.

    Args:
        model: of the same class and structure as `other`, loaded in any way. Labels and vocabulary may differ.
        other: folder or Hub id of a checkpoint compressed by FM-Delta, or of a plain one (the base itself, for instance).
        revision: branch, tag or commit of `other` on the Hub.
        token, cache_dir, local_files_only: as in `from_pretrained`, for the base too.

    Returns:
        The same model.

    Raises:
        CheckpointError: `other` does not exist or is of another model, or `model` cannot be overwritten in place: it is
            quantized, offloaded or sharded, has adapters inside, or is a merge of several tasks.
        BaseModelError: the base of `other` is missing or differs from the recorded one.
        CorruptFileError: `other` is damaged.
    """
    with lock_of(model):
        _require_own_weights(model)
        source, commit, config, generation = _open(os.fspath(other), revision, Hub(token, cache_dir, local_files_only))
        change = _change(model, source, config, generation)
        with compat.host_internals("Switching to another checkpoint", "Load the checkpoint with from_pretrained."):
            from hf_ext.integration.loading.weight_plan import plan_of

            plan, unused = plan_of(model, source.names())
            weights = LiveWeights(model, plan)
            weights.require_in_memory()
            weights.require_all(source, change.shapes)
        if unused:
            logger.warning(f"{type(model).__name__} has no place for these tensors of {source}: {', '.join(unused[:5])}.")
        weights.overwrite(source)
        change.apply(model)
        model.zero_grad()
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and type(module.config) is type(model.config):
                module.name_or_path = module.config.name_or_path = os.fspath(other)
        model.config._commit_hash = commit
    return model


def _require_own_weights(model: PreTrainedModel) -> None:
    """Raises CheckpointError if a model is a merge, quantized, or has adapters inside."""
    advice = "For a PeftModel, call unload(); for a SentenceTransformer, pass model[0].auto_model."
    require_plain(model, "switch", advice, "can be switched. Load the other model instead")
    if hasattr(model, "set_task"):
        raise CheckpointError("This model is a merge of several tasks. Switch between them with model.set_task(name).")
    if any(hasattr(module, "base_layer") or hasattr(module, "original_module") for module in model.modules()):
        raise CheckpointError(
            "This model has adapters inside, which were trained on its weights. Remove them first (unload() or "
            "merge_and_unload() of the PeftModel)."
        )


def _open(other: str, revision: str | None, hub: Hub) -> tuple[TensorSource, str | None, dict, dict | None]:
    """Returns the tensors of a checkpoint, its commit on the Hub, its config.json, and its generation settings if any."""
    merge, task = split_task(other)
    if task is not None:
        raise CheckpointError(
            f"'{other}' is a task of a merge. Load the merge with from_pretrained('{merge}') and call set_task('{task}'), or "
            "write the task as a plain checkpoint: hf-ext extract."
        )
    stored = Stored(other, None if is_local(other) else revision, hub)
    try:
        if not is_local(other):
            stored = replace(stored, revision=stored.folder.name)  # all files come from the commit of the first
        commit = stored.checkpoint.revision
    except BaseModelError as error:
        raise CheckpointError(str(error)) from error
    source, config = open_model(stored)
    source.require_intact()  # before the first weight changes
    generation = stored.file(GENERATION)
    return source, commit, config, read_config(generation) if generation else None


def _change(model: PreTrainedModel, source: TensorSource, text: dict, generation: dict | None) -> ConfigChange:
    """Returns the changes besides the weights, after checking that they are possible."""
    config = model.config.to_dict()
    kinds = config.get("model_type"), text.get("model_type")
    new = compat.config_of(type(model.config), text).to_dict() | {"dtype": config.get("dtype")}
    differs = ("model_type", *kinds) if kinds[0] != kinds[1] else difference(config, new)
    if differs:
        key, here, there = differs
        raise CheckpointError(
            f"{source} has {key} {there!r} in its config.json, the model {here!r}: one cannot become the other. Load the "
            "checkpoint with from_pretrained."
        )
    before = model.generation_config.to_dict() if model.can_generate() else None
    return change_between(model, (config, new), (before, generation))
