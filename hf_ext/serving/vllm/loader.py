"""Reads weights for vLLM, when a server starts and when it switches to another model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from hf_ext.serving.stored_models import StoredModel, read_tensors
from hf_ext.serving.vllm.models import changed, read_models
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.safetensors_file import torch_dtype
from hf_ext.storage.source import TensorSource

logger = init_logger(f"vllm.{__name__}")

LOAD_FORMAT = "hf_ext"

#: The cores of this process, before vLLM pins its threads. None where the system does not tell.
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


@dataclass
class _Loaded:
    """The weights that a module in memory holds."""

    models: dict[str, StoredModel]  # to switch to, by name, among them the one that vLLM was started with
    name: str = ""  # of the model whose weights they are
    source: TensorSource | None = None  # its tensors; None while a switch is under way, and after one that failed
    states: list[tuple[int, ...]] = field(default_factory=list)  # of its files when they were opened


_loaded: WeakKeyDictionary[torch.nn.Module, _Loaded] = WeakKeyDictionary()


class StoredModelLoader(DefaultModelLoader):
    """Loads checkpoints compressed by FM-Delta, and tasks of merges. It leaves other checkpoints to vLLM's default loader.

    `--model-loader-extra-config` takes, besides the keys of the default loader:

        models: models by name, to which a server can switch (see `read_models`).
        task: the task of a merge to start with, by default its first.
    """

    def __init__(self, load_config: LoadConfig):
        extra = dict(load_config.model_loader_extra_config)
        self.models = read_models(extra.pop("models", {}))
        self.task = extra.pop("task", None)
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of the model that `model_config` names: a key of `models`, a folder or a Hub id.

        If `model` holds another one already, only the layers that differ are decoded, unless the files of that one have changed
        since: what is in memory can no longer be compared. If decoding fails halfway, the other tensors get zeros before the
        error is raised, because vLLM cannot begin anew with a layer that is loaded in part. All of them must then be loaded
        again.
        """
        name, is_first = model_config.model, model not in _loaded
        first = {name: StoredModel(name, model_config.revision, self.task)}
        memory = _loaded.setdefault(model, _Loaded(self.models | first))
        source = memory.models.get(name, StoredModel(name)).open()
        states = _states(source)
        before, memory.source = memory.source, None
        if is_first and isinstance(source, Checkpoint):
            yield from super().get_all_weights(model_config, model)
        elif before is None or memory.name == name or memory.states != _states(before):
            yield from _read(source, source.names(), model)
        else:
            names = list(changed(before, source))
            logger.info(
                "Switching to %s: %d of its %d tensors are in layers that differ.", source, len(names), len(source.names())
            )
            yield from _read(source, names, model)
        memory.name, memory.source, memory.states = name, source, states


def _states(source: TensorSource) -> list[tuple[int, ...]]:
    """Returns inode, size and time of change of each file of a model, or () for a deleted one."""
    stats = [path.stat() if path.exists() else None for path in source.paths]
    return [(file.st_ino, file.st_size, file.st_mtime_ns) if file else () for file in stats]


def _read(source: TensorSource, names: list[str], model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    done = 0
    with _all_cores():
        tensors = read_tensors(source, names, {weight.device for weight in model.parameters()})
    try:
        for name, tensor in tensors:
            yield name, tensor
            done += 1
    except Exception:
        for name in names[done:]:
            entry = source.entry(name)
            yield name, torch.zeros(entry.shape, dtype=torch_dtype(entry.dtype))
        raise


@contextmanager
def _all_cores() -> Iterator[None]:
    """Lets threads that start in the block use all cores. On CPUs, vLLM pins its main thread to one, and they inherit that."""
    if CORES is None:
        yield
        return
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)
