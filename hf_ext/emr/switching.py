"""Switching the task of a loaded merge, in place. The model has the weights of one task at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
import xxhash
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import get_logger

from hf_ext.emr import election
from hf_ext.emr.folder import MergeFolder, name_of_task
from hf_ext.errors import CheckpointError, UnsavedChangesError
from hf_ext.integration import compat
from hf_ext.integration.in_place import Move, configure, move_between, plain, replace
from hf_ext.integration.serving import bad_request
from hf_ext.storage.native import FLOATS
from hf_ext.storage.prefetch import Prefetcher
from hf_ext.storage.safetensors_file import RawTensor, safetensors_dtype

if TYPE_CHECKING:
    from hf_ext.integration.weight_plan import Loaded

logger = get_logger(__name__)

SET_BY_RUNNING = ("architectures", "dtype", "problem_type", "transformers_version", "use_cache")


@contextlib.contextmanager
def task(model: PreTrainedModel, name: str) -> Iterator[PreTrainedModel]:
    """Switches a loaded merge to the task `name` for a `with` block, then back.

    Only one block runs at a time: other threads wait, as the tasks share the memory of the weights.
    """
    with model.set_task.lock:
        before = model.active_task
        model.set_task(name)
        try:
            yield model
        except BaseException:
            with contextlib.suppress(UnsavedChangesError):  # the error of the block matters more
                model.set_task(before)
            raise
        model.set_task(before)


class Generate:
    """`model.generate(…, task=name)`: generates with a task's model, then switches back.

    The `generation_config` may also have a `task`; servers fill it in from a request. Only one call runs at a time, as the
    tasks share the memory of the weights. If the model's own `generate` has a parameter `task` (Whisper's has), use `set_task`.

    Args:
        task: one of `model.tasks`; defaults to the active task.

    Raises:
        CheckpointError, UnsavedChangesError: as `set_task`.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generate, name = type(self.model).generate, None
        if "task" not in signature(generate).parameters:
            configs = [value for value in (*args, *kwargs.values()) if isinstance(value, GenerationConfig)]
            name = kwargs.pop("task", None) or next((getattr(config, "task", None) for config in configs), None)
        if name:
            try:
                self.model.set_task.merged.require_task(name)
            except CheckpointError as error:
                raise bad_request(error) from None
        with task(self.model, name or self.model.active_task):
            return generate(self.model, *args, **kwargs)


