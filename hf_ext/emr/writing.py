"""Checkpoints into a merge, tensor by tensor."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hf_ext.emr import election
from hf_ext.emr.merged import METHOD, Merged, task_folder
from hf_ext.emr.modulators import FILE, OWN, ROWS, Modulated, TaskRecord, TaskWriter, copy_task
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

CHUNK = 1 << 20  # values of each task worked on at a time
RESCALE = ("tensor", "paper")


@dataclass(frozen=True)
class Source:
    """A task's checkpoint to merge: its tensors, its config.json, and its other files by name."""

    tensors: TensorSource
    config: dict
    assets: Mapping[str, Path]


class MergeWriter:
    """One merge under way. Memory: a few million values of each task, and one tensor.

    Args:
        base: the model that all tasks were tuned from, and its config.json.
        sources: the tasks.
        out: folder to write.

    Raises:
        CheckpointError: the checkpoints cannot be merged.
        BaseModelError: they are not fine-tunes of this base.
    """

    def __init__(self, base: TensorSource, base_config: dict, sources: Mapping[str, Source], out: Path):
        self.base, self.sources, self.out = base, sources, out
        self._words = _vocabulary(base_config)
        _require_one_architecture(base_config, sources)
        for task, source in sources.items():
            _require_same_layers(task, source.tensors, base)
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
                    "no fine-tune of it."
                )
        self.writers = {task: TaskWriter(out / task_folder(task) / FILE) for task in self.new_tasks()}
        self.sums: dict[str, dict[str, np.ndarray]] = {task: {} for task in self.writers}

    def write(self, rescale: str, max_shard_size: int | str) -> None:
        """Writes the whole folder.

        Args:
            rescale: "tensor" for a λ of each tensor, "paper" for one of the whole model.
            max_shard_size: as in `save_pretrained`.
        """
        try:
            if rescale not in RESCALE:
                raise CheckpointError(f"There is no way to rescale called {rescale!r}; choose one of: {', '.join(RESCALE)}.")
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
                    shutil.copyfile(path, self.out / task_folder(task) / name)
        for name, path in first.assets.items():
            shutil.copyfile(path, self.out / name)
        dtype = float_name(tensors[name][0] for name in sorted(tensors))
        settings = {"quant_method": METHOD, "hint": HINT, "base": recorded.name, "revision": recorded.revision, "dtype": dtype}
        write_json(self.out / CONFIG, first.config | {"quantization_config": settings | {"tasks": list(self.sources)}})

    def new_tasks(self) -> list[str]:
        """The tasks whose masks come of this merge."""
        return list(self.sources)

    def votes(self, task: str, name: str) -> bool:
        """Whether a task's tensor takes part in the election. If not it is the task's own: a head, or no float."""
        twin, entry = self.base.twin_of(name), self.sources[task].tensors.entry(name)
        if twin is None or entry.dtype not in FLOATS or self.base.entry(twin).dtype not in FLOATS or not math.prod(entry.shape):
            return False
        shape, found = self.base.entry(twin).shape, entry.shape
        if shape != found:
            in_layer = layer_of(name) is not None and found[:1] != (_labels(self.sources[task].config),)
            if len(shape) != len(found) or shape[1:] != found[1:] or in_layer:
                raise CheckpointError(
                    f"Tensor '{name}' of task '{task}' is {list(found)}, but {list(shape)} in the base {self.base}: these are "
                    "models of different sizes. Give the base that all tasks were fine-tuned from."
                )
            # As many rows as there are words: resized embeddings. Any other number of rows makes it a head for other labels.
            if shape[0] != self._words or found[0] != _vocabulary(self.sources[task].config):
                return False
        if others := self.voters[name]:
            dtype = self.sources[others[0]].tensors.entry(name).dtype
            if dtype != entry.dtype:
                raise CheckpointError(
                    f"Tensor '{name}' is {entry.dtype} in task '{task}' and {dtype} in '{others[0]}': save them in one type."
                )
        return True

    def is_elected(self, name: str) -> bool:
        return bool(self.voters[name])

    def start(self, name: str, dtype: str, base: RawTensor) -> np.ndarray:
        """The bytes into which a tensor is elected."""
        return np.empty(math.prod(base.shape) * WIDTHS[dtype], np.uint8)

    def elect(
        self, dtype: str, prior: np.ndarray, tasks: list[np.ndarray], elected: np.ndarray, threads: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Elects some values; the masks and the sums of `tasks`."""
        return election.elect(dtype, prior, tasks, elected, threads)

    def copy_modulators(self, task: str, digest: str) -> None:
        """Brings along the file of a task that is not new."""

    def tensor(self, name: str) -> RawTensor:
        """The tensor to store: the elected one, after its masks have gone to the tasks' writers, or the first holder's."""
        dtype, shape = self._stored(name)
        if not self.is_elected(name):
            return self.sources[self.holders[name]].tensors.read(name)
        twin, width = self.base.twin_of(name), WIDTHS[dtype]
        base = self.base.read(twin)
        voters = [task for task in self.voters[name] if task in self.writers]
        checkpoints = [self.sources[task].tensors for task in voters]
        tensors = [checkpoint.read(name) for checkpoint in checkpoints]
        values, base_width = math.prod(shape), WIDTHS[base.dtype]
        elected = self.start(name, dtype, base)
        masks = np.empty((len(voters), election.mask_bytes(values)), np.uint8)
        sums = np.zeros(len(voters), election.SUMS)
        threads = threads_for(elected.size)
        for begin in range(0, values if voters else 0, CHUNK):
            end = min(begin + CHUNK, values)
            prior = cast(base.data[begin * base_width : end * base_width], base.dtype, dtype)
            parts = [_padded(tensor.data[begin * width : end * width], prior, dtype) for tensor in tensors]
            found, added = self.elect(dtype, prior, parts, elected[begin * width : end * width], threads)
            masks[:, begin // 8 : election.mask_bytes(end)] = found
            for field in election.SUMS.names:
                sums[field] += added[field]
            self.base.release(twin, begin * base_width, end * base_width)
            for checkpoint in checkpoints:
                checkpoint.release(name, begin * width, end * width)
        for task, mask, total in zip(voters, masks, sums):
            if total["not_finite"]:
                raise CheckpointError(
                    f"Tensor '{name}' of task '{task}' has {int(total['not_finite'])} values that are infinite or not a number "
                    "and not those of the base; such a model cannot be merged."
                )
            self.writers[task].add_mask(name, mask)
            self.sums[task][name] = total
        return RawTensor(dtype, shape, elected)

    def _stored(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type and shape of a tensor among the elected weights: the base's shape, or the first holder's if not elected."""
        entry = self.sources[(self.voters[name] or [self.holders[name]])[0]].tensors.entry(name)
        return entry.dtype, self.base.entry(self.base.twin_of(name)).shape if self.is_elected(name) else entry.shape

    def record(self, task: str, digest: str, rescale: str) -> TaskRecord:
        """Everything about a task but its masks; its own tensors go to its writer."""
        source, sums = self.sources[task], self.sums[task]
        config = xxhash.xxh3_64_hexdigest((self.out / task_folder(task) / CONFIG).read_bytes())
        record = TaskRecord(task, digest, files=list(source.assets), config=config)
        totals = {field: math.fsum(float(tensor[field]) for tensor in sums.values()) for field in election.SUMS.names}
        _require_fine_tune(task, source, self.base, sums)
        for name in sorted(source.tensors.names()):
            if name in sums:
                scale = election.rescaler(sums[name] if rescale == "tensor" else totals)
                record.modulated[name] = Modulated(scale, self._resized(task, name))
            elif not self.is_elected(name) and self._is_held(task, name):
                record.shared.append(name)
            else:
                self.writers[task].add(OWN + name, source.tensors.read(name))
        values = {name: math.prod(source.tensors.entry(name).shape) for name in sums}
        record.report = figures_of(record, sums, values)
        return record

    def _resized(self, task: str, name: str) -> int | None:
        """How many rows a task's tensor shares with the elected one, if not all; further ones go to the task's writer."""
        tensors, rows = self.sources[task].tensors, (self._stored(name)[1] or (1,))[0]
        dtype, shape = tensors.entry(name)[:2]
        if not shape or shape[0] == rows:
            return None
        if shape[0] > rows:
            data = tensors.read(name).data[rows * math.prod(shape[1:]) * WIDTHS[dtype] :]
            self.writers[task].add(ROWS + name, RawTensor(dtype, (shape[0] - rows, *shape[1:]), data))
        return min(shape[0], rows)

    def _is_held(self, task: str, name: str) -> bool:
        """Whether a tensor that is not elected is the one that stands among the elected weights."""
        if self.holders[name] == task:
            return True
        held, mine = (self.sources[owner].tensors.read(name) for owner in (self.holders[name], task))
        return (held.dtype, held.shape) == (mine.dtype, mine.shape) and np.array_equal(held.data, mine.data)


class AdditionWriter(MergeWriter):
    """One more task for a merge whose election stands.

    Args:
        standing: the merge.
        name, source: the new task.
    """

    def __init__(self, standing: Merged, base_config: dict, name: str, source: Source, out: Path):
        self.standing, self.added = standing, name
        sources = {
            task: Source(standing.source(task), standing.task_config(task), standing.assets(task)) for task in standing.tasks
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
                f"The election of {', '.join(self.standing.tasks)} does not suit task '{task}': it would end up farther from "
                f"its own model than the base is (cosine {record.report['cosine']:.3f}). Elect anew (reelect=True, --reelect), "
                "or better, merge the original checkpoints again with this one."
            )
        return record

    def copy_modulators(self, task: str, digest: str) -> None:
        if task in self.standing.files:
            copy_task(self.standing.files[task], self.out / task_folder(task) / FILE, elected=digest)


def _padded(data: np.ndarray, prior: np.ndarray, dtype: str) -> np.ndarray:
    """A task's weights, followed by the base's where the task has fewer."""
    return cast(data, dtype, dtype) if data.size == prior.size else np.concatenate([data, prior[data.size :]])


def _vocabulary(config: dict) -> int | None:
    """The number of words that a config.json speaks of, of the text model if there are several."""
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def _labels(config: dict) -> int:
    """Returns the number of labels of a classifier with this config.json."""
    return len(config.get("id2label") or (0, 1))


def _same_files(first: Mapping[str, Path], second: Mapping[str, Path]) -> bool:
    return first.keys() == second.keys() and all(first[name].read_bytes() == second[name].read_bytes() for name in first)


def _require_one_architecture(base_config: dict, sources: Mapping[str, Source]) -> None:
    """All tasks must be of one class, of which one model is to switch between them; the base may have another head."""
    reference = next(iter(sources))
    for task, source in sources.items():
        kinds = {base_config.get("model_type"), source.config.get("model_type")} - {None}
        if len(kinds) > 1:
            raise CheckpointError(
                f"Task '{task}' is a {source.config['model_type']} model, the base is {base_config['model_type']}. Merge "
                "fine-tunes of one base, and give that base."
            )
        found, expected = source.config.get("architectures"), sources[reference].config.get("architectures")
        if found and expected and found != expected:
            raise CheckpointError(
                f"Task '{task}' has architectures {found}, task '{reference}' {expected}: one model cannot switch between "
                "them. Merge checkpoints of one class."
            )


def _require_same_layers(task: str, tensors: TensorSource, base: TensorSource) -> None:
    """Raises CheckpointError if the task lacks a layer of the base or has a layer more, in a stack of layers that both have."""
    pairs = []
    for name in tensors.names():
        layer, twin = layer_of(name), base.twin_of(name)
        base_layer = layer_of(twin) if twin else None
        if layer and base_layer and layer[1] == base_layer[1]:  # names of a base with one layer fit every layer by their ends
            pairs.append((layer, base_layer))
    for names, common, owner, other in (
        (tensors.names(), {layer for layer, _ in pairs}, f"task '{task}' ({tensors})", f"the base {base}"),
        (base.names(), {layer for _, layer in pairs}, f"the base {base}", f"task '{task}' ({tensors})"),
    ):
        stacks = {stack for stack, _ in common}
        for name in names:
            layer = layer_of(name)
            if layer and layer[0] in stacks and layer not in common:
                raise CheckpointError(
                    f"Tensor '{name}' of {owner} is in a layer that {other} does not have: these are models of different "
                    "sizes. Give the base that all tasks were fine-tuned from."
                )


def _require_fine_tune(task: str, source: Source, base: TensorSource, sums: Mapping[str, np.ndarray]) -> None:
    """Raises BaseModelError if the task vector is as large as the base's weights: that of a stranger is larger still. Norms and
    biases do not count where there are matrices, as they are much alike in all models."""
    matrices = [name for name in sums if len(source.tensors.entry(name).shape) > 1] or list(sums)
    moved, weights = (math.fsum(float(sums[name][field]) for name in matrices) for field in ("task_squares", "base_squares"))
    if moved >= weights > 0:
        raise BaseModelError(
            f"The weights of task '{task}' ({source.tensors}) differ from those of the base {base} by "
            f"{math.sqrt(moved / weights):.2f} times the base's own length: it is no fine-tune of this base."
        )
