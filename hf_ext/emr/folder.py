"""An opened merge, and the checkpoint of each of its tasks."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash
from huggingface_hub import snapshot_download

from hf_ext.emr import election
from hf_ext.emr.checks import TaskModel
from hf_ext.emr.layout import task_files, task_folder
from hf_ext.emr.modulators import FILE, OWN, REPAIR, ROWS, TaskFile
from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.config_file import CONFIG, read_config, storage_settings
from hf_ext.storage.files import copy, write_json
from hf_ext.storage.hub import HUB, Hub, first_line, repository_of, snapshot_of
from hf_ext.storage.layout import GENERATION, select_weights
from hf_ext.storage.native import FLOATS, WIDTHS, cast
from hf_ext.storage.open import open_delta
from hf_ext.storage.plain_writer import shards_of
from hf_ext.storage.prefetch import Prefetcher, threads_for
from hf_ext.storage.safetensors_file import ComputedFile, Entry, RawTensor
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import OF_TASK

KEPT_TASKS = 4  # whose masks stay in memory


class MergeFolder:
    """The opened folder of a merge. Computes the tensors of its tasks one by one.

    Args:
        folder: the merge's folder.
        base: folder or Hub id of the base, if it is no longer where config.json says.
        revision: commit of that base.
        hub: access settings for the base.
    """

    def __init__(
        self, folder: str | os.PathLike, base: str | os.PathLike | None = None, revision: str | None = None, hub: Hub = HUB
    ):
        self.folder = Path(folder).absolute()  # as the working directory may change
        self.hub = hub
        self.files = task_files(self.folder)
        self.tasks = list(self.files)
        self.elected = open_delta(select_weights(self.folder), base, revision, hub)
        self.base = self.elected.base
        for file in self.files.values():
            if file.record.elected != self.elected.digest:
                raise CorruptFileError(
                    f"{file.path} belongs to another merge than the weights beside it: the folder was not written completely. "
                    f"{REPAIR}"
                )
            self._require_tensors(file)
        self._require_all_listed()
        self._elected: dict[str, RawTensor] = {}  # what `keep` has read
        self._priors: dict[str, np.ndarray] = {}
        self._modulators: dict[str, dict[str, tuple[np.ndarray | None, float]]] = {}  # of the tasks that were used last

    def _require_all_listed(self) -> None:
        """Raises CorruptFileError if the folder has files of a task that config.json does not list."""
        for path in sorted(self.folder.glob(f"{task_folder('*')}/{FILE}")):
            task = path.parent.name.removeprefix(task_folder(""))
            if task not in self.files and _belongs(path, self.elected.digest):
                raise CorruptFileError(
                    f"{self.folder / CONFIG} is damaged: it does not list the task '{task}', whose files belong to this merge. "
                    f"{REPAIR}"
                )

    def _require_tensors(self, file: TaskFile) -> None:
        """Raises CorruptFileError unless the elected weights and the base have all tensors that a task is made from."""
        for name in [*file.record.shared, *file.record.modulated, *file.coded]:
            twin = self.base.twin_of(name)
            stored = self.elected.entry(name) if name in self.elected else None
            prior = self.base.entry(twin) if twin else None
            fits = stored and prior and prior.shape == stored.shape and {prior.dtype, stored.dtype} <= FLOATS.keys()
            if not stored or not fits and name not in file.record.shared:
                raise CorruptFileError(
                    f"{file.path} is damaged: its tensor '{name}' does not fit the elected weights and the base. {REPAIR}"
                )

    def __reduce__(self) -> tuple:
        # Mapped files cannot be pickled; the copy opens them again.
        return MergeFolder, (self.folder, self.base.name, self.base.revision, self.hub)

    def __deepcopy__(self, memo) -> MergeFolder:
        return self

    def reopened(self) -> MergeFolder:
        """Returns the same merge, with nothing in memory that the files may no longer hold."""
        again = MergeFolder(self.folder, self.base.name, self.base.revision, self.hub)
        if again.fingerprint != self.fingerprint:
            raise CheckpointError(f"{again.folder} holds another merge than when the model was loaded. Load the model again.")
        return again

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
            elected = self._elected.get(name) or self.elected.read(name)
            having = [task for task in tasks if name in self.files[task].record.modulated]
            return elected, self.prior(name), {task: self.modulator(task, name) for task in having}

        for name, (elected, prior, modulators) in [*Prefetcher(read, sizes)]:
            self._elected[name], self._priors[name] = elected, prior  # a view of the base's file, if plain and of that type
            for task, modulator in modulators.items():
                self._modulators[task][name] = modulator

    def target(self, task: str, to: str, name: str, live: np.ndarray) -> election.Target:
        """Returns the change of a weight in memory from one task's to another's. `keep` has read both."""
        elected, masks = self._elected[name], (*self._modulators[task][name], *self._modulators[to][name])
        return election.Target(FLOATS[elected.dtype], self._priors[name], elected.data, *masks, live)

    def require_same_base(self, name: str) -> None:
        """Raises BaseModelError if the base's file no longer holds the tensor that was merged against."""
        self._require_prior(name, self._priors[name] if name in self._priors else self.prior(name))

    @property
    def fingerprint(self) -> tuple:
        """Identifies the merge: the checksums of all its tensors."""
        return self.elected.digest, *((task, file.record.checksums) for task, file in self.files.items())

    def require_task(self, task: str) -> None:
        if not isinstance(task, str) or task not in self.files:
            raise CheckpointError(f"There is no task {task!r} in {self.folder}; its tasks are {', '.join(self.tasks)}.")

    def task_config(self, task: str) -> dict:
        """Returns the config.json of a task's own model."""
        self.require_task(task)
        path = self.folder / task_folder(task) / CONFIG
        if not path.is_file():
            raise CorruptFileError(f"{path} is missing: the folder is incomplete. {REPAIR}")
        if xxhash.xxh3_64_hexdigest(path.read_bytes()) != self.files[task].record.config:
            raise CorruptFileError(f"{path} is damaged: checksum mismatch. {REPAIR}")
        config = read_config(path)
        config.pop("quantization_config", None)  # by which the task's folder loads
        return config

    def generation_config(self, task: str) -> dict:
        path = self.assets(task).get(GENERATION)
        return read_config(path) if path else {}

    def assets(self, task: str) -> dict[str, Path]:
        """Returns the files of a task's checkpoint besides config.json and weights, by name."""
        places = {name: (self.folder / task_folder(task) / name, self.folder / name) for name in self.files[task].record.files}
        return {name: path for name, paths in places.items() if (path := next(filter(Path.exists, paths), None))}

    def is_elected(self, name: str) -> bool:
        """Checks whether a stored tensor was elected; if not, it is the base's, or belongs to the tasks that have it."""
        return any(name in file.record.modulated for file in self.files.values())

    def is_from_base(self, task: str, name: str) -> bool:
        """Checks whether a task's tensor is made from the base's."""
        return name in self.files[task].record.modulated or self.files[task].is_coded(name)

    def prior(self, name: str) -> np.ndarray:
        """Returns the base's bytes of an elected tensor, cast to the tensor's type. Raises BaseModelError if they are not those
        that were merged against."""
        if name in self._priors:
            return self._priors[name]
        twin = self.base.twin_of(name)
        assert twin is not None  # checked when the folder was opened
        base = self.base.read(twin)
        prior = cast(base.data, base.dtype, self.elected.entry(name).dtype)
        self._require_prior(name, prior)
        return prior

    def _require_prior(self, name: str, prior: np.ndarray) -> None:
        """Raises BaseModelError unless these are the bytes that a tensor of the base had when the merge was written."""
        modulated = [file.record.modulated[name] for file in self.files.values() if name in file.record.modulated]
        stored = {f"{self.elected.identity(name):016x}"}  # of the base's own tensor, where no task was elected
        if {xxhash.xxh3_64_hexdigest(prior)} != ({rule.prior for rule in modulated} or stored):
            raise BaseModelError(
                f"The tensor '{name}' of the base {self.base} has changed or is damaged: checksum mismatch. Restore the base, "
                "and load the merge again."
            )

    def verify_tensor(self, name: str) -> None:
        """Raises CorruptFileError or BaseModelError if a stored tensor, or the base's that its tasks need, is damaged."""
        self.elected.read(name)
        if self.is_elected(name):
            self.prior(name)

    def entry(self, task: str, name: str) -> Entry:
        """Returns dtype and shape of a task's tensor."""
        file = self.files[task]
        name = file.record.ties.get(name, name)
        if file.is_coded(name):
            header = file.header(name)
            return Entry(header.dtype, header.shape, 0, header.size)
        entry = file.entries.get(OWN + name) or self.elected.entry(name)
        modulated = file.record.modulated.get(name)
        if modulated is None or modulated.rows is None:
            return entry
        rows = file.entries.get(ROWS + name)
        shape = (modulated.rows + (rows.shape[0] if rows else 0), *entry.shape[1:])
        return Entry(entry.dtype, shape, 0, math.prod(shape) * WIDTHS[entry.dtype])

    def modulator(self, task: str, name: str) -> tuple[np.ndarray | None, float]:
        """Returns the mask and the rescaler that make the task's tensor from the elected one."""
        if name in (known := self._modulators.get(task, {})):
            return known[name]
        file = self.files[task]
        return file.mask(name, math.prod(self.elected.entry(name).shape)), file.record.modulated[name].scale

    def require_whole(self) -> None:
        """Raises CorruptFileError if a file of the merge or of its base was cut off since it was opened."""
        self.elected.require_whole()
        for file in self.files.values():
            file.require_whole()

    def tensor(self, task: str, name: str, out: np.ndarray | None = None) -> RawTensor:
        """Returns a tensor of a task's model, in memory of its own, or in `out` where its bytes are computed."""
        file = self.files[task]
        name = file.record.ties.get(name, name)
        if OWN + name in file.entries:
            tensor = file.read(OWN + name)
            return replace(tensor, data=tensor.data.copy())
        if file.is_coded(name):
            return file.decoded(name, self.base, out)
        if name not in file.record.modulated:
            return self.elected.read(name)
        source = self._elected.get(name) or self.elected.read(name)
        if out is None or out.size != source.data.size:
            out = np.empty_like(source.data) if name in self._elected else source.data
        modulator = self.modulator(task, name)
        election.modulate(source.dtype, self.prior(name), source.data, *modulator, out, threads_for(out.size))
        entry = self.entry(task, name)
        if entry.shape != source.shape:
            row = math.prod(entry.shape[1:]) * WIDTHS[entry.dtype]
            kept = out[: (file.record.modulated[name].rows or 0) * row]
            out = np.concatenate([kept, file.read(ROWS + name).data]) if ROWS + name in file.entries else kept
        return RawTensor(entry.dtype, entry.shape, out)

    def model(self, task: str) -> TaskModel:
        """Returns a task's model, to merge it with others."""
        ties = self.files[task].record.ties
        return TaskModel(task, self.folder, self.source(task), self.task_config(task), self.assets(task), ties)

    def source(self, task: str) -> TaskSource:
        """Returns the tensors of a task's model."""
        self.require_task(task)
        return TaskSource(self, task)