class SetTask:
    """`model.set_task(name)`: switches the model to another task, in place.

    It overwrites the weights in memory, replaces parameters of another shape (heads, resized embeddings), and updates the
    configuration. The first switch decodes the elected weights and keeps them; later switches take about as long as copying the
    weights. If the weights differ from those of the active task, it raises and changes nothing.

    Args:
        name: one of `model.tasks`.
        discard_changes: overwrite weights that were changed since the last switch.

    Raises:
        BaseModelError: the base's file was overwritten since the merge was loaded.
        CorruptFileError: a file of the merge or of its base was cut off since then, or is damaged.
        CheckpointError: there is no such task, or the model's weights are offloaded.
        UnsavedChangesError: weights were changed, by training for instance.
    """

    def __init__(self, model: PreTrainedModel, merged: MergeFolder, plan: list[Loaded]):
        self.model, self.merged, self.plan = model, merged, plan
        self._elected: dict[str, RawTensor] = {}
        self._prior: dict[str, np.ndarray] = {}  # views of the base's file, if it is plain and of the elected type
        self._modulators: dict[str, dict[str, tuple[np.ndarray | None, float]]] = {}
        self._moves: dict[tuple[str, str], Move] = {}
        self._memory: dict[str, tuple[int, np.ndarray]] = {}  # of a parameter: its address and the bytes there
        self._targets: dict[str, set[str]] = {}
        self._warned: set[str] = set()
        self.lock = threading.RLock()
        live = self._live()
        self._known = set(live)
        self._kept = self._checksums(live)

    def __getstate__(self) -> dict[str, Any]:
        # Pickles and copies read these again.
        return self.__dict__ | {"lock": None, "_elected": {}, "_prior": {}, "_modulators": {}, "_moves": {}, "_memory": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"lock": threading.RLock()}

    def __call__(self, name: str, discard_changes: bool = False) -> None:
        self.merged.require_task(name)
        if name == self.model.active_task and not discard_changes:
            return
        if not self.plan:
            raise CheckpointError(
                f"Transformers {transformers.__version__} has changed what switching tasks relies on. Write the task as a "
                "plain checkpoint: hf-ext extract. Or install a newer hf_ext, or an older Transformers."
            )
        advice = "Write the task as a plain checkpoint: hf-ext extract."
        with self.lock, torch.inference_mode(False), torch.no_grad(), compat.host_internals("Switching tasks", advice):
            move = self._move(self.model.active_task, name)
            self._rewrite(name, discard_changes)
            configure(self.model, move)
            # PEFT records this as an adapter's base, so that nothing loads the adapter onto another task.
            self.model.name_or_path = name_of_task(self.model.name_or_path, name, self.model.tasks)
            self.model.active_task = name
            self._kept = self._checksums(self._live())

    def changed(self) -> str | None:
        """Returns the name of a parameter that was changed since the active task became active; None if there is none."""
        try:
            with self.lock, torch.inference_mode(False), torch.no_grad():
                self._rewrite(self.model.active_task, False)
        except UnsavedChangesError as error:
            return error.parameter
        live = self._live()
        added = live.keys() - self._known
        kept = self._checksums(live)
        return next((name for name in (*sorted(added), *kept) if name in added or kept[name] != self._kept.get(name)), None)

    def edited(self) -> list[str]:
        """Returns the settings of the configuration that a user changed since the active task became active."""
        text = self.merged.task_config(self.model.active_task)
        stored = type(self.model.config).from_dict(deepcopy(text))
        keys = [key for key in text if key not in SET_BY_RUNNING]
        return [key for key in keys if getattr(self.model.config, key, None) != getattr(stored, key, None)]

    def _checksums(self, live: dict[str, torch.Tensor]) -> dict[str, str]:
        """Returns checksums of the parameters that the active task has no tensors for, such as a new head."""
        names = self._known & live.keys() - self._covered(self.model.active_task)
        return {name: _checksum(live[name]) for name in sorted(names) if not live[name].is_meta}

    def _covered(self, task: str) -> set[str]:
        """Returns the parameters that are made from a task's tensors, and those that are tied to them."""
        if task not in self._targets:
            file, covered = self.merged.files[task], set()
            for loaded in self.plan:
                if all(name in file for name in loaded.all_names()):
                    covered |= loaded.targets(self.model, lambda name: self.merged.entry(task, name))
            tied = self.model.all_tied_weights_keys
            self._targets[task] = covered | {target for target, source in tied.items() if source in covered}
        return self._targets[task]

    def _rewrite(self, name: str, discard: bool) -> None:
        """Changes all weights or none: makes and checks the new parameters first, then overwrites the others at once."""
        active, live = self.model.active_task, self._live()
        self.merged.require_whole()
        self._prepare(active, name)
        in_place: dict[str, election.Target] = {}
        new: dict[str, torch.Tensor] = {}
        for loaded in self.plan:
            weight = live.get(loaded.target)
            if weight is not None and weight.is_meta:
                raise CheckpointError(
                    f"'{loaded.target}' is offloaded, so the model cannot switch tasks. Load it without offloading, or write "
                    "the task as a plain checkpoint: hf-ext extract."
                )
            if weight is not None and self._is_in_place(loaded, weight, active, name):
                in_place[loaded.target] = self._target(loaded, weight, active, name)
                continue
            old = {} if discard else self._tensors(active, loaded)
            for target, tensor in old.items():
                if target not in live or not _same(live[target], tensor):
                    raise UnsavedChangesError(active, target)
            if not old and not discard and weight is not None and self._kept.get(loaded.target) != _checksum(weight):
                raise UnsavedChangesError(active, loaded.target)
            if name != active or discard:
                new |= self._tensors(name, loaded)
        self._memory = {target: self._memory[target] for target in in_place}
        threads = torch.get_num_threads()
        if discard:  # else the weights in memory are compared with what the base gives, before they change
            self._require_same_base()
            for overwritten in in_place.values():
                election.overwrite(overwritten, threads)
        elif (place := election.retarget(list(in_place.values()), threads)) is not None:
            raise UnsavedChangesError(active, list(in_place)[place])
        torch.autograd.graph.increment_version([live[target] for target in in_place])
        for target, tensor in new.items():
            if target in live:
                replace(self.model, live[target], tensor)

    def _require_same_base(self) -> None:
        """Raises BaseModelError if the base's file no longer holds what was merged against."""
        for name, data in self._prior.items():
            self.merged.require_prior(name, data)

    def _live(self) -> dict[str, torch.Tensor]:
        """Returns parameters and persistent buffers by the names they had when the model was loaded."""
        return {
            f"{plain(path)}.{key}".removeprefix("."): tensor
            for path, module in self.model.named_modules()
            for key, tensor in compat.own_tensors(module)
            if key not in compat.unsaved_buffers(module)
        }

    def _prepare(self, *tasks: str) -> None:
        """Reads the tensors and masks that switching needs, once."""
        elected = self.merged.elected
        if not self._elected:
            modulated = {name for file in self.merged.files.values() for name in file.record.modulated}
            sizes = {name: elected.entry(name).nbytes for name in sorted(modulated)}
            self._elected = dict(Prefetcher(elected.read, sizes))
            self._prior = {name: self.merged.prior(name) for name in sizes}
        for task in tasks:
            if task not in self._modulators:
                names = self.merged.files[task].record.modulated
                read = partial(self.merged.modulator, task)
                self._modulators[task] = dict(Prefetcher(read, {name: self._prior[name].size // 8 for name in names}))

    def _is_in_place(self, loaded: Loaded, weight: torch.Tensor, *tasks: str) -> bool:
        """Checks whether a parameter can change from one task to another in its own memory."""
        names = loaded.all_names()
        if loaded.converter or len(names) != 1 or weight.device.type != "cpu" or not weight.is_contiguous():
            return False
        records = [self.merged.files[task].record.modulated.get(names[0]) for task in tasks]
        if any(record is None or record.rows is not None for record in records):
            return False
        elected = self._elected[names[0]]
        return weight.shape == elected.shape and safetensors_dtype(weight.dtype) == elected.dtype

    def _target(self, loaded: Loaded, weight: torch.Tensor, active: str, name: str) -> election.Target:
        (source,) = loaded.all_names()
        address, memory = self._memory.get(loaded.target, (0, None))
        if memory is None or address != weight.data_ptr():
            memory = weight.detach().reshape(-1).view(torch.uint8).numpy()
            self._memory[loaded.target] = weight.data_ptr(), memory
        elected, old, new = self._elected[source], self._modulators[active][source], self._modulators[name][source]
        return election.Target(FLOATS[elected.dtype], self._prior[source], elected.data, *old, *new, memory)

    def _tensors(self, task: str, loaded: Loaded) -> dict[str, torch.Tensor]:
        """Returns the parameters of `loaded` for a task; an empty dict if the task has no such tensors."""
        missing = [name for name in loaded.all_names() if name not in self.merged.files[task]]
        if missing:
            if loaded.target not in self._warned:
                self._warned.add(loaded.target)
                logger.warning(f"Task '{task}' has no tensor '{missing[0]}': '{loaded.target}' keeps the values it has.")
            return {}

        def tensor(name: str) -> torch.Tensor:
            return self.merged.tensor(task, name, self._elected.get(name), self._prior.get(name)).to_torch()

        return loaded.convert(self.model, tensor)

    def _move(self, old: str, new: str) -> Move:
        """Returns the changes from one task to another besides the weights."""
        if (old, new) not in self._moves:
            configs, settings = ((read(old), read(new)) for read in (self.merged.task_config, self.merged.generation_config))
            self._moves[old, new] = move_between(self.model, configs, settings)
        return self._moves[old, new]


def _checksum(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _same(weight: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Checks whether a weight equals a tensor bit for bit, after the tensor is moved to the weight's type and device."""
    tensor = tensor.to(dtype=weight.dtype, device=weight.device)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return weight.shape == tensor.shape and torch.equal(weight.detach().contiguous().view(bits), tensor.contiguous().view(bits))
