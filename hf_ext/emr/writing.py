"""Writes the folder of a merge, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from hf_ext.display import megabytes
from hf_ext.emr import election
from hf_ext.emr.checks import Ballot, TaskModel, require_closer, require_fine_tune
from hf_ext.emr.coding import CHUNK, ENTRY, LEAST_BITS, Budget, Step, choose_step, step_of, sums_of
from hf_ext.emr.folder import MergeFolder
from hf_ext.emr.layout import files_of, task_folder
from hf_ext.emr.modulators import CODE, FILE, OWN, ROWS, Modulated, TaskFile, TaskRecord, TaskWriter, copy_task
from hf_ext.emr.reports import figures_of
from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import CONFIG, EMR, HINT
from hf_ext.storage.delta.coarse import coarsened
from hf_ext.storage.delta.source import PARTS_OF, DeltaCheckpoint
from hf_ext.storage.delta.writer import write_delta
from hf_ext.storage.files import copy, write_json
from hf_ext.storage.native import WIDTHS, cast
from hf_ext.storage.plain_writer import shards_of
from hf_ext.storage.prefetch import threads_for
from hf_ext.storage.safetensors_file import RawTensor, float_name
from hf_ext.storage.source import TensorSource

RUNS, MORE_RUNS, RUN = 24, 240, 1 << 16  # of a sample: numbers of runs, and values in each
SUM_NAMES = election.SUMS.names or ()
RESCALE = ("tensor", "paper", "tensor_mean")


class MergeWriter:
    """Elects the weights of a merge and writes its folder. Memory: one tensor and a million values of each task, or the whole
    tensor of each compressed task.

    Args:
        base, base_config: the model that all tasks were fine-tuned from, and its config.json.
        models: the models of all tasks.
        out: folder to write.
        standing: a merge to add tasks to, or to remove tasks from. The tasks that stay keep all their bits.
        accept_conflicts: as in `merge`.
        budget: the size of the new tasks if they are coded. Coded tasks do not vote.
    """

    def __init__(
        self,
        base: TensorSource,
        base_config: dict,
        models: Sequence[TaskModel],
        out: Path,
        standing: MergeFolder | None,
        accept_conflicts: bool,
        budget: Budget | None,
    ):
        self.base, self.models, self.out, self.standing = base, models, out, standing
        self.ballot = Ballot(base, base_config, models, standing)
        self.holders, self.voters = self.ballot.holders, self.ballot.voters
        self.accept_conflicts, self.budget = accept_conflicts, budget
        new = [model for model in models if standing is None or model.task not in standing.files]
        self.writers = {model: TaskWriter(out / task_folder(model.task) / FILE) for model in new}
        self.sums: dict[TaskModel, dict[str, np.ndarray]] = {model: {} for model in new}
        self.steps: dict[TaskModel, Step] = {}
        self.numbers: dict[TaskModel, dict[str, int]] = {model: {} for model in new}  # coded changes of single values
        self.priors: dict[str, str] = {}  # elected tensor -> checksum of the base's, in its type

    def write(self, rescale: str, max_shard_size: int | str) -> None:
        """Writes the whole folder. The arguments are those of `merge`."""
        try:
            if rescale not in RESCALE:
                raise CheckpointError(f"rescale={rescale!r} is not supported; choose one of: {', '.join(RESCALE)}.")
            if self.budget:
                self._choose_steps(self.budget)
            elif self.writers and not self.accept_conflicts:
                self._require_agreement(rescale)
            tensors = {name: self.ballot.stored(name) for name in self.holders}
            files = shards_of(tensors, self._tensor, self.out, max_shard_size, {PARTS_OF: EMR})
            recorded, [digest] = write_delta([files], self.base, self.out)
            for model in self.models:
                folder = self.out / task_folder(model.task)
                folder.mkdir(exist_ok=True)
                write_json(folder / CONFIG, model.config)
            records = {model: self._record(model, digest, rescale) for model in self.writers}
            if not self.accept_conflicts:
                figures = {task.task: (task.report["relative"], task.report["cosine"]) for task in records.values()}
                require_closer(figures, self.budget is not None)
            for model in self.models:
                if model in self.writers:
                    self.writers[model].finish(records[model])
                else:
                    assert self.standing is not None
                    file, target = self.standing.files[model.task], self.out / task_folder(model.task) / FILE
                    held = [name for name in file.own if not self.voters[name] and self.ballot.is_held(model, name)]
                    fields = {"elected": digest, "ties": dict(model.ties), "shared": sorted([*file.record.shared, *held])}
                    copy_task(file, target, [OWN + name for name in held], **fields)
        finally:
            for writer in self.writers.values():
                writer.close()
        first = self.models[0]
        for name, path in first.assets.items():
            copy(path, self.out / name)
        for model in self.models:
            if not _same_files(model.assets, first.assets):
                for name, path in model.assets.items():
                    copy(path, self.out / task_folder(model.task) / name)
        dtype = float_name(tensors[name][0] for name in sorted(tensors))
        assert recorded is not None  # as a merge has a base
        settings = {"quant_method": EMR, "hint": HINT, "base": recorded.name, "revision": recorded.revision, "dtype": dtype}
        paths = {model.task: self.out / task_folder(model.task) / FILE for model in self.models}
        tasks = {"tasks": [*paths], "digests": {task: TaskFile(path).digest for task, path in paths.items()}}
        write_json(self.out / CONFIG, first.config | {"quantization_config": settings | tasks})

    def _tensor(self, name: str) -> RawTensor:
        """Returns the tensor to store: the elected one (and gives its masks to the writers) or that of its first holder."""
        dtype, shape = self.ballot.stored(name)
        if not self.voters[name]:
            return self.holders[name].tensors.read(name)
        twin, width = self.ballot.twin(name), WIDTHS[dtype]
        base = self.base.read(twin)
        voters = [model for model in self.voters[name] if model in self.writers]
        if self.budget:
            for model in voters:
                self._code(model, name, base)
            voters = []
        tensors = [model.tensors.read(name) for model in voters]
        values, base_width = math.prod(shape), WIDTHS[base.dtype]
        if voters and self.standing is None:
            # Memory for one tensor less: a decoded one is overwritten once its values are read.
            decoded = (tensor.data for model, tensor in zip(voters, tensors) if isinstance(model.tensors, DeltaCheckpoint))
            fitting = (data for data in decoded if data.flags.writeable and data.size == values * width)
            elected = next(fitting, None)
            if elected is None:
                elected = np.empty(values * width, np.uint8)
        elif self.standing and self.standing.is_elected(name):
            elected = self.standing.elected.read(name).data
            if not self.writers:
                self._clear(name, elected, cast(base.data, base.dtype, dtype))
        else:
            elected = cast(base.data, base.dtype, dtype).copy()
        masks = np.empty((len(voters), election.mask_bytes(values)), np.uint8)
        sums = np.zeros(len(voters), election.SUMS)
        threads, digest = threads_for(elected.size), xxhash.xxh3_64()
        for begin in range(0, values if voters else 0, CHUNK):
            end = min(begin + CHUNK, values)
            prior = cast(base.data[begin * base_width : end * base_width], base.dtype, dtype)
            digest.update(prior)
            chunk = elected[begin * width : end * width]
            own = [tensor.data[begin * width : end * width] for tensor in tensors]
            chunk_masks, added = self._elect(dtype, prior, own, chunk, threads)
            masks[:, begin // 8 : election.mask_bytes(end)] = chunk_masks
            for field in SUM_NAMES:
                sums[field] += added[field]
            self.base.release(twin, begin * base_width, end * base_width)
            for model in voters:
                model.tensors.release(name, begin * width, end * width)
        self.priors[name] = digest.hexdigest()
        for model, mask, total in zip(voters, masks, sums):
            self._add_sums(model, name, np.asarray(total))
            self.writers[model].add_mask(name, mask)
        return RawTensor(dtype, shape, elected)

    def _clear(self, name: str, elected: np.ndarray, prior: np.ndarray) -> None:
        """Overwrites elected weights that no task takes any more with the base's."""
        assert self.standing is not None
        words = f"<u{WIDTHS[self.ballot.stored(name)[0]]}"
        elected, prior = elected.view(words), prior.view(words)
        free = np.ones(elected.size, bool)
        for model in self.voters[name]:
            if name in self.standing.files[model.task].record.modulated:
                mask, _ = self.standing.modulator(model.task, name)
                if mask is not None:
                    free &= np.unpackbits(mask, count=free.size, bitorder="little") == 0
        np.copyto(elected, prior, where=free)

    def _add_sums(self, model: TaskModel, name: str, sums: np.ndarray) -> None:
        """Keeps the sums of a new task's tensor. Raises CheckpointError if it has values that are not finite."""
        if sums["not_finite"]:
            raise CheckpointError(
                f"Tensor '{name}' of task '{model.task}' has {int(sums['not_finite'])} values that are infinite or not a "
                "number, unlike in the base. Such a model cannot be merged."
            )
        self.sums[model][name] = sums

    def _code(self, model: TaskModel, name: str, base: RawTensor) -> None:
        """Gives a coded tensor to the writer of its task."""
        tensor, entry = model.tensors.read(name), model.tensors.entry(name)
        step, threads = self.steps[model], threads_for(tensor.data.size)
        size = step_of(step.size, name, entry)
        coarse = coarsened(tensor, base, size, step.gain, name, self.ballot.twin(name), threads)
        self._add_sums(model, name, sums_of(tensor, base, coarse.tensor))
        self.writers[model].add_bytes(CODE + name, coarse.payload)
        self.numbers[model][name] = coarse.numbers
        model.tensors.release(name)

    def _choose_steps(self, budget: Budget) -> None:
        """Sets the step of each new task, which codes all tensors that are made from the base's."""
        names = {model: [name for name, voters in self.voters.items() if model in voters] for model in self.writers}
        bits = budget.bits if budget.size is None else self._bits(budget.size - budget.reserved, names)
        for model, coded in names.items():
            self.steps[model] = choose_step(model, self.base, coded, budget.keep, bits)

    def _bits(self, size: int, names: Mapping[TaskModel, Sequence[str]]) -> float:
        """Returns the bits per parameter and task that are left of a folder of this size in bytes, if there are enough."""
        first, fixed = self.models[0], ENTRY * len(self.holders)
        if self.standing:
            folder, files = self.standing.folder, self.standing.files
            fixed = sum((folder / path).stat().st_size for path in files_of(folder, files))
        for model, coded in names.items():
            if model is first or not _same_files(model.assets, first.assets):
                fixed += sum(path.stat().st_size for path in model.assets.values())
            own = {*model.tensors.names()} - {*coded}
            own = {name for name in own if self.holders[name] is model or not self.ballot.is_held(model, name)}
            fixed += ENTRY * len(coded) + sum(ENTRY + model.tensors.entry(name).nbytes for name in own)
        values = sum(math.prod(model.tensors.entry(name).shape) for model, coded in names.items() for name in coded)
        least = fixed + math.ceil(LEAST_BITS / 8 * values)
        if size < least:
            raise CheckpointError(
                f"A folder of {megabytes(size)} is too small: {megabytes(fixed)} are for what is not coded (heads, tokenizers, "
                f"names). Give a size of more than {megabytes(least)}."
            )
        return 8 * (size - fixed) / values

    def _elect(
        self, dtype: str, prior: np.ndarray, tasks: Sequence[np.ndarray], elected: np.ndarray, threads: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Elects weights, or adopts those of one more task. Returns masks and sums, as `election.elect` does."""
        parts = [_padded(part.copy() if np.may_share_memory(part, elected) else part, prior, dtype) for part in tasks]
        if self.standing is None:
            return election.elect(dtype, prior, parts, elected, threads)
        return election.adopt(dtype, prior, elected, *parts)

    def _require_agreement(self, rescale: str) -> None:
        """Raises CheckpointError if a sample shows that a task would end farther from its own model than the base is.

        The sample consists of runs of values, spread evenly over all parameters. Only a clear result counts: the task moved
        many runs, and the mean is three standard errors or more. A task that moved few of them, as an adapter does, takes a
        larger sample. In the end, the figures of the whole model decide.
        """
        for runs in (RUNS, MORE_RUNS):
            sums = self._sample(runs)
            is_clear: dict[TaskModel, bool] = {}
            figures: dict[str, tuple[float, float]] = {}
            for model, totals in sums.items():
                whole = {field: math.fsum(total[field] for total in totals) for field in SUM_NAMES}
                scales = [election.rescaler(total if rescale == "tensor" else whole) for total in totals]
                kept = [scale**2 * total["unified_squares"] for scale, total in zip(scales, totals)]
                products = [scale * total["product"] for scale, total in zip(scales, totals)]
                excess = [square - 2 * product for square, product in zip(kept, products)]
                if 2 * sum(total["moved"] > 0 for total in totals) > RUNS:
                    is_clear[model] = np.mean(excess) >= 3 * np.std(excess) / math.sqrt(runs)
                    length = math.fsum(kept) * whole["task_squares"]
                    cosine = math.fsum(products) / math.sqrt(length) if length else 0.0
                    figures[model.task] = math.sqrt(max(1 + math.fsum(excess) / whole["task_squares"], 0)), cosine
            if len(is_clear) == len(sums):
                break
        if any(is_clear.values()):
            require_closer(figures)

    def _sample(self, runs: int) -> dict[TaskModel, list[dict[str, float]]]:
        """Returns the means of each new task's sums over each run of a sample."""
        sizes = {
            name: math.prod(self.ballot.stored(name)[1]) for name, voters in self.voters.items() if {*voters} & {*self.writers}
        }
        ends, names = np.cumsum(list(sizes.values())), list(sizes)
        places = np.linspace(0, int(ends[-1]), runs, endpoint=False).astype(np.int64)
        sums: dict[TaskModel, list[dict[str, float]]] = {model: [] for model in self.writers}
        for index in sorted({*np.searchsorted(ends, places, side="right").tolist()}):
            name, first = names[index], int(ends[index]) - sizes[names[index]]
            begins = [min(int(place) - first, max(sizes[name] - RUN, 0)) for place in places if first <= place < ends[index]]
            for model, total in self._sample_tensor(name, begins):
                sums[model].append(total)
        return sums

    def _sample_tensor(self, name: str, begins: Sequence[int]) -> Iterator[tuple[TaskModel, dict[str, float]]]:
        """Yields the mean of each new task's sums over runs of a tensor's values, one for each of `begins`."""
        dtype, shape = self.ballot.stored(name)
        twin, width = self.ballot.twin(name), WIDTHS[dtype]
        base, voters = self.base.read(twin), [model for model in self.voters[name] if model in self.writers]
        tensors = [model.tensors.read(name).data for model in voters]
        standing = None
        for begin in begins:
            end = min(begin + RUN, math.prod(shape))
            prior = cast(base.data[begin * WIDTHS[base.dtype] : end * WIDTHS[base.dtype]], base.dtype, dtype)
            parts = [data[begin * width : end * width] for data in tensors]
            if all(np.array_equal(part, prior) for part in parts):
                sums = np.zeros(len(voters), election.SUMS)
            else:
                if standing is None and self.standing is not None and name in self.standing.elected:
                    standing = self.standing.elected.read(name).data
                elected = prior.copy() if standing is None else standing[begin * width : end * width].copy()
                _, sums = self._elect(dtype, prior, parts, elected)
            for model, total in zip(voters, sums):
                yield model, {field: float(total[field]) / (end - begin) for field in SUM_NAMES}

    def _record(self, model: TaskModel, digest: str, rescale: str) -> TaskRecord:
        """Returns the record of a new task. Gives the task's own tensors to its writer."""
        sums = self.sums[model]
        config = xxhash.xxh3_64_hexdigest((self.out / task_folder(model.task) / CONFIG).read_bytes())
        record = TaskRecord(model.task, digest, files=list(model.assets), config=config, ties=dict(model.ties))
        values = {name: math.prod(model.tensors.entry(name).shape) for name in sums}
        weights = {name: 1 / max(values[name], 1) if rescale == "tensor_mean" else 1 for name in sums}
        totals = {
            field: math.fsum(weights[name] * float(tensor[field]) for name, tensor in sums.items()) for field in SUM_NAMES
        }
        require_fine_tune(model, self.base, sums)
        for name in sorted(model.tensors.names()):
            if name in self.numbers[model]:
                continue
            if name in sums:
                scale = election.rescaler(sums[name] if rescale == "tensor" else totals)
                record.modulated[name] = Modulated(scale, self.priors[name], self._resized(model, name))
            elif not self.voters[name] and self.ballot.is_held(model, name):
                record.shared.append(name)
            else:
                self.writers[model].add(OWN + name, model.tensors.read(name))
        scales = {name: record.modulated[name].scale if name in record.modulated else 1.0 for name in sums}
        record.report = figures_of(scales, sums, values)
        if self.budget:
            share = sum(self.numbers[model].values()) / max(record.report["parameters"], 1)
            record.report |= {"step": self.steps[model].size, "density": share, "conflicts": 0.0}
        return record

    def _resized(self, model: TaskModel, name: str) -> int | None:
        """Returns how many rows a task's tensor shares with the elected one; None if both have the same number. Gives further
        rows to the task's writer."""
        rows = (self.ballot.stored(name)[1] or (1,))[0]
        shape = model.tensors.entry(name).shape
        if not shape or shape[0] == rows:
            return None
        if shape[0] > rows:
            self.writers[model].add(ROWS + name, model.tensors.read_rows(name, rows, shape[0]))
        return min(shape[0], rows)


def _padded(data: np.ndarray, prior: np.ndarray, dtype: str) -> np.ndarray:
    """Returns a task's weights, followed by the base's where the task has fewer."""
    return cast(data, dtype, dtype) if data.size == prior.size else np.concatenate([data, prior[data.size :]])


def _same_files(first: Mapping[str, Path], second: Mapping[str, Path]) -> bool:
    return first.keys() == second.keys() and all(first[name].read_bytes() == second[name].read_bytes() for name in first)
