"""Hot swap: replaces the weights of a model in memory, in place, by those of another fine-tune of its base."""

from __future__ import annotations

import os
from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger

from hf_ext.errors import BaseModelError, CheckpointError, HfExtError
from hf_ext.integration import compat
from hf_ext.integration.in_place import Move, configure, difference, move_between, replace, require_plain
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.config_file import CONFIG, ENCODINGS, read_config
from hf_ext.storage.delta.writer import METHOD
from hf_ext.storage.hub import Hub, is_local, reaching
from hf_ext.storage.open import OF_TASK, holds_several_models, open_checkpoint
from hf_ext.storage.prefetch import Prefetcher, progress
from hf_ext.storage.safetensors_file import Entry, safetensors_dtype
from hf_ext.storage.source import TensorSource

if TYPE_CHECKING:
    from hf_ext.integration.weight_plan import Loaded

logger = get_logger(__name__)

GENERATION = "generation_config.json"


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
    with _lock_of(model):
        return _switch(model, other, revision, Hub(token, cache_dir, local_files_only))


def _switch(model: PreTrainedModel, other: str | os.PathLike, revision: str | None, hub: Hub) -> PreTrainedModel:
    """Does what `switch` says, for the thread that has the model's lock."""
    weights = _writable(model)
    source, commit, text, settings = _open(other, revision, hub)
    move = _move(model, source, text, settings)
    plan = _plan(model, weights, source, move.shapes)
    sizes = {str(i): _size(source, loaded) for i, loaded in enumerate(plan)}
    written = Prefetcher(lambda i: _write(model, weights, source, plan[int(i)]), sizes)
    done = 0
    try:
        with progress("Switching", len(plan)) as bar:
            for _ in written:
                done += 1
                bar.update()
        for target, origin in _copies(model, weights, plan):
            with torch.inference_mode(False), torch.no_grad():
                replace(model, weights[target], model.state_dict(keep_vars=True)[origin])
    except BaseException as error:
        state = (
            f"The model is now a mix of both checkpoints: at least {done} of its {len(plan)} weights are those of {source}. "
            "Switch it again, to either checkpoint, before you use it."
        )
        if isinstance(error, HfExtError):
            raise type(error)(f"{error} {state}") from error
        error.add_note(state)
        raise
    configure(model, move)
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is type(model.config):
            module.name_or_path = module.config.name_or_path = os.fspath(other)
    model.config._commit_hash = commit
    return model


_locks: WeakKeyDictionary[torch.nn.Module, Lock] = WeakKeyDictionary()
_adding_lock = Lock()


def _lock_of(model: torch.nn.Module) -> Lock:
    """Returns the lock of a model, so that one thread at a time overwrites it."""
    with _adding_lock:
        return _locks.setdefault(model, Lock())


def _writable(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns a model's parameters and persistent buffers by name, after checking that they can be overwritten in place."""
    require_plain(model, "switch", "For a PeftModel, call unload().", "can be switched. Load the other model instead")
    if hasattr(model, "set_task"):
        raise CheckpointError("This model is a merge of several tasks. Switch between them with model.set_task(name).")
    if any(hasattr(module, "base_layer") or hasattr(module, "original_module") for module in model.modules()):
        raise CheckpointError(
            "This model has adapters inside, which were trained on its weights. Remove them first (unload() or "
            "merge_and_unload() of the PeftModel)."
        )
    weights = model.state_dict(keep_vars=True)
    for name, weight in weights.items():
        if weight.is_meta:
            raise CheckpointError(f"'{name}' is offloaded, so the model cannot be switched. Load it without offloading.")
        if type(weight) not in (torch.nn.Parameter, torch.Tensor) or compat.shards_by_zero3():
            raise CheckpointError(f"'{name}' is sharded or packed ({type(weight).__name__}). Load the other model instead.")
    return weights


def _open(other: str | os.PathLike, revision: str | None, hub: Hub) -> tuple[TensorSource, str | None, dict, dict | None]:
    """Returns the tensors of a checkpoint, its commit on the Hub, its configuration, and its generation settings if any."""
    name = os.fspath(other)
    if not os.path.exists(name) and holds_several_models(name):
        merge, _, task = name.partition(OF_TASK)
        raise CheckpointError(
            f"'{name}' is a task of a merge. Load the merge with from_pretrained('{merge}') and call set_task('{task}'), or "
            "write the task as a plain checkpoint: hf-ext extract."
        )
    try:
        if not is_local(name):
            with reaching(name, revision):  # all files come from the commit of this one
                revision = hub.download(name, CONFIG, revision).parent.name
        where = Checkpoint(name, revision, hub)
    except BaseModelError as error:
        raise CheckpointError(str(error)) from error
    folder = where.paths[0].parent
    if where.revision is not None:
        with reaching(name, revision):
            try:
                hub.download(name, GENERATION, revision)
            except EntryNotFoundError:
                pass
    text = read_config(folder / CONFIG)
    if not text:
        raise CheckpointError(f"{where} has no config.json; give the folder of a saved model.")
    stored = text.pop("quantization_config", None) or {}
    method = stored.get("quant_method", METHOD) if isinstance(stored, dict) else stored
    source = open_checkpoint(name, revision, hub)
    if method not in ENCODINGS:
        raise CheckpointError(f"{source} is quantized ({method}). Give a checkpoint of plain or compressed weights.")
    return source, where.revision, text, read_config(folder / GENERATION) or None


def _move(model: PreTrainedModel, source: TensorSource, text: dict, settings: dict | None) -> Move:
    """Returns the changes besides the weights, after checking that they are possible."""
    config = model.config.to_dict()
    kinds = config.get("model_type"), text.get("model_type")
    new = type(model.config).from_dict(dict(text)).to_dict() | {"dtype": config.get("dtype")}
    differs = ("model_type", *kinds) if kinds[0] != kinds[1] else difference(config, new)
    if differs:
        key, here, there = differs
        raise CheckpointError(
            f"{source} has {key} {there!r} in its config.json, the model {here!r}: one cannot become the other. Load the "
            "checkpoint with from_pretrained."
        )
    before = model.generation_config.to_dict() if model.can_generate() else None
    return move_between(model, (config, new), (before, settings))


def _plan(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], source: TensorSource, shapes: dict[str, torch.Size] | None
) -> list[Loaded]:
    """Returns the sources of the model's weights, after checking that each weight has tensors that make its shape."""
    with compat.host_internals("Switching to another checkpoint", "Load the checkpoint with from_pretrained."):
        from hf_ext.integration.weight_plan import plan_of

        plan, unused = plan_of(model, source.names())
        if unused:
            logger.warning(f"{type(model).__name__} has no place for these tensors of {source}: {', '.join(unused[:5])}.")
        loaded_of: dict[str, Loaded] = {}
        for loaded in plan:
            for target, shape in _shapes(model, source, loaded).items():
                expected = (weights if shapes is None else shapes)[target]
                expected = expected if isinstance(expected, torch.Size) else expected.shape
                if shape != expected:
                    raise CheckpointError(
                        f"{source} has '{target}' of shape {list(shape)}, this model {list(expected)}: one cannot become the "
                        "other. Load the checkpoint with from_pretrained."
                    )
                loaded_of[target] = loaded
        _require_all(model, weights, source, loaded_of)
    return plan


