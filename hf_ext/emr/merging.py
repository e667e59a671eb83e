"""Merging: the functions `merge`, `add_task`, `remove_task`, `rename_task`, `extract`, `verify` and `report`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel
from transformers.utils.logging import get_logger

from hf_ext.display import markdown_table, megabytes
from hf_ext.emr.checks import require_closer
from hf_ext.emr.download import merge_folder
from hf_ext.emr.folder import MergeFolder, open_merge
from hf_ext.emr.layout import files_of, older_files, require_name, task_files, task_folder
from hf_ext.emr.options import CODED, ELECTED, MergeOptions
from hf_ext.emr.reports import COLUMNS, MergeReport, TaskReport
from hf_ext.emr.steps import NEAR
from hf_ext.emr.tasks import Task, merged_task, open_task, require_one_structure, with_one_name_each
from hf_ext.emr.writing import MergeWriter
from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.integration.cards import CARD, class_of, has_card, write_card
from hf_ext.storage.checkpoint import holds_weights
from hf_ext.storage.config_file import CONFIG
from hf_ext.storage.files import copy, require_another_folder, scan, staged_folder, write_json
from hf_ext.storage.guards import require_new
from hf_ext.storage.hub import absolute, name_from
from hf_ext.storage.layout import OURS
from hf_ext.storage.open import record_base
from hf_ext.storage.plain_writer import shards_of, write_files
from hf_ext.storage.prefetch import Prefetcher, progress
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import Stored, config_of, plain_base

logger = get_logger(__name__)

PASSES = 4  # writes of a folder of a given size, at most
USEFUL_BITS = 0.05  # per parameter and task: the fewest that an error recommends


def merge(
    base: str | os.PathLike,
    tasks: Mapping[str, Task],
    out: str | os.PathLike,
    rescale: str = "tensor",
    revision: str | None = None,
    max_shard_size: int | str = "50GB",
    overwrite: bool = False,
    accept_conflicts: bool = False,
    method: str = CODED,
    bits: float | None = None,
    size: int | str | None = None,
) -> MergeReport:
    """Merges fine-tunes of one base model into one folder that restores each of them approximately. `from_pretrained` loads the
    first task; `model.set_task` switches.

    The method "switch" codes each task's change from the base by itself, in a size to choose. The method "emr" (EMR-Merging,
    arXiv 2405.17461) elects one set of weights, of which each task takes those under its mask.

    Args:
        base: folder or Hub id of the model that all tasks were fine-tuned from.
        tasks: by name, the folder or Hub id of a checkpoint (plain or compressed) or of a PEFT adapter, or a model in memory.
            A plain copy of each model in memory is written beside `out` for the time of the merge.
        out: folder to write. On failure it stays as it was.
        rescale: for "emr": "tensor" for one rescaler λ per tensor, "paper" for one per model (section 3.3), "tensor_mean" for
            one in which all tensors have the same weight, as in the authors' scripts.
        revision: branch, tag or commit of the base on the Hub; the commit it leads to is recorded.
        max_shard_size: as in `save_pretrained`.
        overwrite: replace files of a folder that holds something else than a merge.
        accept_conflicts: merge tasks that end farther from their own models than the base is. By default, an error says so
            before anything is written.
        method: "switch" or "emr".
        bits, size: for "switch", one of: the bits per parameter and task; the size of the folder, in bytes or as "50MB".
            Defaults to 0.25 bits.

    Returns:
        A report of how close each task is to its own model.

    Raises:
        CheckpointError: the tasks cannot be merged with each other or conflict, the name of one is invalid, or `out` holds
            something else.
        BaseModelError: the base cannot be read, or a task was not fine-tuned from it.
    """
    _require_tasks(tasks)
    require_another_folder(Path(out), [base])
    options = MergeOptions(rescale, max_shard_size, overwrite, accept_conflicts, method, bits, size)
    return _write(lambda: plain_base(Stored(os.fspath(base), revision)), tasks, Path(out), options)


def add_task(
    src: str | os.PathLike,
    tasks: Mapping[str, Task],
    out: str | os.PathLike,
    rescale: str = "tensor",
    base: str | os.PathLike | None = None,
    max_shard_size: int | str = "50GB",
    overwrite: bool = False,
    accept_conflicts: bool = False,
    method: str | None = None,
    bits: float | None = None,
    size: int | str | None = None,
) -> MergeReport:
    """Adds tasks to a merge.

    The other tasks keep all their bits. With the method "emr", a new task keeps its own weights where no task before it moved;
    elsewhere it takes the elected weights that agree with its own. If it is then farther from its own model than the base is,
    this raises an error.

    Args:
        src: folder or Hub id of the merge.
        tasks: the new tasks, as in `merge`.
        out: folder to write. On failure it stays as it was.
        rescale: as in `merge`, for the new tasks.
        base: folder or Hub id of the base, if it is no longer where config.json says.
        max_shard_size: as in `save_pretrained`.
        overwrite, accept_conflicts, bits, size: as in `merge`.
        method: as in `merge`; defaults to that of the merge's last task.

    Raises:
        CheckpointError: the merge has a task of one of the names, its election does not suit a new task, or `out` holds
            something else.
    """
    _require_tasks(tasks)
    merged = open_merge(src, base)
    method = method or (CODED if merged.files[merged.tasks[-1]].coded else ELECTED)
    options = MergeOptions(rescale, max_shard_size, overwrite, accept_conflicts, method, bits, size)
    return _write(lambda: merged.base, tasks, Path(out), options, merged, {name: name for name in merged.tasks})


def remove_task(
    src: str | os.PathLike,
    name: str,
    out: str | os.PathLike,
    base: str | os.PathLike | None = None,
    max_shard_size: int | str = "50GB",
    overwrite: bool = False,
) -> MergeReport:
    """Writes a merge without one of its tasks, of either method. The other tasks keep all their bits.

    Args:
        src: folder or Hub id of the merge.
        name: name of the task to leave out.
        out: folder to write, not that of the merge. On failure it stays as it was.
        base, max_shard_size, overwrite: as in `add_task`.

    Raises:
        CheckpointError: the merge has no such task or no other, or `out` holds something else.
    """
    merged = open_merge(src, base)
    merged.require_task(name)
    if merged.tasks == [name]:
        raise CheckpointError(f"'{name}' is the only task of {src}. Delete the folder instead.")
    options = MergeOptions(max_shard_size=max_shard_size, overwrite=overwrite)
    return _write(lambda: merged.base, {}, Path(out), options, merged, {task: task for task in merged.tasks if task != name})


def rename_task(
    src: str | os.PathLike,
    name: str,
    to: str,
    out: str | os.PathLike,
    base: str | os.PathLike | None = None,
    overwrite: bool = False,
) -> MergeReport:
    """Writes a merge in which a task has another name. All tasks keep all their bits and their order.

    Args:
        src: folder or Hub id of the merge.
        name, to: the old and the new name of the task.
        out, base, overwrite: as in `remove_task`.

    Raises:
        CheckpointError: the merge has no such task, the new name is taken or invalid, or `out` holds something else.
    """
    merged = open_merge(src, base)
    merged.require_task(name)
    names = {task: to if task == name else task for task in merged.tasks}
    merged.files[to] = merged.files[name]  # under both names: it is read by one and written by the other
    return _write(lambda: merged.base, {}, Path(out), MergeOptions(overwrite=overwrite), merged, names)


def extract(
    merged: str | os.PathLike | PreTrainedModel,
    task: str,
    out: str | os.PathLike,
    base: str | os.PathLike | None = None,
    max_shard_size: int | str = "50GB",
    overwrite: bool = False,
) -> None:
    """Writes a task of a merge as a plain checkpoint: the weights that `set_task` gives, configuration and other files.

    Args:
        merged: folder or Hub id of the merge, or a model loaded from one.
        task: name of the task.
        out: folder to write. On failure it stays as it was.
        base: folder or Hub id of the base, if it is no longer where config.json says.
        max_shard_size: as in `save_pretrained`.
        overwrite: replace files of a folder that holds something else than the weights of this task.
    """
    if isinstance(merged, PreTrainedModel):
        if not hasattr(merged, "set_task"):
            raise CheckpointError(f"This {type(merged).__name__} was not loaded from a merge; give the folder of one.")
        source = merged.set_task.merged.reopened()
    else:
        source = open_merge(merged, base)
    source.require_task(task)
    require_another_folder(Path(out), [source.folder, *source.base.paths])
    with staged_folder(out, overwrite=overwrite or (lambda: holds_weights(out, source.source(task).fingerprint))) as stage:
        for name, path in source.assets(task).items():
            copy(path, stage / name)
        write_json(stage / CONFIG, source.task_config(task))
        tensors = source.source(task)
        entries = {name: tensors.entry(name)[:2] for name in tensors.names()}
        weights = shards_of(entries, tensors.read, stage, max_shard_size)
        if not overwrite:
            require_new(scan(stage), stage, Path(out))
        write_files(weights, stage, f"Extracting {task}:")


def verify(src: str | os.PathLike, base: str | os.PathLike | None = None) -> int:
    """Reads a whole merge and compares it with its checksums.

    Args:
        src: folder or Hub id of the merge.
        base: folder or Hub id of the base, if it is no longer where config.json says.

    Returns:
        The number of tensors, masks and coded changes.

    Raises:
        CorruptFileError, BaseModelError: names the first tensor or mask that is damaged.
    """
    merged = open_merge(src, base)
    count = sum(file.verify() for file in merged.files.values())
    for task, file in merged.files.items():
        merged.task_config(task)
        for name in file.record.modulated:
            merged.parts.modulator(task, name)
        for name in file.coded:
            file.decoded(name, merged.base)
    names = merged.elected.names()
    with progress("Verifying", len(names)) as bar:
        for _ in Prefetcher(merged.verify_tensor, {name: merged.elected.entry(name).nbytes for name in names}):
            bar.update()
    return count + len(names)


def report(src: str | os.PathLike) -> MergeReport:
    """Returns how close each task of a merge is to its own model, as measured during merging. Does not need the base."""
    folder = merge_folder(src)
    files = task_files(folder)
    records: dict[str, dict[str, Any]] = {task: file.record.report for task, file in files.items()}
    try:
        tasks = [
            TaskReport(**figures, task=task, bits=8 * files[task].modulators_size() / max(figures["parameters"], 1))
            for task, figures in records.items()
        ]
    except (TypeError, KeyError) as error:
        raise CorruptFileError(f"The report in {folder} is damaged: {error}.") from error
    return MergeReport(tasks, sum((folder / path).stat().st_size for path in files_of(folder, files)))


def _require_tasks(tasks: object) -> None:
    """Raises CheckpointError unless these are tasks to merge or to add."""
    if not isinstance(tasks, Mapping):
        raise CheckpointError(f'The tasks are a {type(tasks).__name__}; give a dict: {{"NAME": folder, Hub id or model}}.')
    if not tasks:
        raise CheckpointError("There are no tasks; give at least one.")


def _write(
    open_base: Callable[[], TensorSource],
    tasks: Mapping[str, Task],
    out: Path,
    options: MergeOptions,
    merged: MergeFolder | None = None,
    kept: Mapping[str, str] = {},
) -> MergeReport:
    """Writes the folder of a merge of these tasks, after those of `merged` that are `kept`: by name there, their new names."""
    names = [*kept.values(), *tasks]
    for name in names:
        require_name(name)
        if names.count(name) > 1:
            raise CheckpointError(f"The merge has a task '{name}' already; give the new task another name.")
    folders = [task for task in tasks.values() if isinstance(task, str | os.PathLike)]
    require_another_folder(out, folders)
    staged = staged_folder(out, older_files(out), options.overwrite or (lambda: bool(older_files(out))))
    with staged as stage, TemporaryDirectory(dir=stage, prefix=OURS) as scratch:
        base = open_base()
        models = [replace(merged_task(merged, name), task=to) for name, to in kept.items()] if merged else []
        models += [open_task(name, task, base, Path(scratch) / name) for name, task in tasks.items()]
        needed = [*base.paths, *(path for model in models for path in (model.folder, *model.tensors.paths))]
        for written in (out, *(out / task_folder(name) for name in tasks)):
            require_another_folder(written, needed)
        require_one_structure(models)
        models = with_one_name_each(models, base)
        with MergeWriter(base, config_of(base), models, stage, merged, options) as writer:
            writer.write_weights()
            finished = _write_tasks(writer, stage, out, [base.name, *folders], options.size)
        record_base(stage, name_from(out, absolute(base.name)), base.revision)
        new = [task for task in finished.tasks if task.task in tasks]
        if options.is_coded and not options.accept_conflicts:
            require_closer({task.task: (task.relative, task.cosine) for task in new}, are_coded=True)
    for task in new:
        if options.bits and task.bits > (1 + 2 * NEAR) * options.bits:
            logger.warning(
                f"Task '{task.task}' takes {task.bits:.3g} bits per parameter, the least that tensors this small can take."
            )
    for task in finished.tasks:
        if task.relative >= 1:
            logger.warning(
                f"The weights of task '{task.task}' are farther from its own model than the base's (cosine {task.cosine:.3f})"
                + (": it conflicts with the other tasks." if task.step is None else ". Give it more bits.")
            )
    return finished


def _write_tasks(writer: MergeWriter, stage: Path, out: Path, sources: list, size: int | None) -> MergeReport:
    """Writes the new tasks of a merge and its card. Raises CheckpointError if the folder cannot have this size."""
    uncoded = 0  # bytes of the folder besides the coded changes: the most that were measured, as reports vary in length
    for _ in range(PASSES):
        writer.write_tasks(uncoded or None)
        finished = report(stage)
        write_card(
            stage,
            "emr",
            sources,
            "merge",
            target=out,
            tags=["emr-merging", "merge"],
            revision=writer.base.revision,
            model_class=class_of(stage),
            tasks=[task.task for task in finished.tasks],
            size=megabytes(finished.bytes),
            figures=markdown_table(COLUMNS, finished.rows()),
        )
        if size is None:
            return finished
        files = [stage / path for path in scan(stage)]
        files += [] if has_card(stage) else [out / CARD]  # which the folder keeps
        total = sum(path.stat().st_size for path in files if path.is_file())
        uncoded = max(uncoded, total - writer.coded_bytes)
        if (1 - 2 * NEAR) * (size - uncoded) <= writer.coded_bytes and total <= size:
            return finished
    assert size is not None
    if total > size:
        least = USEFUL_BITS / 8 * sum(task.parameters for task in finished.tasks)
        raise CheckpointError(
            f"A folder of {size} bytes is too small: all but the coded changes (heads, tokenizers, names) takes {uncoded} "
            f"bytes. Give at least {uncoded + math.ceil(1.1 * max(writer.coded_bytes, least))} bytes."
        )
    return finished
