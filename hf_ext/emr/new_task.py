"""A task that is being merged: its file, and the figures of its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hf_ext.emr import election
from hf_ext.emr.ballot import StoredTensor
from hf_ext.emr.checks import TaskModel, require_fine_tune
from hf_ext.emr.modulators import OWN, ROWS, Modulated, TaskRecord, TaskWriter
from hf_ext.emr.reports import figures_of
from hf_ext.errors import CheckpointError
from hf_ext.storage.native import as_numbers
from hf_ext.storage.source import TensorSource


class NewTask:
    """A task that is being merged, into the file `path`. Its own tensors are in it from the start. `tensors` are those of the
    merge that are made from the base's, by name, `sums` their sums `election.SUMS`, and `shared` the names of the tensors that
    are stored for several tasks as they are."""

    def __init__(self, model: TaskModel, base: TensorSource, stored: Sequence[StoredTensor], path: Path):
        self.model, self.base = model, base
        self.tensors = {tensor.name: tensor for tensor in stored if model in tensor.voters}
        self.shared = sorted(tensor.name for tensor in stored if model in tensor.sharers)
        self.sums: dict[str, np.ndarray] = {}
        self.values = {name: math.prod(model.tensors.entry(name).shape) for name in self.tensors}
        self.writer = TaskWriter(path)
        for name in {*model.tensors.names()} - self.tensors.keys() - {*self.shared}:
            self.writer.add(OWN + name, model.tensors.read(name))

    def add_sums(self, name: str, sums: np.ndarray) -> None:
        """Keeps the sums of a tensor. Raises CheckpointError if it has values that are not finite."""
        if sums["not_finite"]:
            base = self.base.read(self.tensors[name].twin)
            is_finite = np.isfinite(as_numbers(base.data, base.dtype)).all()
            one, other = (self.model, f"the base {self.base}") if is_finite else (f"the base {self.base}", self.model)
            raise CheckpointError(
                f"Tensor '{name}' of {one} has values that are infinite or not a number, unlike in {other}. Such models cannot "
                "be merged."
            )
        self.sums[name] = sums

    def record(self, elected: str, config: str, scales: Mapping[str, float]) -> TaskRecord:
        """Returns the record of the task's file with the report, given the digests of the elected weights and of the task's
        config.json, and λ of each tensor in `tensors`. Raises BaseModelError if the task was not fine-tuned from the base."""
        model = self.model
        require_fine_tune(model, self.base, self.sums)
        record = TaskRecord(model.task, elected, shared=self.shared, config=config, ties=dict(model.ties))
        record.files = list(model.assets)
        record.report = figures_of(scales, self.sums, self.values)
        return record


class ElectedTask(NewTask):
    """A new task that takes part in the election."""

    def elected_record(self, elected: str, config: str, rescale: str, base_digests: Mapping[str, str]) -> TaskRecord:
        """Returns the record (see `record`) with the rules of all tensors, given the checksums of the base's tensors, each in
        the type of the elected one. Gives further rows of resized ones to the writer. `rescale` is as in `merge`."""
        weights = {name: 1 / max(self.values[name], 1) if rescale == "tensor_mean" else 1 for name in self.sums}
        totals = {
            field: math.fsum(weights[name] * float(sums[field]) for name, sums in self.sums.items())
            for field in election.SUM_NAMES
        }
        scales = {name: election.rescaler(sums if rescale == "tensor" else totals) for name, sums in self.sums.items()}
        record = self.record(elected, config, scales)
        record.modulated = {name: Modulated(scales[name], base_digests[name], self._resized(name)) for name in sorted(scales)}
        return record

    def _resized(self, name: str) -> int | None:
        """Returns how many rows a tensor shares with the elected one; None if both have the same number."""
        rows = (self.tensors[name].shape or (1,))[0]
        shape = self.model.tensors.entry(name).shape
        if not shape or shape[0] == rows:
            return None
        if shape[0] > rows:
            self.writer.add(ROWS + name, self.model.tensors.read_rows(name, rows, shape[0]))
        return min(shape[0], rows)
