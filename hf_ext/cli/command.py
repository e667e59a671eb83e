"""Shared parts of all commands: declaring, running and reporting a command, and the options that several commands have."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any

import typer
import typer.core

from hf_ext.errors import HfExtError
from hf_ext.integration import versions

UNCHANGED = "nothing was changed"
NOTHING = "nothing was written"
RESUMABLE = "what is finished stays in {out}; run the command again to resume"


class Command(typer.core.TyperCommand):
    """A command whose function returns a `Result`, which is printed as JSON if its parameter `as_json: Json` is true. Options
    with a metavar ending in "…" take several values, as in `--candidates a b c`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {name for option in self.params if str(option.metavar).endswith("…") for name in option.opts}
        expanded: list[str] = []
        option = None
        for word in args:
            if word.startswith("-"):
                option = word if word in several else None
            elif option and expanded[-1] != option:
                expanded.append(option)
            expanded.append(word)
        try:
            return super().parse_args(ctx, expanded)
        except Exception as error:
            if hasattr(error, "format_message") and getattr(error, "ctx", None) is None:
                error.ctx = ctx  # type: ignore[attr-defined]  # so that main() names the command
            raise

    def invoke(self, ctx: Any) -> int:
        """Runs the function, prints its result or error, and returns the exit code."""
        if "as_json" not in ctx.params:  # another tool takes over: its output and exit code are its own
            return super().invoke(ctx)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # the output of libraries is not the result
                result = super().invoke(ctx)
        except KeyboardInterrupt:
            nothing = "out" in ctx.params and not os.path.exists(ctx.params["out"])
            say(f"interrupted; {NOTHING if nothing else ctx.obj.format(**ctx.params)}.")
            return 130
        except Exception as error:
            if hasattr(error, "format_message"):  # a mistake in the command line, which main() reports
                raise
            return failure(ctx, error)
        if result is None:
            return 0
        print(json.dumps(result.data, indent=2) if ctx.params["as_json"] else result.text, flush=True)
        return int(result.failed)


class Tutorial(typer.core.TyperGroup):
    """All commands. The help text lists them already, so that it needs no list below the options."""

    def format_commands(self, ctx: Any, formatter: Any) -> None: ...


app = typer.Typer(
    cls=Tutorial,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    subcommand_metavar="COMMAND …",
    context_settings={"max_content_width": 88},
)


@dataclass(frozen=True)
class Result:
    """The outcome of a command: `text` for people, `data` for programs (`--json`)."""

    text: str
    data: dict
    failed: bool = False


@dataclass
class Section:
    """Commands for one purpose: a part of the tutorial that `hf-ext --help` prints.

    Args:
        title: what a user wants to do.
        example: command lines that do it from start to end, each after "$ ".
    """

    title: str
    example: str
    commands: dict[str, str] = field(default_factory=dict)

    def command(
        self, does: str, examples: str, more: str = "", left: str = UNCHANGED, **settings: Any
    ) -> Callable[[Callable], Callable]:
        """Declares the decorated function as a command of the same name. `does` is a line for the tutorial, `examples` are
        command lines with comments after "#", and `more` is what else to know before using it. `left` is what an interrupted
        run leaves, formatted with the command's arguments. The settings are those of the command's context."""

        def declare(function: Callable) -> Callable:
            name = function.__name__.replace("_", "-")
            self.commands[name] = does
            help = f"{does[0].upper()}{does[1:]}.\n\n{more}"
            context = {"obj": left} | settings
            app.command(name, cls=Command, context_settings=context, help=help, epilog=f"\b\nExamples:\n{examples}")(function)
            return function

        return declare

    def __str__(self) -> str:
        commands = [f"  {name:<21}{does}" for name, does in self.commands.items()]
        return "\n".join((f"{self.title}:", *commands, "", *(f"    {line}" for line in self.example.splitlines())))


def failure(context: typer.Context, error: Exception) -> int:
    """Prints an error as one line, after its traceback if `--traceback` was given. Returns the exit code."""
    if context.find_root().params["traceback"]:
        traceback.print_exc()
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        same = module in versions.requirements()  # else the module's name may be that of a stranger's package
        say(f"{error}. Install {f'it: pip install {module}' if same else 'the package that provides it.'}")
        return 1
    of_an_option = context.allow_extra_args and isinstance(error, ValueError)  # one that Transformers or PEFT has rejected
    if of_an_option or isinstance(error, (HfExtError, OSError, ImportError)):
        say(str(error))
    else:
        say(f"{type(error).__name__}: {error} (hf-ext --traceback {context.info_name} … shows where it comes from)")
    return 1


def missing_config(folder: str | os.PathLike) -> str:
    """Returns the end of a result's text: a sentence if a model's folder has no config.json, else nothing."""
    from hf_ext.storage.config_file import CONFIG
    from hf_ext.storage.layout import ADAPTER_CONFIG, PIPELINE

    configs = (CONFIG, ADAPTER_CONFIG, PIPELINE)
    if os.path.isdir(folder) and not any(os.path.exists(os.path.join(folder, name)) for name in configs):
        return f" {folder} has no {CONFIG}, so from_pretrained cannot load it."
    return ""


def drawn(draw: Callable[[], object]) -> str:
    """Draws a picture. Returns an empty text; without matplotlib, a line that says what to install."""
    if find_spec("matplotlib") is None:
        return "\nThere is no picture: drawing requires matplotlib (pip install matplotlib)."
    draw()
    return ""


def say(text: str) -> None:
    """Prints a text as one line to stderr."""
    print("hf-ext:", " ".join(text.split()), file=sys.stderr)


def mistake(message: str, option: str | None = None) -> typer.BadParameter:
    """Returns an error about the command line, to raise."""
    return typer.BadParameter(message, param_hint=option and f"'{option}'")


def not_empty(value: str | list[str] | None) -> str | list[str] | None:
    """Rejects an empty path or Hub id, such as an unset variable of the shell gives. It would mean the working directory."""
    if value == "" or isinstance(value, list) and "" in value:
        raise typer.BadParameter("the value is empty; give a path or a Hub id.")
    return value


def argument(metavar: str, help: str) -> Any:
    """Declares a path or Hub id that a command takes."""
    return typer.Argument(metavar=metavar, help=help, callback=not_empty)


def option(name: str, help: str, metavar: str = "PATH", **settings: Any) -> Any:
    """Declares an option with a value: a path or Hub id by default."""
    return typer.Option(name, metavar=metavar, help=help, callback=not_empty if metavar == "PATH" else None, **settings)


def flag(name: str, help: str) -> Any:
    """Declares an option without a value."""
    return typer.Option(name, help=help)


Out = Annotated[str, option("--out", "Folder to write: a new one, or an earlier result, which is replaced.")]
Force = Annotated[bool, flag("--force", "Write into a folder that holds something else: overwrite files of the same names.")]
Revision = Annotated[
    str | None, option("--revision", "Branch, tag or commit of the base on the Hub; defaults to main.", metavar="REV")
]
MovedBase = Annotated[
    str | None, option("--base", "Folder or Hub id of the base, if it has moved. Defaults to the base in SRC's config.json.")
]
Plot = Annotated[str | None, option("--plot", "Also draw a picture, if matplotlib is installed.", "FILE.png")]
Verbose = Annotated[bool, flag("--verbose", "Print the whole table.")]
Json = Annotated[bool, flag("--json", "Print the result as JSON, and nothing else to stdout.")]
