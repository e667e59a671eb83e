"""What all commands share: how one is declared, what it hands back, and the options that several of them take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

UNCHANGED = "nothing was changed"
NOTHING = "nothing was written"
GOES_ON = "{out} has what was done, run again to go on"
MOVED_BASE = "folder or Hub id of the base, if it is no longer where SRC's config.json says"


class UsageError(Exception):
    """A command line that cannot be meant, as parsing alone does not tell."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help shows how)\n")


@dataclass(frozen=True)
class Result:
    """What a command has to say: `text` to people, `data` to programs (`--json`)."""

    text: str
    data: dict
    failed: bool = False


Run = Callable[[argparse.Namespace], Result | int | None]


@dataclass
class Group:
    """The commands that serve one purpose, and the part of the tutorial that shows them.

    Args:
        title: what a person wants to do.
        example: command lines that do it from beginning to end, each after "$ ".
    """

    title: str
    example: str
    parsers: argparse._SubParsersAction
    commands: dict[str, str] = field(default_factory=dict)

    def command(
        self, run: Run, does: str, examples: str, more: str = "", left: str = UNCHANGED, hands_over: bool = False, **options
    ) -> Parser:
        """A new command, called as the function that runs it.

        Args:
            does: what, in a line that fits the tutorial.
            examples: command lines, with what they do behind a #.
            more: what else to know before using it.
            left: what an interrupted run leaves, of the parsed arguments.
            hands_over: another tool goes on in this process; what it prints and returns is its own.
        """
        name = run.__name__.replace("_", "-")
        parser = self.parsers.add_parser(
            name,
            description=f"{does[0].upper()}{does[1:]}." + (f"\n\n{more}" if more else ""),
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )
        if not hands_over:
            parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else to stdout")
        parser.set_defaults(parser=parser, run=run, left=left, hands_over=hands_over, takes_rest=False)
        self.commands[name] = does
        return parser

    def __str__(self) -> str:
        lines = [self.title, "", *(f"  {name:<21}{does}" for name, does in self.commands.items())]
        return "\n".join((*lines, "", *(f"    {line}" for line in self.example.splitlines())))


def path(text: str) -> str:
    """A path or Hub id as it is. An empty one, as an unset variable of the shell gives, would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("'' is empty; give a name")
    return text


def add_source(parser: Parser, what: str) -> None:
    parser.add_argument("src", metavar="SRC", type=path, help=what)


def add_out(parser: Parser) -> None:
    parser.add_argument("--out", type=path, required=True, help="folder to write; files of the same names in it are replaced")


def add_revision(parser: Parser) -> None:
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of the base on the Hub (default: main)")


def say(line: str) -> None:
    """One line to stderr, where everything goes that is not the result."""
    print(" ".join(part.strip() for part in f"hf-ext: {line}".splitlines() if part.strip()), file=sys.stderr)