def open_merge(folder: Path, base: str | os.PathLike | None = None, revision: str | None = None, hub: Hub = HUB) -> MergeFolder:
    """Opens a merge (see `MergeFolder`). In the Hub's cache, downloads the files of its tasks first, if they are not there."""
    tasks = storage_settings(folder).get("tasks")
    tasks = tasks if isinstance(tasks, list) else []  # anything else is refused when the merge is opened
    wanted = [folder / task_folder(str(task)) / name for task in tasks for name in (FILE, CONFIG)]
    snapshot = snapshot_of(folder)
    if snapshot is not None and not all(path.exists() for path in wanted):
        repository = repository_of(snapshot)
        failure, reason = None, ""
        try:
            settings = hub._replace(cache_dir=snapshot.parents[2])._asdict()
            snapshot_download(repository, revision=snapshot.name, **settings)
        except OSError as error:
            failure, reason = error, f": {first_line(error).rstrip('.')}"
        if lacking := [path for path in wanted if not path.exists()]:  # huggingface_hub 2 may return an incomplete snapshot
            raise CheckpointError(
                f"'{lacking[0].relative_to(folder)}' of the merge {repository} could not be downloaded{reason}. If the merge "
                "is private, give token=, sign in with `hf auth login`, or set HF_TOKEN."
            ) from failure
    return MergeFolder(folder, base, revision, hub)


