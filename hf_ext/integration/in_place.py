"""Replaces the weights of a model in memory, in place: what `fm_delta.switch` and a merge's `set_task` have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.integration import compat
from hf_ext.integration.config_change import plain
from hf_ext.storage.config_file import forget_encoding
from hf_ext.storage.delta.device_decode import ahead, decoding_device
from hf_ext.storage.prefetch import progress
from hf_ext.storage.safetensors_file import Entry, safetensors_dtype
from hf_ext.storage.source import TensorSource

if TYPE_CHECKING:
    from hf_ext.integration.loading.weight_plan import Loaded

_locks: WeakKeyDictionary[torch.nn.Module, RLock] = WeakKeyDictionary()
_adding_lock = Lock()


def lock_of(model: torch.nn.Module) -> RLock:
    """Returns the lock of a model: one thread at a time replaces its weights."""
    with _adding_lock:
        return _locks.setdefault(model, RLock())


def require_model(model: object, function: str, advice: str) -> PreTrainedModel:
    """Returns the model. Raises CheckpointError, naming the function, unless it is one of Transformers. `advice` is for a model
    that holds a PreTrainedModel."""
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(f"{function} takes a Transformers PreTrainedModel, not a {type(model).__name__}. {advice}")
    forget_encoding(model.config)  # of a model that was made from the config.json of a compressed checkpoint
    return model


def require_plain(model: object, function: str, advice: str, purpose: str) -> None:
    """Raises CheckpointError, naming the function, unless this is a Transformers model with plain weights. `advice` is for a
    model that holds a PreTrainedModel; `purpose` completes "only plain weights"."""
    config = require_model(model, function, advice).config
    if getattr(model, "hf_quantizer", None) is not None or getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(f"This model is quantized; only plain weights {purpose}.")


class LiveWeights:
    """The weights of a model in memory, to be replaced. Each keeps its dtype and its device, and its memory unless its shape
    changes.

    Args:
        model: a model, with or without adapters on top.
        plan: the tensors of a checkpoint that each of its weights is made from.

    Attributes:
        tensors: parameters and persistent buffers, by the names that they have without adapters.
        device: where new values are decoded.
    """

    def __init__(self, model: PreTrainedModel, plan: list[Loaded]):
        self.model, self.plan = model, plan
        state = model.state_dict(keep_vars=True)
        self.tensors = {plain(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        self.device = decoding_device(tensor.device for tensor in self.tensors.values())

    def require_in_memory(self) -> None:
        """Raises CheckpointError if a weight is offloaded, packed, or only in part on this device."""
        is_sharded = compat.shards_by_zero3()
        for name, weight in self.tensors.items():
            if weight.is_meta:
                raise CheckpointError(f"'{name}' is offloaded, so it cannot be replaced. Load the model without offloading.")
            if is_sharded or type(weight) not in (torch.nn.Parameter, torch.Tensor):
                raise CheckpointError(f"'{name}' is sharded or packed ({type(weight).__name__}). Load the other model instead.")

    def require_all(self, source: TensorSource, shapes: Mapping[str, Sequence[int]] | None) -> None:
        """Checks that a source has tensors for each weight, of the right shape, and equal ones for the names of one weight.
        Raises CheckpointError, which names the first weight for which that is not so. `shapes` are those that the weights are
        to have, if not those that they have."""
        advice = "Load the checkpoint with from_pretrained."
        shapes = shapes or {name: weight.shape for name, weight in self.tensors.items()}
        loaded_of: dict[str, Loaded] = {}
        for loaded in self.plan:
            for name, shape in loaded.shapes(self.model, source).items():
                if shape != tuple(shapes[name]):
                    raise CheckpointError(
                        f"{source} has '{name}' of shape {list(shape)}, this model {list(shapes[name])}: one cannot become the "
                        f"other. {advice}"
                    )
                loaded_of[name] = loaded
        names_of: dict[Any, list[str]] = {}
        for name, weight in self.tensors.items():
            names_of.setdefault((weight.data_ptr(), weight.shape) if weight.numel() else name, []).append(name)
        stored = self.weights_in(source)
        for names in names_of.values():
            if not stored & {*names} and not compat.unsaved(self.model) & {*names}:
                raise CheckpointError(
                    f"{source} has no tensor for '{names[0]}' of this {type(self.model).__name__}: it is a checkpoint of "
                    "another class, or incomplete."
                )
            first, *aliases = [name for name in names if name in loaded_of] or names[:1]
            for name in aliases:
                one, other = (source.read(loaded_of[key].all_names()[0]).data for key in (first, name))
                if not np.array_equal(one, other):
                    raise CheckpointError(
                        f"{source} has two different tensors '{first}' and '{name}', which are one weight in this model. "
                        f"{advice}"
                    )

    def weights_in(self, source: TensorSource) -> set[str]:
        """Returns the weights that a source has tensors for, and those that are tied to them."""
        plan = [loaded for loaded in self.plan if loaded.is_in(source)]
        stored = {target for loaded in plan for target in loaded.shapes(self.model, source)}
        return stored | {name for tie in self.model.all_tied_weights_keys.items() if stored & {*tie} for name in tie}

    def memory(self, loaded: Loaded, entry: Entry) -> np.ndarray | None:
        """Returns the bytes of a weight if they can be overwritten by those of a tensor; None otherwise."""
        weight = self.tensors.get(loaded.target)
        if weight is None or loaded.converter is not None or tuple(weight.shape) != tuple(entry.shape):
            return None
        if weight.device.type != "cpu" or not weight.is_contiguous() or weight.is_inference():
            return None
        if safetensors_dtype(weight.dtype) != entry.dtype:
            return None
        return weight.detach().reshape(-1).view(torch.uint8).numpy()

    def tensors_of(self, plan: Sequence[Loaded], source: TensorSource) -> dict[str, torch.Tensor]:
        """Returns the weights that a source's tensors give, decoded on their device if that is turned on."""
        names = [name for loaded in plan for name in loaded.all_names()]
        tensors = dict(zip(names, source.read_on(names, self.device)))
        return {key: value for loaded in plan for key, value in loaded.convert(self.model, tensors.__getitem__).items()}

    def changed(self, plan: Sequence[Loaded], source: TensorSource, types: Mapping[str, torch.dtype]) -> str | None:
        """Returns a weight that differs in any bit from what a source's tensors give, rounded to these types first; None if
        there is none."""
        for name, tensor in self.tensors_of(plan, source).items():
            if name not in self.tensors or not is_same(self.tensors[name], tensor.to(types.get(name, tensor.dtype))):
                return name
        return None

    def overwrite(self, source: TensorSource) -> None:
        """Replaces all weights by the tensors of a source, which are decoded into the weights' memory where possible. Raises
        HfExtError if a tensor cannot be read. The error says that the model is now a mix."""
        sizes = {str(i): sum(source.entry(name).nbytes for name in loaded.all_names()) for i, loaded in enumerate(self.plan)}
        written, done = ahead(lambda batch: self.write([self.plan[int(i)] for i in batch], source), sizes, self.device), 0
        try:
            with progress("Switching", len(sizes)) as bar:
                for _ in written:
                    done += 1
                    bar.update()
            self.copy()
        except BaseException as error:
            state = (
                f"The model is now a mix of both checkpoints: at least {done} of its {len(sizes)} weights are those of "
                f"{source}. Switch it again, to either checkpoint, before you use it."
            )
            if isinstance(error, HfExtError):
                raise type(error)(f"{error} {state}") from error
            error.add_note(state)
            raise

    def write(self, plan: Sequence[Loaded], source: TensorSource) -> list[None]:
        """Replaces the weights made from some tensors by those of a source."""
        places = [(loaded, self.memory(loaded, source.entry(loaded.all_names()[0]))) for loaded in plan]
        with torch.inference_mode(False):
            self.set(self.tensors_of([loaded for loaded, memory in places if memory is None], source))
            for loaded, memory in places:
                if memory is not None:
                    data = source.read(loaded.all_names()[0], memory).data
                    if data is not memory:  # it is mapped from a file, for instance
                        memory[:] = data
                    torch.autograd.graph.increment_version(self.tensors[loaded.target])
        for loaded in plan:
            for name in loaded.all_names():
                source.release(name)
        return [None] * len(plan)

    @torch.inference_mode(False)
    @torch.no_grad()
    def set(self, tensors: dict[str, torch.Tensor]) -> None:
        """Sets weights to these tensors, in the dtype and on the device that they have."""
        for name in tensors.keys() & self.tensors.keys():
            weight = self.tensors[name]
            tensor = tensors[name].to(dtype=weight.dtype, device=weight.device)
            if weight.shape == tensor.shape and not weight.is_inference():
                weight.copy_(tensor)
                continue
            new = torch.nn.Parameter(tensor, weight.requires_grad) if isinstance(weight, torch.nn.Parameter) else tensor
            for module in self.model.modules():  # several modules may be tied to it
                for key, value in tensors_of(module):
                    if value is weight:
                        setattr(module, key, new)
            self.tensors |= {other: new for other, value in self.tensors.items() if value is weight}

    def copies(self) -> dict[str, str]:
        """Returns the weights that have no tensors of their own, each with the one that it is to equal. The model ties these
        two, but they are not one in memory: parts of a model on several devices, for instance."""
        complete = {loaded.target for loaded in self.plan}
        ties, copies = [*self.model.all_tied_weights_keys.items()], {}
        for name, origin in [*((origin, name) for name, origin in ties), *ties]:
            if name in self.tensors and name not in complete and origin in complete:
                complete.add(name)
                if self.tensors[name] is not self.tensors[origin]:
                    copies[name] = origin
        return copies

    def copy(self) -> None:
        """Sets the weights that are copies of others."""
        for name, origin in self.copies().items():
            self.set({name: self.tensors[origin]})


def untie(model: PreTrainedModel, plan: Sequence[Loaded]) -> None:
    """Unties the weights that a checkpoint holds apart. Transformers has tied them if their tensors were equal."""
    targets = {loaded.target for loaded in plan}
    for name, origin in [*model.all_tied_weights_keys.items()]:
        weight = model.get_parameter_or_buffer(name)
        if {name, origin} <= targets and not weight.is_meta:
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, torch.nn.Parameter(weight.detach().clone(), weight.requires_grad))
            del model.all_tied_weights_keys[name]


def tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns a module's parameters and buffers by name, without those of its submodules."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def is_same(weight: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Checks whether a weight equals a tensor bit for bit, after the tensor is moved to the weight's type and device."""
    tensor = tensor.to(dtype=weight.dtype, device=weight.device)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return weight.shape == tensor.shape and torch.equal(weight.detach().contiguous().view(bits), tensor.contiguous().view(bits))
