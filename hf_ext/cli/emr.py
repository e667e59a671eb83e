"""EMR-Merging's commands."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

from hf_ext.cli.command import MovedBase, Result, Revision, Section, argument, drawn, flag, mistake, option
from hf_ext.cli.hub import Destination, require_shared
from hf_ext.display import megabytes
from hf_ext.errors import CheckpointError

if TYPE_CHECKING:
    from hf_ext.emr import MergeReport
    from hf_ext.emr.recipe import Recipe

section = Section(
    "Keep many fine-tunes of one base in one folder, switched by name (EMR-Merging)",
    "$ hf-ext merge --base google-bert/bert-base-uncased --task cola=my-cola \\\n"
    "    --task sst2=my-sst2 --out my-bert-merged --report\n"
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
Report = Annotated[
    bool,
    flag("--report", "Show how close each task is to its own model. With matplotlib, also draw it to OUT/report.png."),
]


@section.command(
    "merge fine-tunes of one base model into one folder",
    "  hf-ext merge --base google-bert/bert-base-uncased --task cola=my-cola \\\n"
    "    --task sst2=my-sst2 --out my-bert-merged --report\n"
    "  hf-ext merge my-bert-merged/merge_recipe.yaml --out my-bert-again",
    'from_pretrained loads OUT. model.set_task("sst2") switches the model\'s weights, head and labels. A recipe is a YAML '
    "file with the keys base and tasks (name: path), and optionally revision and rescale. The command writes it to OUT.",
    threaded=True,
)
def merge(
    out: Destination,
    recipe: Annotated[str | None, argument("RECIPE", "YAML file, instead of --base, --task, --revision and --rescale.")] = None,
    base: Annotated[str | None, option("--base", "Folder or Hub id of the model that all fine-tunes started from.")] = None,
    task: Annotated[
        list[str] | None,
        option(
            "--task",
            "A checkpoint (plain or compressed) or a PEFT adapter. Repeat for each task; the first is active after loading.",
            "NAME=PATH",
        ),
    ] = None,
    revision: Revision = None,
    rescale: Rescale = "tensor",
    report: Report = False,
) -> Result:
    tasks = [named(text) for text in task or []]
    names = [name for name, _ in tasks]
    for name in names:
        if names.count(name) > 1:
            raise mistake(f"there are two tasks called '{name}'; give each its own name", "--task")
    if recipe and (base or tasks or revision or rescale != "tensor"):
        raise mistake("cannot be combined with --base, --task, --revision or --rescale, which the recipe contains", "RECIPE")
    if not recipe and not (base and tasks):
        raise mistake("give the base model and the tasks, or a recipe", "--task" if base else "--base")
    from hf_ext import emr
    from hf_ext.emr.recipe import RECIPE, Recipe
    from hf_ext.storage.hub import is_local

    settings = Recipe.read(recipe) if recipe else Recipe(str(base), dict(tasks), revision, rescale)
    if out.repo_id:
        require_shared(settings.base)
    local = any(map(is_local, settings.tasks.values()))  # the recipe would publish the paths of this machine
    folder = out.folder([RECIPE] if local else [])
    result = merged(emr.merge(settings.base, settings.tasks, folder, settings.rescale, settings.revision), folder, report)
    return with_lossless_size(result, settings) if report else result


@section.command(
    "add a task to a merge; the other tasks keep all bits",
    "  hf-ext add-task my-bert-merged --task mnli=my-mnli --out my-bert-more\n"
    "  hf-ext add-task my-bert-merged --task rte=my-rte --out my-bert-more --reelect",
    threaded=True,
)
def add_task(
    src: Merge,
    task: Annotated[str, option("--task", "The new task: a checkpoint (plain or compressed) or a PEFT adapter.", "NAME=PATH")],
    out: Destination,
    base: MovedBase = None,
    reelect: Annotated[bool, flag("--reelect", "Elect all weights again. This changes the other tasks slightly.")] = False,
    rescale: Rescale = "tensor",
    report: Report = False,
) -> Result:
    name, path = named(task)
    from hf_ext.emr.folder import task_files
    from hf_ext.storage.hub import local_copy

    if name in task_files(local_copy(src)):  # before PyTorch is imported
        raise mistake(f"{src} has a task '{name}' already; give the new task another name", "--task")
    from hf_ext import emr

    folder = out.folder()
    return merged(emr.add_task(src, name, path, folder, reelect, rescale, base), folder, report)


@section.command(
    "write one task of a merge as a plain checkpoint",
    "  hf-ext extract my-bert-merged --task sst2 --out my-sst2-again",
    "For tools that cannot read merges, such as llama.cpp.",
    threaded=True,
)
def extract(
    src: Merge, task: Annotated[str, option("--task", "Name of the task.", "NAME")], out: Destination, base: MovedBase = None
) -> Result:
    from hf_ext.emr.folder import task_files
    from hf_ext.storage.hub import local_copy

    merge = local_copy(src)
    if task not in (tasks := task_files(merge)):  # before PyTorch is imported
        raise mistake(f"there is no task '{task}' in {src}; its tasks are {', '.join(tasks)}", "--task")
    from hf_ext import emr

    folder = out.folder()
    emr.extract(merge, task, folder, base=base)
    return Result(f"Wrote the model of task '{task}'" + (f" to {out}." if str(out) else "."), {"out": str(out), "task": task})


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


def with_lossless_size(result: Result, recipe: Recipe) -> Result:
    """Adds to the report of a merge the size of its models if FM-Delta stored each of them."""
    from hf_ext.emr.merging import open_task
    from hf_ext.fm_delta.size_estimate import estimate_size
    from hf_ext.storage.open import open_checkpoint

    source = open_checkpoint(recipe.base, recipe.revision)
    size = 0
    for name, path in recipe.tasks.items():
        with TemporaryDirectory() as scratch:
            size += estimate_size(open_task(name, path, source, Path(scratch)).tensors, source).compressed_bytes
    smaller = size < result.data["bytes"]
    text = (
        f"FM-Delta (hf-ext compress) would store the {len(recipe.tasks)} models without loss in about {megabytes(size)}, "
        + ("less than this merge. " if smaller else "more than this merge. ")
        + "Use FM-Delta if files must be small or exact. Use the merge if one model in memory must switch tasks."
    )
    return Result(f"{result.text}\n{text}", result.data | {"fm_delta_bytes": size})


def merged(report: MergeReport, out: str, show: bool) -> Result:
    """Returns the result of `merge` and `add-task`."""
    if not show:
        return Result(report.summary(), report.to_dict())

    def draw() -> None:
        from hf_ext.integration.model_cards import add_picture

        report.plot(Path(out, "report.png"))
        add_picture(Path(out), "report.png", "How close each task is to its own model")

    return Result(str(report) + drawn(draw), report.to_dict())
