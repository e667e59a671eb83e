"""Parse, call, show."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence
from importlib import metadata

from hf_ext_cli import checkpoints, emr, fm_delta, tools, trans_lora, uni_med
from hf_ext_cli.command import NOTHING, Parser, UsageError, say

INTRODUCTION = """\
Work on folders of models, as save_pretrained writes them, and on models of the Hugging Face Hub, by their names. What is
written loads with from_pretrained as any other model does, in a script that says `import hf_ext`.
"""
CLOSING = """\
hf-ext COMMAND --help explains a command, with examples; --json has every command print its result for programs. Results
go to stdout, all else to stderr. The exit code is 0, 1 if something failed, 2 for a mistake in the command line.
"""
HOSTS = ("transformers", "peft", "torch", "huggingface_hub")


class Version(argparse.Action):
    """The package's version and those of what it plugs into: what to tell when something does not work."""

    def __init__(self, option_strings, dest, **options):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser, *_):
        own = installed("hf_ext")
        if own is None:  # a checkout
            from hf_ext import __version__ as own
        hosts = ", ".join(f"{host} {installed(host)}" for host in HOSTS)
        print(f"hf_ext {own} ({hosts}, Python {sys.version.split()[0]})")
        parser.exit()


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def parser() -> Parser:
    main = Parser(
        prog="hf-ext",
        usage="hf-ext COMMAND …",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main.add_argument("--version", action=Version, help="print the versions of the package and of what it plugs into")
    main.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")
    commands = main.add_subparsers(prog="hf-ext", metavar="COMMAND", dest="command", required=True, help=argparse.SUPPRESS)
    groups = [group for module in (fm_delta, checkpoints, emr, trans_lora, uni_med, tools) for group in module.groups(commands)]
    fill = textwrap.TextWrapper(80).fill
    main.description = "\n\n\n".join((fill(INTRODUCTION), *map(str, groups)))
    main.epilog = fill(CLOSING)
    return main


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, taken apart; of one that is wrong the exit code is 2."""
    commands = parser()
    if "_ARGCOMPLETE" in os.environ:
        with contextlib.suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(commands)
    args, args.rest = commands.parse_known_args(arguments)
    if args.rest and not args.takes_rest:
        args.parser.error(f"unrecognized arguments: {' '.join(args.rest)}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (by default the process's) and returns its exit code; 2 is raised, as SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # tables have letters that an encoding may lack
    try:
        try:
            args = parse(arguments)
        finally:
            sys.stdout.flush()  # what --help and --version have printed
    except BrokenPipeError:
        return read_enough()
    if args.hands_over:
        return args.run(args)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # whatever libraries print is not the result
            result = args.run(args)
        if result is not None:
            print(json.dumps(result.data, indent=2) if args.json else result.text, flush=True)
        return int(result is not None and result.failed)
    except BrokenPipeError:
        return read_enough()
    except KeyboardInterrupt:
        left = NOTHING if "out" in args and not os.path.exists(args.out) else args.left.format(**vars(args))
        say(f"interrupted; {left}.")
        return 130
    except UsageError as error:
        args.parser.error(str(error))
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        say(told(error, args))
        return 1


def read_enough() -> int:
    """The exit code where nobody reads the result to its end, which then goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def told(error: Exception, args: argparse.Namespace) -> str:
    """An error in words: as it is if it was raised for people, else with its kind."""
    ours = sys.modules.get("hf_ext.errors")
    if isinstance(error, OSError | ImportError) or ours is not None and isinstance(error, ours.HfExtError):
        return str(error)
    if isinstance(error, ValueError) and args.takes_rest:  # what Transformers and PEFT say to their options
        return str(error)
    return f"{type(error).__name__}: {error} (hf-ext --traceback {args.command} … shows where it comes from)"
