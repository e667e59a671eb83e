"""Writes the folder of a merge, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path

import numpy as np
import xxhash

from hf_ext.emr import election
from hf_ext.emr.checks import Ballot, TaskModel, require_closer, require_fine_tune
from hf_ext.emr.coding import (
    CHUNK,
    CLOSE,
    CODINGS,
    ENTRY,
    EXACT,
    LEAST_BITS,
    NEAR,
    ROUNDS,
    TINY,
    Budget,
    Sample,
    Step,
    search,
    step_of,
    sums_of,
    those_finer,
)
from hf_ext.emr.folder import MergeFolder
from hf_ext.emr.layout import files_of, task_folder
from hf_ext.emr.modulators import CODE, FILE, OWN, ROWS, Modulated, TaskFile, TaskRecord, TaskWriter, copy_task
from hf_ext.emr.reports import figures_of
from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import CONFIG, EMR, HINT
from hf_ext.storage.delta.coarse import coarsened
from hf_ext.storage.delta.source import DeltaCheckpoint
from hf_ext.storage.delta.writer import write_delta
from hf_ext.storage.files import copy, write_json
from hf_ext.storage.layout import GENERATION, INDEX
from hf_ext.storage.native import WIDTHS, as_numbers, cast
from hf_ext.storage.plain_writer import shards_of
from hf_ext.storage.prefetch import Prefetcher, progress, threads_for
from hf_ext.storage.safetensors_file import RawTensor, float_name
from hf_ext.storage.source import TensorSource
from hf_ext.storage.weights import PARTS_OF

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
        amounts: by new task and step, what each tensor takes; receives those of the steps that are tried.
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
        amounts: dict[str, dict[float, dict[str, float]]],
    ):
        self.base, self.models, self.out, self.standing = base, models, out, standing
        self.ballot = Ballot(base, base_config, models, standing)
        self.holders, self.voters = self.ballot.holders, self.ballot.voters
        self.accept_conflicts, self.budget, self.amounts = accept_conflicts, budget, amounts
        new = [model for model in models if standing is None or model.task not in standing.files]
        self.writers = {model: TaskWriter(out / task_folder(model.task) / FILE) for model in new}
        self.sums: dict[TaskModel, dict[str, np.ndarray]] = {model: {} for model in new}
        self.steps: dict[TaskModel, dict[str, Step]] = {}
        self.numbers: dict[TaskModel, dict[str, int]] = {model: {} for model in new}  # coded changes of single values
        self.coded_bytes = 0  # of all new tasks
        self.priors: dict[str, str] = {}  # elected tensor -> checksum of the base's, in its type

    def write(self, rescale: str, max_shard_size: int | str) -> None:
        """Writes the whole folder. The arguments are those of `merge`."""
        try:
            if rescale not in RESCALE:
                raise CheckpointError(f"rescale={rescale!r} is not supported; choose one of: {', '.join(RESCALE)}.")
            if self.budget:
                self._code_tasks(self.budget)
            elif self.writers and not self.accept_conflicts:
                self._require_agreement(rescale)
            tensors = {name: self.ballot.stored(name) for name in self.holders}
            dtype = float_name(tensors[name][0] for name in sorted(tensors))
            files = shards_of(tensors, self._tensor, self.out, max_shard_size, {PARTS_OF: EMR})
            recorded, [digest] = write_delta([files], self.base, self.out)
            for model in self.models:
                folder = self.out / task_folder(model.task)
                folder.mkdir(exist_ok=True)
                settings = {"quant_method": EMR, "dtype": dtype, "task": model.task}
                write_json(folder / CONFIG, model.config | {"quantization_config": settings})
                listed = {next(iter(file.entries)): f"../{file.path.name}" for file in files}
                write_json(folder / INDEX, {"metadata": {}, "weight_map": listed})
            records = {model: self._record(model, digest, rescale) for model in self.writers}
            if not (self.accept_conflicts or self.budget):
                figures = {task.task: (task.report["relative"], task.report["cosine"]) for task in records.values()}
                require_closer(figures)
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
            same = _same_files(model.assets, first.assets)
            for name, path in model.assets.items():
                if not same or name == GENERATION:  # which loading a task's folder reads there
                    copy(path, self.out / task_folder(model.task) / name)
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
        voters = [model for model in self.voters[name] if model in self.writers and not self.budget]
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
            base = self.base.read(self.ballot.twin(name))
            is_finite = np.isfinite(as_numbers(base.data, base.dtype)).all()
            one, other = (model, f"the base {self.base}") if is_finite else (f"the base {self.base}", model)
            raise CheckpointError(
                f"Tensor '{name}' of {one} has values that are infinite or not a number, unlike in {other}. Such models cannot "
                "be merged."
            )
        self.sums[model][name] = sums

    def _code_tasks(self, budget: Budget) -> None:
        """Codes all tensors of each new task that are made from the base's, in the steps that give the size asked for."""
        names = {model: [name for name, voters in self.voters.items() if model in voters] for model in self.writers}
        for model, coded in names.items():
            if wide := [name for name in coded if model.tensors.entry(name).dtype == "F64" and self._values(model, [name]) > 1]:
                raise CheckpointError(
                    f"Tensor '{wide[0]}' of {model} is of type float64, which cannot be coded. Save the model in float32."
                )
        if budget.size is None:
            wanted = budget.bits or budget.keep or 0.0
        else:
            uncoded = self._uncoded(names) if budget.uncoded is None else budget.uncoded
            wanted = max(8 * (budget.size - uncoded) / sum(starmap(self._values, names.items())), LEAST_BITS)
        for model, coded in names.items():
            self._code_task(model, coded, wanted, budget)
        self.coded_bytes = sum(entry.nbytes for writer in self.writers.values() for entry in writer.entries.values())

    def _code_task(self, model: TaskModel, names: Sequence[str], wanted: float, budget: Budget) -> None:
        """Codes tensors in the step at which all together take `wanted` bits per parameter, or have the share `wanted` of
        changes of single values. Measures that on a sample first, then on what is written. Between two steps that are close,
        some tensors take the finer one, or even finer ones."""
        sample, values = Sample(model, self.base, names, budget.keep is not None), self._values(model, names)
        amounts = self.amounts.setdefault(model.task, {})

        def measure(size: float) -> float:
            amounts[size] = self._code_all(model, dict.fromkeys(names, sample.step(size)), budget.keep is not None)
            return sum(amounts[size].values()) / values

        first = sample.first_step()
        if not first:
            measure(EXACT)  # nothing changed
            return
        aim, most = (wanted, (1 + NEAR) * wanted) if budget.size is None else ((1 - NEAR / 2) * wanted, wanted)
        tried = {size: sum(amount.values()) / values for size, amount in amounts.items()}
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
            coded, steps = dict(amounts[chosen]), dict.fromkeys(names, sample.step(chosen))
            for size in sorted(amounts, reverse=True):
                for name in those_finer(coded, amounts[size], aim * values) if size < chosen else ():
                    coded[name], steps[name] = amounts[size][name], sample.step(size)
            if sum(coded.values()) >= (1 - NEAR) * aim * values:
                break
        if steps != self.steps.get(model):
            self._code_all(model, steps, budget.keep is not None)

    def _code_all(self, model: TaskModel, steps: Mapping[str, Step], keep: bool) -> dict[str, float]:
        """Gives the tensors of a task, coded in these steps, to its writer. Returns their sizes in bits; with `keep`, their
        numbers of changes of single values."""
        before, self.steps[model] = self.steps.get(model, {}), dict(steps)
        sizes = {name: model.tensors.entry(name).nbytes for name, step in steps.items() if before.get(name) != step}
        with progress(f"Coding {model.task}:", len(sizes)) as bar:
            for _ in Prefetcher(lambda name: self._code(model, name), sizes):
                bar.update()
        entries = self.writers[model].entries
        return {name: self.numbers[model][name] if keep else 8 * entries[CODE + name].nbytes for name in steps}

    def _code(self, model: TaskModel, name: str) -> None:
        """Gives a coded tensor to the writer of its task."""
        twin = self.ballot.twin(name)
        tensor, entry, base = model.tensors.read(name), model.tensors.entry(name), self.base.read(twin)
        step, threads = self.steps[model][name], threads_for(tensor.data.size)
        coarse = coarsened(tensor, base, step_of(step.size, name, entry), step.gain, name, twin, threads)
        self._add_sums(model, name, sums_of(tensor, base, coarse.tensor))
        self.writers[model].add_bytes(CODE + name, coarse.payload)
        self.numbers[model][name] = coarse.numbers
        model.tensors.release(name)
        self.base.release(twin)

    @staticmethod
    def _values(model: TaskModel, names: Sequence[str]) -> int:
        return sum(math.prod(model.tensors.entry(name).shape) for name in names)

    def _uncoded(self, names: Mapping[TaskModel, Sequence[str]]) -> int:
        """Returns the bytes that all but coded tensors take in the folder, about."""
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
        return fixed

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
            record.report |= {"step": max(step.size for step in self.steps[model].values()), "density": share, "conflicts": 0.0}
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