def _belongs(path: Path, elected: str) -> bool:
    """Checks whether a file is one of a task of the merge with these elected weights."""
    try:
        return TaskFile(path).record.elected == elected
    except CorruptFileError:  # of which merge, nobody can tell
        return False


class TaskSource(TensorSource):
    """The tensors of one task of a merge, computed when they are read; `names` leaves out the weights that the task ties and
    other tasks hold apart."""

    def __init__(self, merged: MergeFolder, task: str):
        self.name = f"{merged.folder}{OF_TASK}{task}"
        self.paths = [merged.files[task].path, *merged.elected.paths]
        self._merged, self._task = merged, task

    def names(self) -> list[str]:
        return self._merged.files[self._task].names()

    def entry(self, name: str) -> Entry:
        return self._merged.entry(self._task, name)

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        return self._merged.tensor(self._task, name, out)

    def __contains__(self, name: object) -> bool:
        return name in self._merged.files[self._task].record.ties or super().__contains__(name)

    def identity(self, name: str) -> Hashable:
        # Merges may share elected weights and the name of a task, but not the task's files.
        is_shared = name in self._merged.files[self._task].record.shared
        return self._merged.elected.identity(name) if is_shared else (self.name, name)


def task_files_into(merged: MergeFolder, task: str, out: Path, max_shard_size: int | str = "50GB") -> list[ComputedFile]:
    """Writes the files of a task's plain checkpoint that hold no weights into `out`, and returns those that do."""
    for name, path in merged.assets(task).items():
        copy(path, out / name)
    write_json(out / CONFIG, merged.task_config(task))
    tensors = merged.source(task)
    entries = {name: tensors.entry(name)[:2] for name in tensors.names()}
    return shards_of(entries, tensors.read, out, max_shard_size)
