"""Coded tasks (`method="switch"`): each task's change from the base, in the size that a user chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hf_ext.emr import election
from hf_ext.emr.ballot import StoredTensor
from hf_ext.emr.checks import TaskModel, require_closer, require_fine_tune
from hf_ext.emr.modulators import CODE, TaskRecord
from hf_ext.emr.new_task import NewTask
from hf_ext.emr.options import LEAST_BITS, MergeOptions
from hf_ext.emr.steps import NEAR, Sample, Step, limits, search, those_finer
from hf_ext.errors import CheckpointError
from hf_ext.storage.delta.coarse import coarsened
from hf_ext.storage.native import WIDTHS, cast
from hf_ext.storage.prefetch import Prefetcher, progress, threads_for
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.storage.source import TensorSource

CHUNK = 1 << 20  # values worked on at a time
ROUNDS, CODINGS = 10, 6  # steps that are tried at most on a sample, and on the whole model
GUESSES = 8  # rounds at most in which some tensors take a step that the sample suggests
BESIDE, POWERS = 1.15, 4  # quotient of such steps, and its largest power in a round
CLOSE = 1.25, 1.001  # quotients of two measured steps of which each tensor may take one; the second if the first is too rough
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
        task.code(wanted, options)


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
        self._measured: dict[float, dict[str, float]] = {}  # by size of a step in which all were written: bits of each tensor
        self._bits: dict[float, dict[str, float]] = {}  # the same, with steps for which the sample says what some tensors take
        self._steps: dict[str, Step] = {}  # of the payloads in the file
        self._numbers: dict[str, int] = {}  # of values that have a change of their own in these

    @property
    def coded_bytes(self) -> int:
        """Size of the coded tensors in the file."""
        return sum(self.writer.entries[CODE + name].nbytes for name in self._steps)

    def code(self, wanted: float, options: MergeOptions) -> None:
        """Codes the tensors in the step at which all together take `wanted` bits per parameter, and no more if a size is asked
        for. Measures that on a sample first, then on the file, in which some tensors then take finer or coarser steps. Raises
        BaseModelError or CheckpointError, before it codes, if the sample shows that the task was not fine-tuned from the base,
        or that nothing would be left of its changes."""
        sample = self._sample = self._sample or Sample(
            self.model, self.base, {name: tensor.twin for name, tensor in self.tensors.items()}
        )
        require_fine_tune(self.model, self.base, sample.sums)
        values, is_limit = sum(self.values.values()), options.size is not None

        def measure(size: float) -> float:
            bits = self._bits[size] = self._measured[size] = self._write(dict.fromkeys(self.tensors, sample.step(size)))
            return sum(bits.values()) / values

        first = sample.first_step()
        if not first:
            measure(EXACT)  # nothing changed
            return
        aim, most = ((1 - NEAR / 2) * wanted, wanted) if is_limit else (wanted, (1 + NEAR) * wanted)
        finest, coarsest = limits(first)
        if not self._measured:
            sampled: dict[float, float] = {}
            size = search(sample.measure, first, aim, most, ROUNDS, sampled)
            if sampled[size] > most and sample.is_lost(size) and not is_limit and not options.accept_conflicts:
                require_closer({self.model.task: (1.0, 0.0)}, are_coded=True)
            is_most = sampled[size] < (1 - NEAR) * aim and sample.measure(finest) < (1 - NEAR) * aim
            measure(finest if is_most else size)

        def is_near() -> bool:  # or as near as any step comes
            bits, sizes = 8 * self.coded_bytes / values, {step.size for step in self._steps.values()}
            if bits > most:
                return sizes == {coarsest}
            return bits >= (1 - NEAR) * aim or sizes == {finest}

        def take(rounds: int, close: float) -> None:
            tried = {size: sum(bits.values()) / values for size, bits in self._bits.items()}
            self._mix(sample, search(measure, first, aim, most, rounds, tried, close), aim * values)

        for _ in range(GUESSES):
            if is_near():
                return
            self._guess(sample, 8 * self.coded_bytes / values < aim, most * values)
            take(0, 1)
        self._bits = dict(self._measured)
        for close in CLOSE:
            if is_near():
                return
            take(CODINGS, close)

    def _guess(self, sample: Sample, is_small: bool, most: float) -> None:
        """Guesses, from the sample, the tensors' bits in a step beside those that were tried: one at which they take more than
        `most` bits together if what is written `is_small`, and less otherwise."""
        for _ in range(POWERS):
            edge = min(self._bits) if is_small else max(self._bits)
            if (sum(self._bits[edge].values()) > most) == is_small:
                break
            beside = edge / BESIDE if is_small else edge * BESIDE
            factors = sample.factors(edge, beside)
            self._bits[beside] = {name: factors[name] * bits for name, bits in self._bits[edge].items()}
            if edge not in self._measured and edge not in {step.size for step in self._steps.values()}:
                del self._bits[edge]

    def _mix(self, sample: Sample, chosen: float, wanted: float) -> None:
        """Writes the tensors in the chosen step. Some take finer steps that were tried, so that all take `wanted` bits."""
        bits, steps = dict(self._bits[chosen]), dict.fromkeys(self.tensors, sample.step(chosen))
        for size in sorted((size for size in self._bits if size < chosen), reverse=True):
            written = [name for name, step in self._steps.items() if step.size == size]
            for name in those_finer(bits, self._bits[size], wanted, written):
                bits[name], steps[name] = self._bits[size][name], sample.step(size)
        for name, amount in self._write(steps).items():
            self._bits[steps[name].size][name] = amount

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
