"""The commands of merges."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from hf_ext.cli.command import Force, Json, MovedBase, Out, Result, Section, argument, flag, mistake, option
from hf_ext.errors import CheckpointError

section = Section(
    "Keep many fine-tunes of one base in one folder, switched by name",
    "$ hf-ext merge --base google-bert/bert-base-uncased --task cola=my-cola \\\n"
    "    --task sst2=my-sst2 --out my-bert-merged\n"
    "$ hf-ext add-task my-bert-merged --task mnli=my-mnli --out my-bert-more\n"
    "$ hf-ext extract my-bert-more --task sst2 --out my-sst2-again",
)

Merge = Annotated[str, argument("SRC", "Folder or Hub id of the merge.")]
Bits = Annotated[float | None, option("--bits", "Size for 'switch': bits per parameter and task; defaults to 0.25.", "N")]
Size = Annotated[str | None, option("--size", "Size for 'switch': size of the folder, such as 50MB.", "SIZE")]
Name = Annotated[str, option("--task", "Name of the task.", "NAME")]
Conflicts = Annotated[bool, flag("--accept-conflicts", "Merge tasks that end farther from their own models than the base is.")]


@section.command(
    "merge fine-tunes of one base model into one folder",
    "  hf-ext merge --base google-bert/bert-base-uncased --task cola=my-cola \\\n    --task sst2=my-sst2 --out my-bert-merged",
    'from_pretrained loads OUT. model.set_task("sst2") switches the model\'s weights, head and labels. '
    "`hf-ext inspect OUT` shows how close each task is to its own model.",
)
def merge(
    out: Out,
    base: Annotated[str, option("--base", "Folder or Hub id of the model that all fine-tunes started from.")],
    task: Annotated[
        list[str],
        option(
            "--task",
            "A checkpoint (plain or compressed) or a PEFT adapter. Repeat for each task; the first is active after loading.",
            "NAME=PATH",
        ),
    ],
    method: Annotated[
        Literal["switch", "emr"],
        option(
            "--method",
            "'switch', the default: each task coded by itself. 'emr': EMR-Merging, one election among all tasks.",
            "switch|emr",
        ),
    ] = "switch",
    bits: Bits = None,
    size: Size = None,
    accept_conflicts: Conflicts = False,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    tasks = all_named(task)
    from hf_ext import emr

    options: dict[str, Any] = {"method": method, "bits": bits, "size": size, "accept_conflicts": accept_conflicts}
    report = emr.merge(base, tasks, out, overwrite=force, **options)
    return Result(report.summary(), report.to_dict())


@section.command(
    "add tasks to a merge; the other tasks keep all bits",
    "  hf-ext add-task my-bert-merged --task mnli=my-mnli --out my-bert-more",
)
def add_task(
    src: Merge,
    task: Annotated[list[str], option("--task", "A new task, as in `hf-ext merge`. Repeat for each task.", "NAME=PATH")],
    out: Out,
    base: MovedBase = None,
    method: Annotated[
        Literal["switch", "emr"] | None,
        option("--method", "As in `hf-ext merge`; defaults to that of the merge's last task.", "switch|emr"),
    ] = None,
    bits: Bits = None,
    size: Size = None,
    accept_conflicts: Conflicts = False,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    tasks = all_named(task)
    from hf_ext.emr.layout import task_files
    from hf_ext.storage.hub import local_copy

    if taken := tasks.keys() & task_files(local_copy(src)).keys():  # before PyTorch is imported
        raise mistake(f"{src} has a task '{min(taken)}' already; give the new task another name", "--task")
    from hf_ext import emr

    options: dict[str, Any] = {"method": method, "bits": bits, "size": size, "accept_conflicts": accept_conflicts}
    report = emr.add_task(src, tasks, out, base=base, overwrite=force, **options)
    return Result(report.summary(), report.to_dict())


@section.command(
    "write a merge without a task; the others keep all bits",
    "  hf-ext remove-task my-bert-merged --task sst2 --out my-bert-fewer",
)
def remove_task(
    src: Merge, task: Name, out: Out, base: MovedBase = None, force: Force = False, as_json: Json = False
) -> Result:
    merge = with_task(src, task)
    from hf_ext import emr

    report = emr.remove_task(merge, task, out, base, overwrite=force)
    return Result(report.summary(), report.to_dict())


@section.command(
    "write a merge in which a task has another name",
    "  hf-ext rename-task my-bert-merged --task sst2 --to sentiment --out my-bert-renamed",
)
def rename_task(
    src: Merge,
    task: Name,
    to: Annotated[str, option("--to", "The new name.", "NAME")],
    out: Out,
    base: MovedBase = None,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    merge = with_task(src, task)
    from hf_ext import emr

    report = emr.rename_task(merge, task, to, out, base, overwrite=force)
    return Result(report.summary(), report.to_dict())


@section.command(
    "write one task of a merge as a plain checkpoint",
    "  hf-ext extract my-bert-merged --task sst2 --out my-sst2-again",
    "For tools that cannot read merges, such as llama.cpp.",
)
def extract(src: Merge, task: Name, out: Out, base: MovedBase = None, force: Force = False, as_json: Json = False) -> Result:
    merge = with_task(src, task)
    from hf_ext import emr

    emr.extract(merge, task, out, base=base, overwrite=force)
    return Result(f"Wrote the model of task '{task}' to {out}.", {"out": out, "task": task})


def with_task(src: str, task: str) -> Path:
    """Returns the folder of a merge, which has this task. Does not import PyTorch."""
    from hf_ext.emr.layout import task_files
    from hf_ext.storage.hub import local_copy

    merge = local_copy(src)
    if task not in (tasks := task_files(merge)):
        raise mistake(f"there is no task '{task}' in {src}; its tasks are {', '.join(tasks)}", "--task")
    return merge


def all_named(texts: list[str]) -> dict[str, str]:
    """Splits the NAME=PATH of each task."""
    tasks: dict[str, str] = {}
    for name, path in map(named, texts):
        if name in tasks:
            raise mistake(f"there are two tasks called '{name}'; give each its own name", "--task")
        tasks[name] = path
    return tasks


def named(text: str) -> tuple[str, str]:
    """Splits NAME=PATH."""
    name, _, path = text.partition("=")
    if not (name and path):
        raise mistake(f"'{text}' is not of the form NAME=PATH", "--task")
    from hf_ext.emr.layout import require_name

    try:
        require_name(name)
    except CheckpointError as error:
        raise mistake(str(error), "--task") from None
    return name, path
