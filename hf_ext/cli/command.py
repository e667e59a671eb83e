"""Shared parts of all commands: declaring, running and reporting a command, and the options that several commands have."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Annotated, Any

import typer
import typer.core

from hf_ext.cli.hub import Destination, signed_in
from hf_ext.errors import HfExtError
from hf_ext.integration import versions

UNCHANGED = "nothing was changed"
NOTHING = "nothing was written"
RESUMABLE = "{out} has the finished part; run the command again to resume"


class Command(typer.core.TyperCommand):
    """A command whose options with a metavar ending in "…" take several values, as in `--candidates a b c`."""

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
        self,
        does: str,
        examples: str,
        more: str = "",
        left: str = UNCHANGED,
        hands_over: bool = False,
        threaded: bool = False,
        **settings: Any,
    ) -> Callable[[Callable], Callable]:
        """Declares the decorated function as a command of the same name.

        Args:
            does: a line for the tutorial.
            examples: command lines, with comments after "#".
            more: what else to know before using it.
            left: what an interrupted run leaves, formatted with the command's arguments.
            hands_over: another tool takes over this process; its output and exit code are its own.
            threaded: the command works on tensors in several threads, and takes --threads.
        """

        def declare(function: Callable) -> Callable:
            name = function.__name__.replace("_", "-")
            self.commands[name] = does
            help = f"{does[0].upper()}{does[1:]}.\n\n{more}"
            run = function if hands_over else reporting(function, left, threaded)
            app.command(name, cls=Command, help=help, epilog=f"\b\nExamples:\n{examples}", **settings)(run)
            return function

        return declare

    def __str__(self) -> str:
        commands = [f"  {name:<21}{does}" for name, does in self.commands.items()]
        return "\n".join((f"{self.title}:", *commands, "", *(f"    {line}" for line in self.example.splitlines())))


def reporting(function: Callable[..., Result | None], left: str, threaded: bool = False) -> Callable[..., int]:
    """Returns a function for Typer: it adds shared options, calls `function`, prints the result and returns the exit code.

    The options are --token and --json; --threads if `threaded`; for a parameter `out: Destination`, --out, --push-to-hub and
    --private.

    Args:
        left: see `Section.command`.
        threaded: take `--threads` too, which limits the threads of `function`.
    """
    declared = inspect.signature(function, eval_str=True).parameters

    def run(context: typer.Context, as_json: bool, token: str | None, threads: int | None = None, **arguments: Any) -> int:
        if "context" in declared:
            arguments["context"] = context
        if "push_to_hub" in arguments:
            resolve_destination(arguments, "push_to_hub" in declared)
        try:
            # The output of libraries is not the result.
            with contextlib.redirect_stdout(sys.stderr), signed_in(token), limited(threads):
                result = uploaded(function, arguments)
        except KeyboardInterrupt:
            nothing = "out" in arguments and not os.path.exists(str(arguments["out"]))
            say(f"interrupted; {NOTHING if nothing else left.format(**arguments)}.")
            return 130
        except Exception as error:
            if hasattr(error, "format_message"):  # a mistake in the command line, which main() reports
                raise
            return failure(context, error)
        if result is None:
            return 0
        print(json.dumps(result.data, indent=2) if as_json else result.text, flush=True)
        return int(result.failed)

    added: dict[str, tuple[Any, Any]] = {}
    if "out" in declared and declared["out"].annotation is Destination:
        # A run of hours has a folder to resume from.
        added |= {"out": (Out, inspect.Parameter.empty) if left == RESUMABLE else (OptionalOut, None)}
        added |= {"push_to_hub": (PushToHub, None), "private": (Private, False)}
    added |= {"threads": (Threads, None)} if threaded else {}
    added |= {"token": (Token, None), "as_json": (Json, False), "context": (typer.Context, inspect.Parameter.empty)}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in (
            {name: (item.annotation, item.default) for name, item in declared.items()} | added
        ).items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def resolve_destination(arguments: dict[str, Any], keep: bool) -> None:
    """Replaces the options --out, --push-to-hub and --private by a `Destination`, unless a command takes them itself."""
    if arguments["private"] and not arguments["push_to_hub"]:
        raise mistake("requires --push-to-hub, whose repository it makes private", "--private")
    if keep:
        return
    out, repo_id, private = (arguments.pop(name) for name in ("out", "push_to_hub", "private"))
    if not (out or repo_id or arguments.get("dry_run")):
        others = "--push-to-hub or --dry-run" if "dry_run" in arguments else "or --push-to-hub"
        raise mistake(f"give a folder to write{',' if 'dry_run' in arguments else ''} {others}", "--out")
    arguments["out"] = Destination(out, repo_id, private)


def uploaded(function: Callable[..., Result | None], arguments: dict[str, Any]) -> Result | None:
    """Runs a command and uploads its result, if the user gave a repository."""
    out = arguments.get("out")
    if not isinstance(out, Destination):
        return function(**arguments)
    try:
        result = function(**arguments)
    except BaseException:
        out.discard()
        raise
    if result is None or not out.upload():  # None: another process has the result
        return result
    return replace(result, text=f"{result.text}\nPushed to {out.repo_id}.", data=result.data | {"pushed_to": out.repo_id})


def limited(threads: int | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which at most so many threads work on tensors."""
    if threads is None:
        return contextlib.nullcontext()
    from hf_ext.storage.prefetch import at_most_cores

    return at_most_cores(threads)


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


def note_missing_config(folder: str | os.PathLike) -> None:
    """Prints a note if a model's folder has no config.json."""
    from hf_ext.storage.config_file import CONFIG
    from hf_ext.storage.layout import ADAPTER_CONFIG

    if os.path.isdir(folder) and not any(os.path.exists(os.path.join(folder, name)) for name in (CONFIG, ADAPTER_CONFIG)):
        say(f"{folder} has no {CONFIG}; from_pretrained will need it.")


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


OUT = "Folder to write. Overwrites files of the same names."
Out = Annotated[str, option("--out", OUT)]
OptionalOut = Annotated[str | None, option("--out", f"{OUT} Optional with --push-to-hub.")]
Revision = Annotated[
    str | None, option("--revision", "Branch, tag or commit of the base on the Hub; defaults to main.", metavar="REV")
]
MovedBase = Annotated[
    str | None, option("--base", "Folder or Hub id of the base, if it has moved. Defaults to the base in SRC's config.json.")
]
Plot = Annotated[str | None, option("--plot", "Also draw a picture, if matplotlib is installed.", "FILE.png")]
PushToHub = Annotated[
    str | None, option("--push-to-hub", "Also upload the result to this model repository on the Hub.", "ORG/NAME")
]
Private = Annotated[bool, flag("--private", "Create the repository as a private one, if it does not exist.")]
Token = Annotated[
    str | None,
    option("--token", "Access token for the Hub. Defaults to HF_TOKEN, or to the one that `hf auth login` saved.", "TOKEN"),
]
Json = Annotated[bool, flag("--json", "Print the result as JSON, and nothing else to stdout.")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        metavar="N",
        show_default=False,
        help="Maximum number of threads for work on tensors. Defaults to the cores that CPU affinity (taskset, Slurm) and the "
        "container's CPU quota grant. Does not change the results.",
    ),
]
