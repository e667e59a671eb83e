"""EMR-Merging's commands."""

from __future__ import annotations

from typing import Annotated, Literal

from hf_ext.cli.command import Force, Json, MovedBase, Out, Result, Revision, Section, argument, flag, mistake, option
from hf_ext.errors import CheckpointError

section = Section(
    "Keep many fine-tunes of one base in one folder, switched by name (EMR-Merging)",
    "$ hf-ext merge --base google-bert/bert-base-uncased --task cola=my-cola \\\n"
    "    --task sst2=my-sst2 --out my-bert-merged\n"
    "$ hf-ext add-task my-bert-merged --task mnli=my-mnli --out my-bert-more\n"
    "$ hf-ext extract my-bert-more --task sst2 --out my-sst2-again",
)

Merge = Annotated[str, argument("SRC", "Folder or Hub id of the merge.")]
Rescale = Annotated[
    Literal["tensor", "paper", "tensor_mean"],
    option(
        "--rescale",
        "'tensor': one rescaler per tensor. 'paper': one per model. 'tensor_mean': one per model, as in the authors' scripts.",
        "tensor|paper|tensor_mean",
    ),
]

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
    revision: Revision = None,
    rescale: Rescale = "tensor",
    accept_conflicts: Conflicts = False,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    tasks = [named(text) for text in task]
    names = [name for name, _ in tasks]
    for name in names:
        if names.count(name) > 1:
            raise mistake(f"there are two tasks called '{name}'; give each its own name", "--task")
    from hf_ext import emr

    report = emr.merge(base, dict(tasks), out, rescale, revision, overwrite=force, accept_conflicts=accept_conflicts)
    return Result(report.summary(), report.to_dict())


@section.command(
    "add a task to a merge; the other tasks keep all bits",
    "  hf-ext add-task my-bert-merged --task mnli=my-mnli --out my-bert-more",
)
def add_task(
    src: Merge,
    task: Annotated[str, option("--task", "The new task: a checkpoint (plain or compressed) or a PEFT adapter.", "NAME=PATH")],
    out: Out,
    base: MovedBase = None,
    rescale: Rescale = "tensor",
    accept_conflicts: Conflicts = False,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    name, path = named(task)
    from hf_ext.emr.folder import task_files
    from hf_ext.storage.hub import local_copy

    if name in task_files(local_copy(src)):  # before PyTorch is imported
        raise mistake(f"{src} has a task '{name}' already; give the new task another name", "--task")
    from hf_ext import emr

    report = emr.add_task(src, name, path, out, rescale, base, overwrite=force, accept_conflicts=accept_conflicts)
    return Result(report.summary(), report.to_dict())


@section.command(
    "write one task of a merge as a plain checkpoint",
    "  hf-ext extract my-bert-merged --task sst2 --out my-sst2-again",
    "For tools that cannot read merges, such as llama.cpp.",
)
def extract(
    src: Merge,
    task: Annotated[str, option("--task", "Name of the task.", "NAME")],
    out: Out,
    base: MovedBase = None,
    force: Force = False,
    as_json: Json = False,
) -> Result:
    from hf_ext.emr.folder import task_files
    from hf_ext.storage.hub import local_copy

    merge = local_copy(src)
    if task not in (tasks := task_files(merge)):  # before PyTorch is imported
        raise mistake(f"there is no task '{task}' in {src}; its tasks are {', '.join(tasks)}", "--task")
    from hf_ext import emr

    emr.extract(merge, task, out, base=base, overwrite=force)
    return Result(f"Wrote the model of task '{task}' to {out}.", {"out": out, "task": task})


def named(text: str) -> tuple[str, str]:
    """Splits NAME=PATH."""
    name, _, path = text.partition("=")
    if not (name and path):
        raise mistake(f"'{text}' is not of the form NAME=PATH", "--task")
    from hf_ext.emr.folder import require_name

    try:
        require_name(name)
    except CheckpointError as error:
        raise mistake(str(error), "--task") from None
    return name, path
