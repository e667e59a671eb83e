"""The command that starts other tools."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from hf_ext.cli.command import Section, argument, failure, say

section = Section(
    "Load compressed models and merges in tools that do not import hf_ext", "$ hf-ext run transformers serve my-bert-small"
)


@section.command(
    "run another tool's command with hf_ext imported",
    "  hf-ext run transformers serve my-model-small\n"
    "  hf-ext run lm_eval --model hf --model_args pretrained=my-model-small --tasks boolq",
    "The tool can then load everything that this package writes. The output and the exit code are the tool's own.",
    allow_interspersed_args=False,
)
def run(
    context: typer.Context,
    program: Annotated[str, argument("PROGRAM", "A command of this Python environment, such as transformers or lm_eval.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="Arguments of PROGRAM.", show_default=False)
    ] = None,
) -> Any:
    commands = entry_points(group="console_scripts", name=program)
    if not commands:
        say(f"There is no command '{program}' in this Python environment ({sys.prefix}). Install the package that provides it.")
        return 1
    sys.argv = [program, *(arguments or ())]
    try:
        return min(commands, key=lambda point: point.value).load()()
    except ImportError as error:  # such as an extra of the tool that is not installed
        return failure(context, error)
