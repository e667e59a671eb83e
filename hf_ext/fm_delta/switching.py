"""Hot swap: a model in memory becomes another fine-tune of its base, in place, and only what is compressed need be fetched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils.logging import get_logger

from hf_ext.errors import BaseModelError, CheckpointError, HfExtError
from hf_ext.integration.in_place import Move, configure, difference, move_between, replace
from hf_ext.integration.weight_plan import Loaded, plan_of
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.folder import METHOD
from hf_ext.storage.hub import Hub, is_local, reaching
from hf_ext.storage.layout import CONFIG, read_config
from hf_ext.storage.open import open_checkpoint
from hf_ext.storage.prefetch import Prefetcher, progress
from hf_ext.storage.safetensors_file import Entry, RawTensor, safetensors_dtype
from hf_ext.storage.source import TensorSource

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
    """Makes a loaded model another fine-tune of its base, in place.

    Weights are overwritten where they lie, each in the type and on the device that it has; those of another shape (heads,
    resized embeddings) are replaced, and labels, configuration and generation settings follow. Beside the model, a few tensors
    at a time are in memory; of the Hub only the compressed checkpoint is asked for, if the base was downloaded before. What the
    weights were, trained or not, is lost, and so are their gradients.

    Whatever can be checked is checked before the first weight changes: that all files are there and whole, that the base is the
    recorded one, that each tensor has its place and shape. Only a base that has changed where its fingerprint does not
    look, or a lack of memory, is found later; the error then says that the model is neither the one nor the other.

    Args:
        model: of the same class and structure as `other`, loaded in any way; labels and vocabulary may differ.
        other: folder or Hub id of a checkpoint compressed by FM-Delta, or of a plain one (the base itself, for instance).
        revision: of it on the Hub.
        token, cache_dir, local_files_only: as in `from_pretrained`, for the base too.

    Returns:
        The same model.

    Raises:
        CheckpointError: there is no such checkpoint, it is of another model, or the model cannot be written in place: it is
            quantized, offloaded or sharded, has adapters inside, or is a merge of several tasks.
        BaseModelError: the base of `other` is missing or is not the one it was written against.
        CorruptFileError: `other` is damaged.
    """
    weights = _writable(model)
    source, commit, text, settings = _open(other, revision, Hub(token, cache_dir, local_files_only))
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
            f"The model is neither the one nor the other: of {len(plan)} weights {done} or a few more are those of {source} "
            "already. Switch it once more, or back, before it is used."
        )
        if isinstance(error, HfExtError):
            raise type(error)(f"{error} {state}") from error
        error.add_note(state)
        raise
    configure(model, move)
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is type(model.config):
            module.name_or_path = module.config._name_or_path = os.fspath(other)
    model.config._commit_hash = commit
    return model


def _writable(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The parameters of a model and its buffers that are saved, by name; all can be written in place."""
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"switch takes a Transformers PreTrainedModel, not a {type(model).__name__}. Of a PeftModel, unload() the adapters."
        )
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None) is not None:
        raise CheckpointError("This model is quantized; only plain weights can be switched. Load the other model instead.")
    if hasattr(model, "set_task"):
        raise CheckpointError("This model is a merge of several tasks: switch between them by model.set_task(name).")
    if any(hasattr(module, "base_layer") or hasattr(module, "original_module") for module in model.modules()):
        raise CheckpointError(
            "This model has adapters inside, which were trained on the weights it has: take them out first (unload() or "
            "merge_and_unload() of the PeftModel)."
        )
    weights = model.state_dict(keep_vars=True)
    for name, weight in weights.items():
        if weight.is_meta:
            raise CheckpointError(f"'{name}' is offloaded, so the model cannot be switched. Load it without offloading.")
        if type(weight) not in (torch.nn.Parameter, torch.Tensor) or is_deepspeed_zero3_enabled():
            raise CheckpointError(f"'{name}' is sharded or packed ({type(weight).__name__}): load the other model instead.")
    return weights


def _open(other: str | os.PathLike, revision: str | None, hub: Hub) -> tuple[TensorSource, str | None, dict, dict | None]:
    """The tensors of a checkpoint, its commit on the Hub, its configuration, and its generation settings, if it has any."""
    name = os.fspath(other)
    try:
        if not is_local(name):
            with reaching(name, revision):  # the commit that the configuration comes from is that of all that follows
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
    method = (text.pop("quantization_config", None) or {}).get("quant_method", METHOD)
    source = open_checkpoint(name, revision, hub)
    if method != METHOD:
        raise CheckpointError(f"{source} is quantized ({method}); only plain weights can be switched to.")
    return source, where.revision, text, read_config(folder / GENERATION) or None


