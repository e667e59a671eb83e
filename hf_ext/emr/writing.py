"""Writes the folder of a merge, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import xxhash

from hf_ext.emr import election
from hf_ext.emr.agreement import require_agreement
from hf_ext.emr.ballot import stored_tensors
from hf_ext.emr.checks import TaskModel, require_closer
from hf_ext.emr.coding import CHUNK, CodedTask, code_tasks
from hf_ext.emr.folder import MergeFolder
from hf_ext.emr.layout import task_folder
from hf_ext.emr.modulators import FILE, OWN, TaskFile, copy_task
from hf_ext.emr.new_task import ElectedTask
from hf_ext.emr.options import MergeOptions
from hf_ext.storage.config_file import CONFIG, EMR, HINT
from hf_ext.storage.delta.source import DeltaCheckpoint
from hf_ext.storage.delta.writer import write_delta
from hf_ext.storage.files import copy, scan, write_json
from hf_ext.storage.layout import GENERATION, INDEX
from hf_ext.storage.native import WIDTHS, cast
from hf_ext.storage.plain_writer import shards_of
from hf_ext.storage.prefetch import threads_for
from hf_ext.storage.safetensors_file import RawTensor, float_name
from hf_ext.storage.source import TensorSource
from hf_ext.storage.weights import PARTS_OF

ENTRY = 250  # bytes that the entry of a tensor takes in the headers of a folder, about


class MergeWriter(ExitStack):
    """Elects the weights of a merge and writes its folder. Memory: one tensor and a million values of each task, or the whole
    tensor of each compressed task.

    Args:
        base, base_config: the model that all tasks were fine-tuned from, and its config.json.
        models: the models of all tasks.
        out: folder to write.
        merged: a merge to add tasks to, to remove tasks from, or to rename them. The tasks that stay keep all their bits.
        options: of the new tasks. Coded tasks do not vote.
    """

    def __init__(
        self,
        base: TensorSource,
        base_config: dict,
        models: Sequence[TaskModel],
        out: Path,
        merged: MergeFolder | None,
        options: MergeOptions,
    ):
        super().__init__()
        self.base, self.models, self.out, self.merged, self.options = base, models, out, merged, options
        self.standing: Mapping[str, TaskFile] = merged.files if merged else {}
        stored = stored_tensors(base, base_config, models, self.standing)
        self.stored = {tensor.name: tensor for tensor in stored}
        new = [(model, base, stored, self._folder(model) / FILE) for model in models if model.task not in self.standing]
        self.coded = [CodedTask(*task) for task in new if options.is_coded]
        self.elected = {task[0]: ElectedTask(*task) for task in new if not options.is_coded}
        self.base_digests: dict[str, str] = {}  # elected tensor -> checksum of the base's, in its type
        for task in (*self.coded, *self.elected.values()):
            self.enter_context(closing(task.writer))

    def _folder(self, model: TaskModel) -> Path:
        return self.out / task_folder(model.task)

    def write_weights(self) -> None:
        """Writes the elected weights and all files of the folder but those of new tasks and config.json. Raises CheckpointError
        if the election suits a task less than the base would."""
        options = self.options
        if self.elected and not options.accept_conflicts:
            elected = self.merged.elected if self.merged else None
            require_agreement([*self.stored.values()], [*self.elected], self.base, elected, options.rescale)
        tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in self.stored.items()}
        dtype = float_name(tensors[name][0] for name in sorted(tensors))
        files = shards_of(tensors, self._tensor, self.out, options.max_shard_size, {PARTS_OF: EMR})
        recorded, [self.digest] = write_delta([files], self.base, self.out)
        assert recorded is not None  # as a merge has a base
        self.settings = {
            "quant_method": EMR,
            "hint": HINT,
            "base": recorded.name,
            "revision": recorded.revision,
            "dtype": dtype,
        }
        listed = {next(iter(file.entries)): f"../{file.path.name}" for file in files}
        first = self.models[0].assets
        for name, path in first.items():
            copy(path, self.out / name)
        for model in self.models:
            folder, assets = self._folder(model), model.assets
            same = assets.keys() == first.keys() and all(
                assets[name].read_bytes() == first[name].read_bytes() for name in first
            )
            folder.mkdir(exist_ok=True)
            settings = {"quant_method": EMR, "dtype": dtype, "task": model.task}
            write_json(folder / CONFIG, model.config | {"quantization_config": settings})
            write_json(folder / INDEX, {"metadata": {}, "weight_map": listed})
            for name, path in assets.items():
                if not same or name == GENERATION:  # which loading a task's folder reads there
                    copy(path, folder / name)
            if file := self.standing.get(model.task):
                shared = [name for name in file.own if model in self.stored[name].sharers]
                fields = {"elected": self.digest, "ties": dict(model.ties), "shared": sorted([*file.record.shared, *shared])}
                fields |= {"task": model.task, "config": self._config_digest(model)}
                copy_task(file, folder / FILE, [OWN + name for name in shared], **fields)

    def write_tasks(self, uncoded: int | None = None) -> None:
        """Writes the files of new tasks, and config.json. May be called again, with another size of coded tasks: `uncoded` are
        the bytes that the folder takes besides the coded changes, if that is measured. Raises CheckpointError if the election
        suits a task less than the base would."""
        elected = [
            (task, task.elected_record(self.digest, self._config_digest(model), self.options.rescale, self.base_digests))
            for model, task in self.elected.items()
        ]
        if not self.options.accept_conflicts:
            require_closer({record.task: (record.report["relative"], record.report["cosine"]) for _, record in elected})
        for task, record in elected:
            task.writer.finish(record)
        if self.coded:
            code_tasks(self.coded, self.options, self._uncoded() if uncoded is None else uncoded)
            for coded in self.coded:
                coded.writer.finish(coded.coded_record(self.digest, self._config_digest(coded.model)))
        digests = {model.task: TaskFile(self._folder(model) / FILE).digest for model in self.models}
        settings = self.settings | {"tasks": [*digests], "digests": digests}
        write_json(self.out / CONFIG, self.models[0].config | {"quantization_config": settings})

    @property
    def coded_bytes(self) -> int:
        return sum(task.coded_bytes for task in self.coded)

    def _config_digest(self, model: TaskModel) -> str:
        return xxhash.xxh3_64_hexdigest((self._folder(model) / CONFIG).read_bytes())

    def _uncoded(self) -> int:
        """Returns the bytes that all but coded tensors will take in the folder, about."""
        entries = [entry.nbytes for task in self.coded for entry in task.writer.entries.values()]
        count = len(entries) + sum(len(task.tensors) for task in self.coded)
        return ENTRY * count + sum(entries) + sum((self.out / path).stat().st_size for path in scan(self.out))

    def _tensor(self, name: str) -> RawTensor:
        """Returns the tensor to store: the elected one (and gives its masks to the tasks) or that of its holder."""
        tensor = self.stored[name]
        if not tensor.voters:
            return tensor.holder.tensors.read(name)
        dtype, width = tensor.dtype, WIDTHS[tensor.dtype]
        if self.merged and name in self.merged.elected:
            base = RawTensor(dtype, tensor.shape, self.merged.parts.checked_base(name))
        else:
            base = self.base.read(tensor.twin)
        base_width, values = WIDTHS[base.dtype], math.prod(tensor.shape)
        voters = [model for model in tensor.voters if model in self.elected]
        weights = [model.tensors.read(name) for model in voters]
        if voters and not self.merged:
            # Memory for one tensor less: a decoded one is overwritten once its values are read.
            decoded = (weight.data for model, weight in zip(voters, weights) if isinstance(model.tensors, DeltaCheckpoint))
            fitting = (data for data in decoded if data.flags.writeable and data.size == values * width)
            elected = next(fitting, None)
            if elected is None:
                elected = np.empty(values * width, np.uint8)
        elif self.merged and self.merged.is_elected(name):
            elected = self.merged.elected.read(name).data
            if not self.elected and not self.coded:
                self._clear(name, elected, cast(base.data, base.dtype, dtype))
        else:
            elected = cast(base.data, base.dtype, dtype).copy()
        masks = np.empty((len(voters), election.mask_bytes(values)), np.uint8)
        sums = np.zeros(len(voters), election.SUMS)
        threads, digest = threads_for(elected.size), xxhash.xxh3_64()
        for begin in range(0, values if voters else 0, CHUNK):
            end = min(begin + CHUNK, values)
            base_part = cast(base.data[begin * base_width : end * base_width], base.dtype, dtype)
            digest.update(base_part)
            parts = [weight.data[begin * width : end * width] for weight in weights]
            chunk = elected[begin * width : end * width]
            chunk_masks, chunk_sums = election.vote(dtype, base_part, parts, chunk, self.merged is not None, threads)
            masks[:, begin // 8 : election.mask_bytes(end)] = chunk_masks
            for field in election.SUM_NAMES:
                sums[field] += chunk_sums[field]
            self.base.release(tensor.twin, begin * base_width, end * base_width)
            for model in voters:
                model.tensors.release(name, begin * width, end * width)
        self.base_digests[name] = digest.hexdigest()
        for model, mask, total in zip(voters, masks, sums):
            self.elected[model].add_sums(name, np.asarray(total))
            self.elected[model].writer.add_mask(name, mask)
        return RawTensor(dtype, tensor.shape, elected)

    def _clear(self, name: str, elected: np.ndarray, base_part: np.ndarray) -> None:
        """Overwrites elected weights that no task takes any more with the base's."""
        assert self.merged is not None
        words = f"<u{WIDTHS[self.stored[name].dtype]}"
        elected, base_part = elected.view(words), base_part.view(words)
        free = np.ones(elected.size, bool)
        for model in self.stored[name].voters:
            if name in self.standing[model.task].record.modulated:
                mask, _ = self.merged.parts.modulator(model.task, name)
                if mask is not None:
                    free &= np.unpackbits(mask, count=free.size, bitorder="little") == 0
        np.copyto(elected, base_part, where=free)
