"""Switching between the tasks of a loaded merge, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
import xxhash
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger

from hf_ext.emr import election
from hf_ext.emr.folder import MergeFolder
from hf_ext.emr.layout import name_of_task
from hf_ext.emr.modulators import CODE
from hf_ext.errors import CheckpointError, UnsavedChangesError
from hf_ext.integration import compat
from hf_ext.integration.config_change import LABELS, ConfigChange, change_between
from hf_ext.integration.in_place import LiveWeights, is_same, lock_of
from hf_ext.storage.delta.device_decode import batch_size
from hf_ext.storage.prefetch import BatchPrefetcher, batches_of
from hf_ext.storage.source import TensorSource

if TYPE_CHECKING:
    from hf_ext.integration.loading.weight_plan import Loaded

logger = get_logger(__name__)

PIECE = 1 << 21  # bytes of small tensors that one thread takes at once
ADVICE = "Write the task as a plain checkpoint: hf-ext extract."


class SetTask:
    """`model.set_task(name)`: switches the model to another task, in place.

    It overwrites the weights in memory, replaces parameters of another shape (heads, resized embeddings), and updates the
    configuration. The first switch to or from an elected task decodes the elected weights and keeps them; later ones take about
    as long as copying the weights. A coded task is decoded into the weights. If weights differ from those of the active task,
    it raises and changes nothing.

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
        self._changes: dict[tuple[str, str], ConfigChange] = {}
        self._covered: dict[str, set[str]] = {}
        self._is_mixed = False  # after a failed switch whose changes could not be reverted
        weights = LiveWeights(model, plan)
        self._names = set(weights.tensors)
        self._remember(weights)

    def __call__(self, name: str, discard_changes: bool = False) -> None:
        model = self.model
        self.merged.require_task(name)
        if name == model.active_task and not discard_changes and not self._is_mixed:
            return
        if not self.plan:
            raise CheckpointError(
                f"Transformers {transformers.__version__} has changed what switching tasks relies on. {ADVICE} Or install a "
                "newer hf_ext, or an older Transformers."
            )
        with lock_of(model), torch.inference_mode(False), torch.no_grad(), compat.host_internals("Switching tasks", ADVICE):
            change = self._change(model.active_task, name, discard_changes)
            if change.sizes and any(hasattr(module, "modules_to_save") for module in model.modules()):
                raise CheckpointError(
                    f"An adapter has its own head (modules_to_save) for the labels of '{model.active_task}', and '{name}' has "
                    "others. Call set_task before the adapter is added, or unload() the adapter."
                )
            weights = self._rewritten(name, discard_changes)
            change.apply(model)
            # PEFT records this as an adapter's base.
            loaded_by = name_of_task(model.name_or_path, self.merged.folder, name, model.tasks)
            for adapter in getattr(model, "peft_config", {}).values():
                if adapter.base_model_name_or_path == model.name_or_path:
                    adapter.base_model_name_or_path = loaded_by
            model.name_or_path, model.active_task = loaded_by, name
            self._remember(weights)

    def changed(self) -> str | None:
        """Returns the name of a parameter that was changed since the active task became active; None if there is none."""
        try:
            with lock_of(self.model), torch.inference_mode(False), torch.no_grad():
                weights = self._rewritten(self.model.active_task, False)
        except UnsavedChangesError as error:
            return error.parameter
        added = sorted(weights.tensors.keys() - self._names)
        return next(iter([*added, *(name for name in self._others(weights) if self._is_changed(weights, name))]), None)

    def _change(self, old: str, new: str, discard: bool) -> ConfigChange:
        """Returns the change between two tasks. With `discard`, the model may have other labels than the old task."""
        if (old, new) in self._changes and not discard:
            return self._changes[old, new]
        configs, settings = ((read(old), read(new)) for read in (self.merged.task_config, self.merged.generation_config))
        if discard:
            labels = {key: value for key, value in self.model.config.to_dict().items() if key in LABELS}
            return change_between(self.model, (configs[0] | labels, configs[1]), settings)
        return self._changes.setdefault((old, new), change_between(self.model, configs, settings))

    def _rewritten(self, name: str, discard: bool) -> LiveWeights:
        """Changes all weights or none, and returns them: makes and checks the new tensors first, then overwrites the others at
        once."""
        active = self.model.active_task
        weights, old, new = LiveWeights(self.model, self.plan), self.merged.source(active), self.merged.source(name)
        weights.require_in_memory()
        self.merged.require_whole()
        self.merged.parts.keep(active, name)
        places: dict[str, tuple[Loaded, np.ndarray]] = {}  # tensors that are overwritten in their weights' memory
        others: dict[str, Loaded] = {}
        tensors: dict[str, torch.Tensor] = {}
        for loaded in self.plan:
            memory = self._memory(weights, loaded, name)
            if memory is not None:
                places[loaded.all_names()[0]] = loaded, memory
                continue
            others[loaded.target] = loaded
            if not loaded.is_in(new):
                logger.warning_once(f"Task '{name}' has no tensors for '{loaded.target}', which keeps the values it has.")
        sizes = {target: weights.tensors[target].nbytes if target in weights.tensors else 0 for target in others}
        for targets in batches_of(sizes, batch_size(weights.device)):
            plan = [others[target] for target in targets]
            if not discard and (changed := self._changed(weights, plan, old)):
                raise UnsavedChangesError(active, changed)
            if discard or name != active:
                tensors |= weights.tensors_of([loaded for loaded in plan if loaded.is_in(new)], new)
        for copy, origin in weights.copies().items():
            if not discard and not is_same(weights.tensors[copy], weights.tensors[origin]):
                raise UnsavedChangesError(active, copy)
        self._overwrite(weights, places, name, discard)
        weights.set(tensors)
        weights.copy()
        return weights

    def _memory(self, weights: LiveWeights, loaded: Loaded, name: str) -> np.ndarray | None:
        """Returns the bytes of a weight that is one tensor made from the base's, before and after; None for any other."""
        source, *others = loaded.all_names()
        files = [self.merged.files[task] for task in (self.model.active_task, name)]
        if others or not all(file.is_coded(source) or file.is_modulated(source) for file in files):
            return None
        weight = weights.tensors.get(loaded.target)
        if weight is None or weight.dtype != self._types.get(loaded.target):  # its values may be those of a narrower type
            return None
        return weights.memory(loaded, self.merged.entry(name, source))

    def _overwrite(self, weights: LiveWeights, places: dict[str, tuple[Loaded, np.ndarray]], name: str, discard: bool) -> None:
        """Overwrites weights by a task's tensors, all or none: compares them with the active task's, and the files that the
        new ones are made from with their checksums, before the first changes."""
        active, threads = self.model.active_task, torch.get_num_threads()
        old, new, source = self.merged.files[active], self.merged.files[name], self.merged.source(name)
        sizes = {tensor: memory.size for tensor, (_, memory) in places.items()}
        # The election compares weights with those that the base gives, and overwrites them at once.
        targets = {
            tensor: self.merged.parts.target(active, active if new.is_coded(tensor) else name, tensor, memory)
            for tensor, (_, memory) in places.items()
            if not discard and not old.is_coded(tensor)
        }

        def check(tensor: str) -> None:
            loaded, memory = places[tensor]
            if not discard and old.is_coded(tensor) and xxhash.xxh3_64_intdigest(memory) != old.header(tensor).checksum:
                raise UnsavedChangesError(active, loaded.target)
            if tensor not in targets:
                self.merged.parts.checked_base(tensor)
            if new.is_coded(tensor):
                new.read(CODE + tensor)

        _for_all(check, sizes)
        if (place := election.retarget([*targets.values()], threads)) is not None:
            raise UnsavedChangesError(active, places[[*targets][place]][0].target)
        torch.autograd.graph.increment_version([weights.tensors[places[tensor][0].target] for tensor in targets])
        if discard or name != active:
            rest = {tensor: size for tensor, size in sizes.items() if new.is_coded(tensor) or tensor not in targets}
            self._is_mixed = True
            try:
                self._write(weights, places, rest, source)
            except BaseException:  # Ctrl-C, or a change that does not give the tensor that was merged
                self._write(weights, places, sizes, self.merged.source(active))
                self._is_mixed = False
                raise
            self._is_mixed = False

    def _write(self, weights: LiveWeights, places: Mapping[str, tuple], sizes: dict[str, int], source: TensorSource) -> None:
        _for_all(lambda tensor: weights.write([places[tensor][0]], source), sizes)

    def _changed(self, weights: LiveWeights, plan: Sequence[Loaded], task: TensorSource) -> str | None:
        """Returns a weight that differs from the task's; None if there is none."""
        others = [loaded.target for loaded in plan if loaded.target in weights.tensors and not loaded.is_in(task)]
        if changed := next((target for target in others if self._is_changed(weights, target)), None):
            return changed
        return weights.changed([loaded for loaded in plan if loaded.is_in(task)], task, self._types)

    def _is_changed(self, weights: LiveWeights, name: str) -> bool:
        """Checks whether a weight that the active task has no tensor for is not the one that it was, in any type."""
        return name not in self._kept or not is_same(weights.tensors[name], self._kept[name])

    def _others(self, weights: LiveWeights) -> list[str]:
        """Returns the weights that the active task has no tensors for, such as a new head."""
        task = self.model.active_task
        if task not in self._covered:
            self._covered[task] = weights.weights_in(self.merged.source(task))
        names = sorted(self._names & weights.tensors.keys() - self._covered[task])
        return [name for name in names if not weights.tensors[name].is_meta]

    def _remember(self, weights: LiveWeights) -> None:
        """Keeps what tells later whether the weights have changed, beside the task's tensors."""
        self._types = {name: weight.dtype for name, weight in weights.tensors.items()}  # that the tensors were rounded to
        self._kept = {name: weights.tensors[name].detach().clone() for name in self._others(weights)}


def _for_all(work: Callable[[str], object], sizes: dict[str, int]) -> None:
    """Calls `work` for tensors of these sizes in bytes, in threads. A thread takes several small tensors at once: it would wait
    for the other threads longer than it works on one."""
    for _ in BatchPrefetcher(lambda tensors: [*map(work, tensors)], sizes, PIECE):
        pass
