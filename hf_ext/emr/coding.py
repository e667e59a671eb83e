"""Coded tasks (`method="switch"`): each task's change from the base, in the size that a user chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hf_ext.emr import election
from hf_ext.emr.ballot import StoredTensor
from hf_ext.emr.checks import TaskModel
from hf_ext.emr.modulators import CODE, TaskRecord
from hf_ext.emr.new_task import NewTask
from hf_ext.emr.options import LEAST_BITS, MergeOptions
from hf_ext.emr.steps import NEAR, TINY, Sample, Step, search, those_finer
from hf_ext.errors import CheckpointError
from hf_ext.storage.delta.coarse import coarsened
from hf_ext.storage.native import WIDTHS, cast
from hf_ext.storage.prefetch import Prefetcher, progress, threads_for
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.storage.source import TensorSource

CHUNK = 1 << 20  # values worked on at a time
ROUNDS, CODINGS = 10, 6  # steps that are tried at most on a sample, and on the whole model
CLOSE = 1.25, 1.001  # quotients of two steps of which each tensor may take one; the second if the first is too rough
EXACT = 2.0**-60  # for a task that changes no tensor


def code_tasks(tasks: Sequence[CodedTask], options: MergeOptions, uncoded: int) -> None:
    """Codes new tasks in the size that the options name. `uncoded` are the bytes that the folder takes besides the coded
    changes."""
    wanted = options.bits
    if options.size is not None:
        values = sum(sum(task.values.values()) for task in tasks)
        wanted = max(8 * (options.size - uncoded) / values, LEAST_BITS)
    assert wanted is not None
    for task in tasks:
        task.code(wanted, is_limit=options.size is not None)


class CodedTask(NewTask):
    """A new task whose tensors are coded, if they are made from the base's. Raises CheckpointError if one of them is of a type
    that cannot be coded."""

    def __init__(self, model: TaskModel, base: TensorSource, stored: Sequence[StoredTensor], path: Path):
        super().__init__(model, base, stored, path)
        wide = [name for name in self.tensors if model.tensors.entry(name).dtype == "F64" and self.values[name] > 1]
        if wide:
            raise CheckpointError(
                f"Tensor '{wide[0]}' of {model} is of type float64, which cannot be coded. Save the model in float32."
            )
        self._sample: Sample | None = None
        self._bits: dict[float, dict[str, float]] = {}  # by size of a step that was tried, of each tensor
        self._steps: dict[str, Step] = {}  # of the payloads in the file
        self._numbers: dict[str, int] = {}  # of values that have a change of their own in these

    @property
    def coded_bytes(self) -> int:
        """Size of the coded tensors in the file."""
        return sum(self.writer.entries[CODE + name].nbytes for name in self._steps)

    def code(self, wanted: float, is_limit: bool) -> None:
        """Codes the tensors in the step at which all together take `wanted` bits per parameter, and no more if it `is_limit`.
        Measures that on a sample first, then on the file. Between two steps that are close, some tensors take the finer one,
        or even finer ones."""
        sample = self._sample = self._sample or Sample(
            self.model, self.base, {name: tensor.twin for name, tensor in self.tensors.items()}
        )
        values = sum(self.values.values())

        def measure(size: float) -> float:
            self._bits[size] = self._write(dict.fromkeys(self.tensors, sample.step(size)))
            return sum(self._bits[size].values()) / values

        first = sample.first_step()
        if not first:
            measure(EXACT)  # nothing changed
            return
        aim, most = ((1 - NEAR / 2) * wanted, wanted) if is_limit else (wanted, (1 + NEAR) * wanted)
        tried = {size: sum(bits.values()) / values for size, bits in self._bits.items()}
        if not tried:
            sampled: dict[float, float] = {}
            first = search(sample.measure, first, aim, most, ROUNDS, sampled)
            tried[first] = measure(first)
            off = aim / max(tried[first], TINY)
            again = search(sample.measure, first, aim * off, most * off, ROUNDS, sampled)
            if not 1 - NEAR <= off <= 1 + NEAR and again not in tried:
                tried[again] = measure(again)
        for close in CLOSE:
            chosen = search(measure, first, aim, most, CODINGS, tried, close)
            bits, steps = dict(self._bits[chosen]), dict.fromkeys(self.tensors, sample.step(chosen))
            for size in sorted((size for size in self._bits if size < chosen), reverse=True):
                for name in those_finer(bits, self._bits[size], aim * values):
                    bits[name], steps[name] = self._bits[size][name], sample.step(size)
            if sum(bits.values()) >= (1 - NEAR) * aim * values:
                break
        if steps != self._steps:
            self._write(steps)

    def coded_record(self, elected: str, config: str) -> TaskRecord:
        """Returns the record of the task's file, see `record`."""
        record = self.record(elected, config, dict.fromkeys(self.sums, 1.0))
        share = sum(self._numbers.values()) / max(record.report["parameters"], 1)
        record.report |= {"step": max(step.size for step in self._steps.values()), "density": share, "conflicts": 0.0}
        return record

    def _write(self, steps: Mapping[str, Step]) -> dict[str, float]:
        """Gives the tensors, coded in these steps, to the writer. Returns their sizes in bits."""
        before, self._steps = self._steps, dict(steps)
        sizes = {name: self.model.tensors.entry(name).nbytes for name in steps if before.get(name) != steps[name]}
        with progress(f"Coding {self.model.task}:", len(sizes)) as bar:
            for _ in Prefetcher(self._code, sizes):
                bar.update()
        return {name: 8 * self.writer.entries[CODE + name].nbytes for name in steps}

    def _code(self, name: str) -> None:
        """Gives a coded tensor to the writer."""
        twin, step = self.tensors[name].twin, self._steps[name]
        tensor, base = self.model.tensors.read(name), self.base.read(twin)
        coarse = coarsened(tensor, base, step.of(name, tensor), step.gain, name, twin, threads_for(tensor.data.size))
        self.add_sums(name, sums_of(tensor, base, coarse.tensor))
        self.writer.add_bytes(CODE + name, coarse.payload)
        self._numbers[name] = coarse.numbers
        self.model.tensors.release(name)
        self.base.release(twin)


def sums_of(tensor: RawTensor, base: RawTensor, near: RawTensor) -> np.ndarray:
    """Returns the sums `election.SUMS` of a task's tensor and of its approximation, which takes the unified vector's place."""
    dtype, threads = tensor.dtype, threads_for(tensor.data.size)
    width, base_width = WIDTHS[dtype], WIDTHS[base.dtype]
    values, total = min(tensor.data.size // width, base.data.size // base_width), np.zeros((), election.SUMS)
    for begin in range(0, values, CHUNK):
        end = min(begin + CHUNK, values)
        base_part = cast(base.data[begin * base_width : end * base_width], base.dtype, dtype)
        exact, approximate = (cast(part.data[begin * width : end * width], dtype, dtype) for part in (tensor, near))
        elected = np.empty_like(base_part)
        _, (of_task, of_near) = election.elect(dtype, base_part, [exact, approximate], elected, threads)
        _, [off] = election.elect(dtype, approximate, [exact], elected, threads)
        for field in ("moved", "task_l1", "task_squares", "base_squares", "not_finite"):
            total[field] += of_task[field]
        total["unified_l1"] += of_near["task_l1"]
        total["unified_squares"] += of_near["task_squares"]
        total["product"] += (of_task["task_squares"] + of_near["task_squares"] - off["task_squares"]) / 2
    return total