def _move(model: PreTrainedModel, source: TensorSource, text: dict, settings: dict | None) -> Move:
    """What changes beside the weights, after making sure that it can."""
    own = model.config.to_dict()
    kinds = own.get("model_type"), text.get("model_type")
    found = type(model.config).from_dict(dict(text)).to_dict() | {"dtype": own.get("dtype")}
    differs = ("model_type", *kinds) if kinds[0] != kinds[1] else difference(own, found)
    if differs:
        key, here, there = differs
        raise CheckpointError(
            f"{source} has {key} {there!r} in its config.json, the model {here!r}: one cannot become the other. Load it with "
            "from_pretrained."
        )
    before = model.generation_config.to_dict() if model.can_generate() else None
    return move_between(model, (own, found), (before, settings))


def _plan(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], source: TensorSource, shapes: dict[str, torch.Size] | None
) -> list[Loaded]:
    """What the model's weights will be made of, after making sure that each has its tensors, of its shape."""
    plan, others = plan_of(model, source.names())
    if others:
        logger.warning(f"{source} has tensors that {type(model).__name__} has not, left aside: {', '.join(others[:5])}.")
    found: dict[str, Loaded] = {}
    for loaded in plan:
        for target, shape in _shapes(model, source, loaded).items():
            expected = (weights if shapes is None else shapes)[target]
            expected = expected if isinstance(expected, torch.Size) else expected.shape
            if shape != expected:
                raise CheckpointError(
                    f"{source} has '{target}' of shape {list(shape)}, this model {list(expected)}: one cannot become the other."
                )
            found[target] = loaded
    _require_all(model, weights, source, found)
    return plan


def _require_all(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], source: TensorSource, found: dict[str, Loaded]
) -> None:
    """Raises CheckpointError unless there is something for each weight, and the same for names of one."""
    covered = found.keys() | {one for pair in model.all_tied_weights_keys.items() for one in pair if found.keys() & set(pair)}
    names_of: dict[Any, list[str]] = {}
    for name, weight in weights.items():
        names_of.setdefault((weight.data_ptr(), weight.shape) if weight.numel() else name, []).append(name)
    for names in names_of.values():
        if not covered & set(names):
            raise CheckpointError(
                f"{source} has no tensor for '{names[0]}' of this {type(model).__name__}: it is a checkpoint of another class, "
                "or not a whole one."
            )
        given = [name for name in names if name in found]
        for name in given[1:]:
            first, second = (source.read(found[each].all_names()[0]).data for each in (given[0], name))
            if not np.array_equal(first, second):
                raise CheckpointError(
                    f"{source} has '{given[0]}' and '{name}' as two tensors, which are one in this model: load it with "
                    "from_pretrained."
                )


def _shapes(model: PreTrainedModel, source: TensorSource, loaded: Loaded) -> dict[str, tuple[int, ...]]:
    if loaded.converter is None:
        return {loaded.target: tuple(source.entry(loaded.all_names()[0]).shape)}
    made = loaded.convert(model, lambda name: torch.empty(source.entry(name).shape, device="meta"))
    return {target: tuple(tensor.shape) for target, tensor in made.items()}


def _size(source: TensorSource, loaded: Loaded) -> int:
    return sum(entry.nbytes for name in loaded.all_names() for entry in [source.entry(name)])


def _write(model: PreTrainedModel, weights: dict[str, torch.Tensor], source: TensorSource, loaded: Loaded) -> None:
    """Decodes what belongs to one weight (or several) and puts it where it belongs; at once there, if it can be."""
    names = loaded.all_names()
    memory = None if loaded.converter else _memory(weights[loaded.target], source.entry(names[0]))
    with torch.inference_mode(False), torch.no_grad():
        if memory is not None and source.read(names[0], memory).data is memory:
            torch.autograd.graph.increment_version(weights[loaded.target])
            return
        for target, tensor in loaded.convert(model, partial(_tensor, source)).items():
            replace(model, weights[target], tensor)
    for name in names:
        source.release(name)


def _memory(weight: torch.Tensor, entry: Entry) -> np.ndarray | None:
    """The bytes of a weight, if they are to be those of a tensor as it is."""
    same = safetensors_dtype(weight.dtype) == entry.dtype and tuple(weight.shape) == tuple(entry.shape)
    if not same or weight.device.type != "cpu" or not weight.is_contiguous() or weight.is_inference():
        return None
    return weight.detach().reshape(-1).view(torch.uint8).numpy()


def _tensor(source: TensorSource, name: str) -> torch.Tensor:
    raw = source.read(name)
    if not raw.data.flags.writeable:  # a view of a plain file, which torch warns of
        raw = RawTensor(raw.dtype, raw.shape, raw.data.copy())
    return raw.to_torch()


def _copies(model: PreTrainedModel, weights: dict[str, torch.Tensor], plan: list[Loaded]) -> Iterator[tuple[str, str]]:
    """Weights that have no tensors of their own, and the written ones that they are by the model's ties but not in memory
    (parts of it on several devices, for instance)."""
    written = {loaded.target for loaded in plan}
    ties = list(model.all_tied_weights_keys.items())
    for target, origin in [*((origin, target) for target, origin in ties), *ties]:
        if target not in written and origin in written:
            written.add(target)
            if weights[target] is not weights[origin]:
                yield target, origin
