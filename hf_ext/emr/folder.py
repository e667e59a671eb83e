"""An opened merge, and the checkpoint of each of its tasks."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hf_ext.emr import election
from hf_ext.emr.download import merge_folder
from hf_ext.emr.layout import task_files, task_folder
from hf_ext.emr.modulators import CODE, FILE, OWN, REPAIR, ROWS, TaskFile
from hf_ext.emr.parts import Parts
from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage.config_file import CONFIG, read_config
from hf_ext.storage.hub import HUB, Hub
from hf_ext.storage.layout import GENERATION, select_weights
from hf_ext.storage.native import FLOATS, WIDTHS
from hf_ext.storage.open import open_delta
from hf_ext.storage.prefetch import threads_for
from hf_ext.storage.safetensors_file import Entry, RawTensor
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import OF_TASK

if TYPE_CHECKING:
    import torch

    from hf_ext.storage.delta.payload import Header


class MergeFolder:
    """The opened folder of a merge. Computes the tensors of its tasks one by one. `base` is the folder or Hub id of the base,
    if it is no longer where config.json says, `revision` that base's commit, and `hub` its access settings."""

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
        self.parts = Parts(self.files, self.elected)

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
            base = self.base.entry(twin) if twin else None
            fits = stored and base and base.shape == stored.shape and {base.dtype, stored.dtype} <= FLOATS.keys()
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

    def verify_tensor(self, name: str) -> None:
        """Raises CorruptFileError or BaseModelError if a stored tensor, or the base's that its tasks need, is damaged."""
        self.elected.read(name)
        if self.is_elected(name):
            self.parts.base_data(name)

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
        kept = self.parts.kept.get(name)
        source = kept or self.elected.read(name)
        if out is None or out.size != source.data.size:
            out = np.empty_like(source.data) if kept else source.data
        modulator = self.parts.modulator(task, name)
        election.modulate(source.dtype, self.parts.base_data(name), source.data, *modulator, out, threads_for(out.size))
        entry = self.entry(task, name)
        if entry.shape != source.shape:
            row = math.prod(entry.shape[1:]) * WIDTHS[entry.dtype]
            out = out[: (file.record.modulated[name].rows or 0) * row]
            if ROWS + name in file.entries:
                out = np.concatenate([out, file.read(ROWS + name).data])
        return RawTensor(entry.dtype, entry.shape, out)

    def coded(self, task: str, name: str) -> tuple[np.ndarray, Header] | None:
        """Returns the payload of a task's tensor and its header; None unless it is coded."""
        file = self.files[task]
        name = file.record.ties.get(name, name)
        return (file.read(CODE + name).data, file.header(name)) if file.is_coded(name) else None

    def source(self, task: str) -> TaskSource:
        """Returns the tensors of a task's model."""
        self.require_task(task)
        return TaskSource(self, task)


def open_merge(
    name: str | os.PathLike, base: str | os.PathLike | None = None, revision: str | None = None, hub: Hub = HUB
) -> MergeFolder:
    """Opens a merge that is given as a folder or as a Hub id. Downloads what is not there, see `merge_folder`; the other
    arguments are those of `MergeFolder`."""
    return MergeFolder(merge_folder(name, hub), base, revision, hub)


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

    def read_on(self, names: Sequence[str], device: torch.device) -> list[torch.Tensor]:
        from hf_ext.storage.delta.device_decode import read_on

        return read_on(self, names, partial(self._merged.coded, self._task), self._merged.base, device)

    def __contains__(self, name: object) -> bool:
        return name in self._merged.files[self._task].record.ties or super().__contains__(name)

    def identity(self, name: str) -> Hashable:
        # Merges may share elected weights and the name of a task, but not the task's files.
        is_shared = name in self._merged.files[self._task].record.shared
        return self._merged.elected.identity(name) if is_shared else (self.name, name)
