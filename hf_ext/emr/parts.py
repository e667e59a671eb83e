"""The parts that the tensors of a merge's tasks are made from: elected weights, the base's, and masks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import xxhash

from hf_ext.emr.election import Target
from hf_ext.emr.modulators import TaskFile
from hf_ext.errors import BaseModelError
from hf_ext.storage.delta.source import DeltaCheckpoint
from hf_ext.storage.native import FLOATS, cast
from hf_ext.storage.prefetch import Prefetcher
from hf_ext.storage.safetensors_file import RawTensor

KEPT_TASKS = 4  # whose masks stay in memory


class Parts:
    """The parts of an opened merge, each checked when it is read. `keep` keeps those in memory that a switch needs."""

    def __init__(self, files: Mapping[str, TaskFile], elected: DeltaCheckpoint):
        self.files, self.elected, self.base = files, elected, elected.base
        self.kept: dict[str, RawTensor] = {}  # elected weights in memory
        self._base_data: dict[str, np.ndarray] = {}
        self._modulators: dict[str, dict[str, tuple[np.ndarray | None, float]]] = {}  # of the tasks that were used last

    def base_data(self, name: str) -> np.ndarray:
        """Returns the base's bytes of an elected tensor, cast to the tensor's type: those in memory, or checked ones."""
        kept = self._base_data.get(name)
        return self.checked_base(name) if kept is None else kept

    def checked_base(self, name: str) -> np.ndarray:
        """Returns the same as `base_data`. Raises BaseModelError unless these are the bytes that a tensor of the base had when
        the merge was written."""
        base_data = self._base_data.get(name)
        if base_data is None:
            twin = self.base.twin_of(name)
            assert twin is not None  # checked when the folder was opened
            base = self.base.read(twin)
            base_data = cast(base.data, base.dtype, self.elected.entry(name).dtype)
        modulated = [file.record.modulated[name] for file in self.files.values() if name in file.record.modulated]
        stored = {f"{self.elected.identity(name):016x}"}  # of the base's own tensor, where no task was elected
        if {xxhash.xxh3_64_hexdigest(base_data)} != ({rule.prior for rule in modulated} or stored):
            raise BaseModelError(
                f"The tensor '{name}' of the base {self.base} has changed or is damaged: checksum mismatch. Restore the base, "
                "and load the merge again."
            )
        return base_data

    def modulator(self, task: str, name: str) -> tuple[np.ndarray | None, float]:
        """Returns the mask and the rescaler that make the task's tensor from the elected one."""
        if name in (kept := self._modulators.get(task, {})):
            return kept[name]
        file = self.files[task]
        return file.mask(name, math.prod(self.elected.entry(name).shape)), file.record.modulated[name].scale

    def keep(self, *tasks: str) -> None:
        """Reads into memory the elected weights, the base's, and these tasks' masks. There they stay for the next switch, the
        masks of the last few tasks."""
        for task in tasks:  # the last ones are the latest
            self._modulators[task] = self._modulators.pop(task, {})
        for task in [*self._modulators][:-KEPT_TASKS]:
            del self._modulators[task]
        keys = [(task, name) for task in tasks for name in self.files[task].record.modulated]
        sizes = {name: self.elected.entry(name).nbytes for task, name in keys if name not in self._modulators[task]}

        def read(name: str) -> tuple[RawTensor, np.ndarray, dict]:
            elected = self.kept.get(name) or self.elected.read(name)
            modulators = {task: self.modulator(task, name) for task in tasks if name in self.files[task].record.modulated}
            return elected, self.base_data(name), modulators

        for name, (elected, base_data, modulators) in [*Prefetcher(read, sizes)]:
            self.kept[name], self._base_data[name] = elected, base_data  # a view of the base's file, if plain and of that type
            for task, modulator in modulators.items():
                self._modulators[task][name] = modulator

    def target(self, task: str, to: str, name: str, live: np.ndarray) -> Target:
        """Returns the change of a weight in memory from one task's to another's. `keep` has read both."""
        elected, masks = self.kept[name], (*self._modulators[task][name], *self._modulators[to][name])
        return Target(FLOATS[elected.dtype], self._base_data[name], elected.data, *masks, live)
