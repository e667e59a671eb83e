"""The commands for whatever the package has written, by whichever method."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from hf_ext_cli.command import MOVED_BASE, Group, Result, add_source, path


def groups(parsers: argparse._SubParsersAction) -> list[Group]:
    group = Group(
        "Look into a compressed model or a merge, and check it",
        "$ hf-ext inspect my-bert-small --plot sizes.png\n$ hf-ext verify my-bert-merged",
        parsers,
    )

    parser = group.command(
        inspect,
        "show how large each tensor is, or how close each task is to its own model",
        "  hf-ext inspect my-bert-small --plot sizes.png\n  hf-ext inspect my-bert-merged --json",
        "The first is for compressed models, the second for merges. The base is not needed. Of a task of a merge, λ is what\n"
        "its weights are scaled by, and the rest says how far they are from its own model's; docs/emr.md explains each column.",
    )
    add_source(parser, "compressed folder or file, or folder of a merge")
    parser.add_argument("--plot", type=path, metavar="FILE.png", help="also draw it (needs matplotlib)")

    parser = group.command(
        verify,
        "decode every tensor and compare it with its checksum",
        "  hf-ext verify my-bert-small\n"
        "  hf-ext verify my-bert-merged --base /mnt/models/bert-base-uncased    # the base has moved",
        "Of a merge every mask is read too. The exit code is 1 if anything is damaged, and the error names it.",
    )
    add_source(parser, "compressed folder, or folder of a merge")
    parser.add_argument("--base", type=path, help=MOVED_BASE)
    return [group]


def inspect(args: argparse.Namespace) -> Result:
    from hf_ext import emr

    method = method_of(args.src)
    report = emr.report(args.src) if method is emr else method.inspect(args.src)
    if args.plot:
        report.plot(args.plot)
    return Result(str(report), report.to_dict())


def verify(args: argparse.Namespace) -> Result:
    count = method_of(args.src).verify(args.src, base=args.base)
    return Result(f"All {count} tensors of {args.src} come out as they were saved.", {"src": args.src, "tensors": count})


def method_of(src: str) -> ModuleType:
    """What wrote a folder."""
    from hf_ext import emr, fm_delta
    from hf_ext.emr.merged import is_merge
    from hf_ext.errors import CheckpointError
    from hf_ext.storage.layout import all_weights

    folder = Path(src)
    checkpoints = sorted(folder.glob("checkpoint-*[0-9]"))
    if checkpoints and not all_weights(folder):
        raise CheckpointError(
            f"{src} holds no weights but the checkpoints of a run; give one of them, such as {checkpoints[0]}."
        )
    return emr if is_merge(src) else fm_delta
