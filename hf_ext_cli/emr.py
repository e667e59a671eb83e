"""EMR-Merging's commands."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hf_ext_cli.command import MOVED_BASE, Group, Parser, Result, UsageError, add_out, add_revision, add_source, path

if TYPE_CHECKING:
    from hf_ext.emr import MergeReport

RESCALE = ("tensor", "paper")  # those of hf_ext.emr.writing, which takes seconds to import
TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # that of hf_ext.emr.merged


def groups(parsers: argparse._SubParsersAction) -> list[Group]:
    group = Group(
        "Keep many fine-tunes of one base in one folder, switched by name (EMR-Merging)",
        "$ hf-ext merge --base google-bert/bert-base-uncased --task cola=my-cola \\\n"
        "    --task sst2=my-sst2 --out my-bert-merged --report\n"
        "$ hf-ext add-task my-bert-merged --task mnli=my-mnli --out my-bert-more\n"
        "$ hf-ext extract my-bert-more --task sst2 --out my-sst2-again",
        parsers,
    )

    parser = group.command(
        merge,
        "merge fine-tunes of one base model into one folder",
        "  hf-ext merge --base google-bert/bert-base-uncased --task cola=my-cola --task sst2=my-sst2 \\\n"
        "    --out my-bert-merged --report",
        'from_pretrained loads OUT, and model.set_task("sst2") switches its weights, head and labels.',
    )
    parser.add_argument("--base", type=path, required=True, help="folder or Hub id of the model that all were tuned from")
    add_revision(parser)
    add_merging(
        parser, "once a task: a checkpoint (plain or compressed) or a PEFT adapter; the first loads by default", "append"
    )

    parser = group.command(
        add_task,
        "add a task to a merge; the others stay as they are to the last bit",
        "  hf-ext add-task my-bert-merged --task mnli=my-mnli --out my-bert-more\n"
        "  hf-ext add-task my-bert-merged --task rte=my-rte --out my-bert-more --reelect    # if rte comes out too far off",
    )
    add_source(parser, "folder of the merge")
    parser.add_argument("--base", type=path, help=MOVED_BASE)
    parser.add_argument("--reelect", action="store_true", help="elect anew, which changes the other tasks a little")
    add_merging(parser, "the new task: a checkpoint (plain or compressed) or a PEFT adapter")

    parser = group.command(
        extract,
        "write one task of a merge as a plain checkpoint",
        "  hf-ext extract my-bert-merged --task sst2 --out my-sst2-again",
        "For vLLM and other tools, which know nothing of merges.",
    )
    add_source(parser, "folder of the merge")
    parser.add_argument("--task", required=True, help="name of the task")
    add_out(parser)
    parser.add_argument("--base", type=path, help=MOVED_BASE)
    return [group]


def add_merging(parser: Parser, task: str, action: str = "store") -> None:
    parser.add_argument("--task", metavar="NAME=PATH", type=named, action=action, required=True, help=task)
    add_out(parser)
    parser.add_argument(
        "--rescale",
        choices=RESCALE,
        default=RESCALE[0],
        help="a rescaler for each tensor (default), or one for the whole model as in the paper",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="show how close each task is to its own model, and draw it to OUT/report.png (needs matplotlib)",
    )


def named(text: str) -> tuple[str, str]:
    """NAME=PATH as a pair."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=PATH")
    if not TASK_NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"'{name}' cannot be the name of a task: use letters, digits, '.', '_' and '-'")
    return name, path


def merge(args: argparse.Namespace) -> Result:
    names = [name for name, _ in args.task]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"there are two tasks called '{name}'; give each a name of its own")
    from hf_ext import emr

    return merged(emr.merge(args.base, dict(args.task), args.out, args.rescale, args.revision), args)


def add_task(args: argparse.Namespace) -> Result:
    from hf_ext import emr

    return merged(emr.add_task(args.src, *args.task, args.out, args.reelect, args.rescale, args.base), args)


def merged(report: MergeReport, args: argparse.Namespace) -> Result:
    """What a merge has become."""
    if args.report:
        report.plot(Path(args.out, "report.png"))
    return Result(str(report) if args.report else report.summary(), report.to_dict())


def extract(args: argparse.Namespace) -> Result:
    from hf_ext import emr

    emr.extract(args.src, args.task, args.out, base=args.base)
    return Result(f"{args.out} holds the model of task '{args.task}'.", {"out": args.out, "task": args.task})