def _require_all(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], source: TensorSource, loaded_of: dict[str, Loaded]
) -> None:
    """Raises CheckpointError unless the source has a tensor for each weight, and equal tensors for the names of one weight."""
    ties = model.all_tied_weights_keys.items()
    covered = loaded_of.keys() | {name for tie in ties if loaded_of.keys() & set(tie) for name in tie}
    names_of: dict[Any, list[str]] = {}
    for name, weight in weights.items():
        names_of.setdefault((weight.data_ptr(), weight.shape) if weight.numel() else name, []).append(name)
    for names in names_of.values():
        if not covered & set(names):
            raise CheckpointError(
                f"{source} has no tensor for '{names[0]}' of this {type(model).__name__}: it is a checkpoint of another class, "
                "or incomplete."
            )
        stored = [name for name in names if name in loaded_of]
        for name in stored[1:]:
            first, second = (source.read(loaded_of[key].all_names()[0]).data for key in (stored[0], name))
            if not np.array_equal(first, second):
                raise CheckpointError(
                    f"{source} has two different tensors '{stored[0]}' and '{name}', which are one weight in this model. "
                    "Load the checkpoint with from_pretrained."
                )


def _shapes(model: PreTrainedModel, source: TensorSource, loaded: Loaded) -> dict[str, tuple[int, ...]]:
    if loaded.converter is None:
        return {loaded.target: tuple(source.entry(loaded.all_names()[0]).shape)}
    weights = loaded.convert(model, lambda name: torch.empty(source.entry(name).shape, device="meta"))
    return {target: tuple(tensor.shape) for target, tensor in weights.items()}


def _size(source: TensorSource, loaded: Loaded) -> int:
    return sum(entry.nbytes for name in loaded.all_names() for entry in [source.entry(name)])


def _write(model: PreTrainedModel, weights: dict[str, torch.Tensor], source: TensorSource, loaded: Loaded) -> None:
    """Decodes the tensors of a weight, or of several, and overwrites the weights: if possible, it decodes into their memory."""
    names = loaded.all_names()
    memory = None if loaded.converter else _memory(weights[loaded.target], source.entry(names[0]))
    with torch.inference_mode(False), torch.no_grad():
        if memory is not None and source.read(names[0], memory).data is memory:
            torch.autograd.graph.increment_version(weights[loaded.target])
            return
        for target, tensor in loaded.convert(model, lambda name: source.read(name).to_torch()).items():
            replace(model, weights[target], tensor)
    for name in names:
        source.release(name)


def _memory(weight: torch.Tensor, entry: Entry) -> np.ndarray | None:
    """Returns the bytes of a weight if a tensor can be decoded into them; None otherwise."""
    same = safetensors_dtype(weight.dtype) == entry.dtype and tuple(weight.shape) == tuple(entry.shape)
    if not same or weight.device.type != "cpu" or not weight.is_contiguous() or weight.is_inference():
        return None
    return weight.detach().reshape(-1).view(torch.uint8).numpy()


def _copies(model: PreTrainedModel, weights: dict[str, torch.Tensor], plan: list[Loaded]) -> Iterator[tuple[str, str]]:
    """Yields weights that have no tensors of their own, each with the written weight that it must equal.

    The model ties these two, but they are not one in memory: parts of a model on several devices, for instance.
    """
    written = {loaded.target for loaded in plan}
    ties = list(model.all_tied_weights_keys.items())
    for target, origin in [*((origin, target) for target, origin in ties), *ties]:
        if target not in written and origin in written:
            written.add(target)
            if weights[target] is not weights[origin]:
                yield target, origin
