"""Writes the folder of a merge, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from hf_ext.emr import election
from hf_ext.emr.checks import TaskInput, labels, require_fine_tune, require_one_architecture, require_same_layers, vocabulary
from hf_ext.emr.folder import METHOD, MergeFolder, task_folder
from hf_ext.emr.modulators import FILE, OWN, ROWS, Modulated, TaskRecord, TaskWriter, copy_task
from hf_ext.emr.recipe import RESCALE
from hf_ext.emr.reports import figures_of
from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.storage.atomic import write_json
from hf_ext.storage.delta.source import PARTS_OF
from hf_ext.storage.delta.writer import write_delta
from hf_ext.storage.layout import CONFIG, HINT
from hf_ext.storage.native import FLOATS, WIDTHS, cast
from hf_ext.storage.plain_writer import shards_of
from hf_ext.storage.prefetch import threads_for
from hf_ext.storage.safetensors_file import RawTensor, float_name
from hf_ext.storage.source import TensorSource, layer_of
from hf_ext.storage.tree import copy

CHUNK = 1 << 20  # values of each task worked on at a time
SUM_NAMES = election.SUMS.names or ()


class MergeWriter:
    """Elects the weights of a merge and writes its folder. Memory: one tensor and a million values of each task.

    Args:
        base, base_config: the model that all tasks were fine-tuned from, and its config.json.
        sources: the tasks, by name.
        out: folder to write.

    Raises:
        CheckpointError: the checkpoints cannot be merged.
        BaseModelError: they are not fine-tunes of this base.
    """

    def __init__(self, base: TensorSource, base_config: dict, sources: Mapping[str, TaskInput], out: Path):
        self.base, self.sources, self.out = base, sources, out
        self._words = vocabulary(base_config)
        require_one_architecture(base_config, sources)
        for task, source in sources.items():
            require_same_layers(task, source.tensors, base)
        self.holders: dict[str, str] = {}  # tensor -> the first task that has it
        self.voters: dict[str, list[str]] = {}  # tensor -> the tasks that take part in its election
        for task, source in sources.items():
            for name in source.tensors.names():
                self.holders.setdefault(name, task)
                voters = self.voters.setdefault(name, [])
                if self.votes(task, name):
                    voters.append(task)
            if not any(task in self.voters[name] for name in source.tensors.names()):
                raise BaseModelError(
                    f"No tensor of task '{task}' ({source.tensors}) has a counterpart of its shape in the base {base}: it is "
                    "no fine-tune of this base. Give the base that it was fine-tuned from."
                )
        self.writers = {task: TaskWriter(out / task_folder(task) / FILE) for task in self.new_tasks()}
        self.sums: dict[str, dict[str, np.ndarray]] = {task: {} for task in self.writers}
        self.priors: dict[str, str] = {}  # elected tensor -> checksum of the base's, in its type

    def write(self, rescale: str, max_shard_size: int | str) -> None:
        """Writes the whole folder.

        Args:
            rescale: as in `merge`.
            max_shard_size: as in `save_pretrained`.
        """
        try:
            if rescale not in RESCALE:
                raise CheckpointError(f"rescale={rescale!r} is not supported; choose one of: {', '.join(RESCALE)}.")
            tensors = {name: self._stored(name) for name in self.holders}
            files = shards_of(tensors, self.tensor, self.out, max_shard_size, {PARTS_OF: METHOD})
            recorded, [digest] = write_delta([files], self.base, self.out)
            for task, source in self.sources.items():
                (self.out / task_folder(task)).mkdir(exist_ok=True)
                write_json(self.out / task_folder(task) / CONFIG, source.config)
            for task, writer in self.writers.items():
                writer.finish(self.record(task, digest, rescale))
        finally:
            for writer in self.writers.values():
                writer.close()
        first = next(iter(self.sources.values()))
        for task, source in self.sources.items():
            self.copy_modulators(task, digest)
            if not _same_files(source.assets, first.assets):
                for name, path in source.assets.items():
                    copy(path, self.out / task_folder(task) / name)
        for name, path in first.assets.items():
            copy(path, self.out / name)
        dtype = float_name(tensors[name][0] for name in sorted(tensors))
        assert recorded is not None  # as a merge has a base
        settings = {"quant_method": METHOD, "hint": HINT, "base": recorded.name, "revision": recorded.revision, "dtype": dtype}
        write_json(self.out / CONFIG, first.config | {"quantization_config": settings | {"tasks": list(self.sources)}})

    def new_tasks(self) -> list[str]:
        """Returns the tasks whose masks this merge computes."""
        return list(self.sources)

    def votes(self, task: str, name: str) -> bool:
        """Checks whether a task's tensor takes part in the election. If not, it is stored as the task's own: a head, for
        instance, or integers."""
        twin, entry = self.base.twin_of(name), self.sources[task].tensors.entry(name)
        if twin is None or entry.dtype not in FLOATS or self.base.entry(twin).dtype not in FLOATS or not math.prod(entry.shape):
            return False
        base_shape, shape = self.base.entry(twin).shape, entry.shape
        if base_shape != shape:
            in_layer = layer_of(name) is not None and shape[:1] != (labels(self.sources[task].config),)
            if len(base_shape) != len(shape) or base_shape[1:] != shape[1:] or in_layer:
                raise CheckpointError(
                    f"Tensor '{name}' of task '{task}' is {list(shape)}, but {list(base_shape)} in the base {self.base}: these "
                    "are models of different sizes. Give the base that all tasks were fine-tuned from."
                )
            # With as many rows as words, it is a resized embedding. Otherwise it is a head for other labels.
            if base_shape[0] != self._words or shape[0] != vocabulary(self.sources[task].config):
                return False
        if voters := self.voters[name]:
            dtype = self.sources[voters[0]].tensors.entry(name).dtype
            if dtype != entry.dtype:
                raise CheckpointError(
                    f"Tensor '{name}' is {entry.dtype} in task '{task}' and {dtype} in '{voters[0]}'. Save all in one type."
                )
        return True

    def is_elected(self, name: str) -> bool:
        """Checks whether any task takes part in the election of a tensor."""
        return bool(self.voters[name])

    def _twin(self, name: str) -> str:
        """Returns the base's name of an elected tensor."""
        twin = self.base.twin_of(name)
        assert twin is not None  # or no task would have a vote
        return twin

    def start(self, name: str, dtype: str, base: RawTensor) -> np.ndarray:
        """Returns the bytes that the elected tensor is written into."""
        return np.empty(math.prod(base.shape) * WIDTHS[dtype], np.uint8)

    def elect(
        self, dtype: str, prior: np.ndarray, tasks: list[np.ndarray], elected: np.ndarray, threads: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Elects some values, and returns the masks and the sums of `tasks`."""
        return election.elect(dtype, prior, tasks, elected, threads)

    def copy_modulators(self, task: str, digest: str) -> None:
        """Copies the file of a task that is not new."""

    def tensor(self, name: str) -> RawTensor:
        """Returns the tensor to store: the elected one (and gives its masks to the writers) or that of its first holder."""
        dtype, shape = self._stored(name)
        if not self.is_elected(name):
            return self.sources[self.holders[name]].tensors.read(name)
        twin, width = self._twin(name), WIDTHS[dtype]
        base = self.base.read(twin)
        voters = [task for task in self.voters[name] if task in self.writers]
        checkpoints = [self.sources[task].tensors for task in voters]
        tensors = [checkpoint.read(name) for checkpoint in checkpoints]
        values, base_width = math.prod(shape), WIDTHS[base.dtype]
        elected = self.start(name, dtype, base)
        masks = np.empty((len(voters), election.mask_bytes(values)), np.uint8)
        sums = np.zeros(len(voters), election.SUMS)
        threads, digest = threads_for(elected.size), xxhash.xxh3_64()
        for begin in range(0, values if voters else 0, CHUNK):
            end = min(begin + CHUNK, values)
            prior = cast(base.data[begin * base_width : end * base_width], base.dtype, dtype)
            digest.update(prior)
            parts = [_padded(tensor.data[begin * width : end * width], prior, dtype) for tensor in tensors]
            chunk_masks, added = self.elect(dtype, prior, parts, elected[begin * width : end * width], threads)
            masks[:, begin // 8 : election.mask_bytes(end)] = chunk_masks
            for field in SUM_NAMES:
                sums[field] += added[field]
            self.base.release(twin, begin * base_width, end * base_width)
            for checkpoint in checkpoints:
                checkpoint.release(name, begin * width, end * width)
        self.priors[name] = digest.hexdigest()
        for task, mask, total in zip(voters, masks, sums):
            if total["not_finite"]:
                raise CheckpointError(
                    f"Tensor '{name}' of task '{task}' has {int(total['not_finite'])} values that are infinite or not a "
                    "number, unlike in the base. Such a model cannot be merged."
                )
            self.writers[task].add_mask(name, mask)
            self.sums[task][name] = np.asarray(total)
        return RawTensor(dtype, shape, elected)

    def _stored(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns dtype and shape of a stored tensor: the base's shape if it is elected, else that of its first holder."""
        entry = self.sources[(self.voters[name] or [self.holders[name]])[0]].tensors.entry(name)
        return entry.dtype, self.base.entry(self._twin(name)).shape if self.is_elected(name) else entry.shape

    def record(self, task: str, digest: str, rescale: str) -> TaskRecord:
        """Returns the record of a task. Gives the task's own tensors to its writer."""
        source, sums = self.sources[task], self.sums[task]
        config = xxhash.xxh3_64_hexdigest((self.out / task_folder(task) / CONFIG).read_bytes())
        record = TaskRecord(task, digest, files=list(source.assets), config=config)
        values = {name: math.prod(source.tensors.entry(name).shape) for name in sums}
        weights = {name: 1 / max(values[name], 1) if rescale == "tensor_mean" else 1 for name in sums}
        totals = {
            field: math.fsum(weights[name] * float(tensor[field]) for name, tensor in sums.items()) for field in SUM_NAMES
        }
        require_fine_tune(task, source, self.base, sums)
        for name in sorted(source.tensors.names()):
            if name in sums:
                scale = election.rescaler(sums[name] if rescale == "tensor" else totals)
                record.modulated[name] = Modulated(scale, self.priors[name], self._resized(task, name))
            elif not self.is_elected(name) and self._is_held(task, name):
                record.shared.append(name)
            else:
                self.writers[task].add(OWN + name, source.tensors.read(name))
        record.report = figures_of(record, sums, values)
        return record

    def _resized(self, task: str, name: str) -> int | None:
        """Returns how many rows a task's tensor shares with the elected one; None if both have the same number. Gives further
        rows to the task's writer."""
        tensors, rows = self.sources[task].tensors, (self._stored(name)[1] or (1,))[0]
        dtype, shape = tensors.entry(name)[:2]
        if not shape or shape[0] == rows:
            return None
        if shape[0] > rows:
            data = tensors.read(name).data[rows * math.prod(shape[1:]) * WIDTHS[dtype] :]
            self.writers[task].add(ROWS + name, RawTensor(dtype, (shape[0] - rows, *shape[1:]), data))
        return min(shape[0], rows)

    def _is_held(self, task: str, name: str) -> bool:
        """Checks whether the stored tensor of this name, which is not elected, equals the task's."""
        if self.holders[name] == task:
            return True
        held, mine = (self.sources[owner].tensors.read(name) for owner in (self.holders[name], task))
        return (held.dtype, held.shape) == (mine.dtype, mine.shape) and np.array_equal(held.data, mine.data)


class AdditionWriter(MergeWriter):
    """Adds a task to a merge without changing the elected weights.

    Args:
        standing: the merge.
        base_config: the base's config.json.
        name, source: the new task.
        out: folder to write.
    """

    def __init__(self, standing: MergeFolder, base_config: dict, name: str, source: TaskInput, out: Path):
        self.standing, self.added = standing, name
        sources = {
            task: TaskInput(standing.source(task), standing.task_config(task), standing.assets(task)) for task in standing.tasks
        }
        super().__init__(standing.base, base_config, sources | {name: source}, out)

    def new_tasks(self) -> list[str]:
        return [self.added]

    def votes(self, task: str, name: str) -> bool:
        if name in self.standing.elected and not self.standing.is_elected(name):
            return False
        return name in self.standing.files[task].record.modulated if task != self.added else super().votes(task, name)

    def start(self, name: str, dtype: str, base: RawTensor) -> np.ndarray:
        elected = self.standing.elected
        return elected.read(name).data if name in elected else cast(base.data, base.dtype, dtype).copy()

    def elect(
        self, dtype: str, prior: np.ndarray, tasks: list[np.ndarray], elected: np.ndarray, threads: int
    ) -> tuple[np.ndarray, np.ndarray]:
        mask, sums = election.adopt(dtype, prior, elected, tasks[0])
        return mask[None], sums[None]

    def record(self, task: str, digest: str, rescale: str) -> TaskRecord:
        record = super().record(task, digest, rescale)
        if record.report["relative"] >= 1:
            raise CheckpointError(
                f"The election of {', '.join(self.standing.tasks)} does not suit task '{task}': its weights would be farther "
                f"from its own model than the base's (cosine {record.report['cosine']:.3f}). Elect again (reelect=True, "
                "--reelect) or, for better results, merge all original checkpoints."
            )
        return record

    def copy_modulators(self, task: str, digest: str) -> None:
        if task in self.standing.files:
            copy_task(self.standing.files[task], self.out / task_folder(task) / FILE, elected=digest)


def _padded(data: np.ndarray, prior: np.ndarray, dtype: str) -> np.ndarray:
    """Returns a task's weights, followed by the base's where the task has fewer."""
    return cast(data, dtype, dtype) if data.size == prior.size else np.concatenate([data, prior[data.size :]])


def _same_files(first: Mapping[str, Path], second: Mapping[str, Path]) -> bool:
    return first.keys() == second.keys() and all(first[name].read_bytes() == second[name].read_bytes() for name in first)
