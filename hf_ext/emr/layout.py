"""The files of a merge, and the names of its tasks.

config.json, other files           of the first task; config.json has a `quantization_config` of the method `emr`
model.safetensors (or shards)      the elected weights, as differences from the base
task-TASK/config.json              of the task; from_pretrained loads the folder as this task of the merge
task-TASK/…index.json              names the files of the elected weights
task-TASK/modulators.safetensors   masks and rescalers, or coded tensors, and the task's own tensors
task-TASK/…                        its other files, unless they equal those of the first task
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_ext.emr.modulators import FILE, REPAIR, TASK_FOLDER, TaskFile
from hf_ext.errors import CheckpointError, CorruptFileError, HfExtError
from hf_ext.storage.config_file import CONFIG, EMR, require_no_task, storage_settings
from hf_ext.storage.layout import INDEX, select_weights

TASK_FILES = FILE, CONFIG, INDEX
TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_name(name: object) -> bool:
    """Checks whether a task can have this name: its folder has the same name."""
    return isinstance(name, str) and TASK_NAME.fullmatch(name) is not None


def require_name(name: object) -> None:
    if not is_name(name):
        raise CheckpointError(f"{name!r} cannot be the name of a task; use letters, digits, '.', '_' and '-'.")


def task_folder(task: str) -> str:
    """Returns the folder of a task's own files, relative to the merge. `push_to_hub` uploads no deeper folders."""
    return f"{TASK_FOLDER}{task}"


def task_files(folder: Path) -> dict[str, TaskFile]:
    """Opens the files of all tasks of a merge, in the order of config.json. Raises CheckpointError if the folder holds none."""
    settings = storage_settings(folder)
    require_no_task(folder)
    if settings.get("quant_method") != EMR:
        raise CheckpointError(
            f"{folder} holds no merge: its config.json does not have the quant_method {EMR!r}. Give the folder of a merge."
        )
    tasks = settings.get("tasks")
    if not isinstance(tasks, list) or not tasks or not all(map(is_name, tasks)):
        raise CorruptFileError(f"{folder / CONFIG} is damaged: it lists no tasks. {REPAIR}")
    digests = settings.get("digests") or {}
    if not isinstance(digests, dict):
        raise CorruptFileError(f"{folder / CONFIG} is damaged: its digests are no object. {REPAIR}")
    files = {task: TaskFile(folder / task_folder(task) / FILE) for task in tasks}
    for task, file in files.items():
        if file.record.task != task:
            raise CorruptFileError(f"{file.path} belongs to task '{file.record.task}', not '{task}'. {REPAIR}")
        if digests.get(task, file.digest) != file.digest:
            raise CorruptFileError(f"{file.path} belongs to another merge than {folder / CONFIG}. {REPAIR}")
    return files


def files_of(folder: Path, tasks: Mapping[str, TaskFile]) -> list[Path]:
    """Returns the files of a folder that belong to its merge, relative to the folder."""
    paths = [folder / INDEX, folder / CONFIG, *select_weights(folder)]
    for task, file in tasks.items():
        place = folder / task_folder(task)
        paths += [place / name for name in TASK_FILES]
        paths += [parent / name for name in file.record.files for parent in (place, folder)]
    return sorted({path.relative_to(folder) for path in paths if path.is_file()})


def older_files(folder: Path) -> list[Path]:
    """Returns the files of the merge that a folder already holds, relative to the folder. Of a damaged merge, these are the
    tasks' own files."""
    try:
        return files_of(folder, task_files(folder))
    except (HfExtError, OSError):
        tasks = [path.parent for path in folder.glob(f"{task_folder('*')}/{FILE}")]
        return [(task / name).relative_to(folder) for task in tasks for name in TASK_FILES if (task / name).is_file()]


def name_of_task(name: str, folder: Path, task: str, tasks: Sequence[str]) -> str:
    """Returns the name that loads a task of the merge in a folder: that of the merge for the first of `tasks`, else the task's
    folder. `name` is that of the merge, or of one of its tasks."""
    name = name.rstrip("/") or name
    for other in tasks:
        name = name.removesuffix(f"/{task_folder(other)}")
    merge = name if os.path.isdir(name) else str(folder)
    return name if task == tasks[0] else f"{merge}/{task_folder(task)}"
