"""The command that starts other tools."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import entry_points

from hf_ext_cli.command import Group, say


def groups(parsers: argparse._SubParsersAction) -> list[Group]:
    group = Group(
        "Use all of this in other tools, which do not import hf_ext by themselves",
        "$ hf-ext run transformers serve my-bert-small",
        parsers,
    )
    parser = group.command(
        run,
        "run another tool's command with hf_ext imported",
        "  hf-ext run transformers serve my-model-small\n"
        "  hf-ext run lm_eval --model hf --model_args pretrained=my-model-small --tasks boolq",
        "The tool then loads what this package writes. What it prints and its exit code are its own.",
        hands_over=True,
    )
    parser.add_argument(
        "program", metavar="PROGRAM", help="a command of this Python environment, such as transformers or lm_eval"
    )
    parser.add_argument("arguments", metavar="…", nargs=argparse.REMAINDER, help="its arguments")
    return [group]


def run(args: argparse.Namespace) -> int | None:
    found = entry_points(group="console_scripts", name=args.program)
    if not found:
        say(f"There is no command '{args.program}' in this Python environment ({sys.prefix}).")
        return 1
    import hf_ext  # noqa: F401

    sys.argv = [args.program, *args.arguments]
    return min(found, key=lambda point: point.value).load()()
