"""The entry point: parses the command line, runs the command and returns the exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import hf_ext
from hf_ext.cli import checkpoints, emr, fm_delta, tools, trans_lora, weight_sync
from hf_ext.cli.command import app, flag
from hf_ext.integration import versions

INTRODUCTION = """\
Work on saved models: folders that save_pretrained has written, or ids of models
on the Hugging Face Hub. In a script with `import hf_ext`, from_pretrained loads
the results as usual."""
CLOSING = """\
`hf-ext COMMAND --help` explains a command, with examples. With --json, a command
prints its result as JSON. Results go to stdout, everything else to stderr.
The exit code is 0 for success, 1 for a failure, 2 for a mistake in the command line."""
HOSTS = ("transformers", "peft", "torch", "huggingface_hub")


def show_version(wanted: bool) -> None:
    """Prints the versions to include in a bug report: this package's and those of the libraries that it plugs into."""
    if wanted:
        hosts = ", ".join(f"{host} {versions.installed(host) or 'not installed'}" for host in HOSTS)
        print(f"hf_ext {hf_ext.__version__} ({hosts}, Python {sys.version.split()[0]})", flush=True)
        raise typer.Exit


def tutorial() -> str:
    """Returns the help of `hf-ext`. A paragraph after "\\b" is not wrapped again."""
    modules = (fm_delta, checkpoints, emr, weight_sync, trans_lora, tools)
    text = "\n\n".join([INTRODUCTION, *(str(module.section) for module in modules), CLOSING])
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.split("\n\n"))


@app.callback(help=tutorial())
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=show_version, help="Print the versions to include in a bug report."),
    ] = False,
    traceback: Annotated[bool, flag("--traceback", "Print the traceback of an error.")] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            metavar="N",
            show_default=False,
            help="Maximum number of threads for work on tensors. Defaults to the cores that CPU affinity (taskset, Slurm) and "
            "the container's CPU quota grant. Does not change the results.",
        ),
    ] = None,
) -> None:
    """Handles the options that stand before the command. `failure` reads --traceback."""
    if threads is not None:
        from hf_ext.storage.prefetch import at_most_cores

        context.with_resource(at_most_cores(threads))


def main(arguments: Sequence[str] | None = None) -> Any:
    """Runs a command line, by default that of the process, and returns the exit code. Without arguments, prints the help as
    `--help` does; the exit code is then 2, as that of `hf`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)  # warns of an optional kernel when PEFT imports it
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for encodings that lack letters of our tables
    try:
        code = typer.main.get_command(app).main(arguments or ["--help"], prog_name="hf-ext", standalone_mode=False)
        return code if arguments else 2
    except typer.Abort:  # Ctrl-C outside the command's own work
        raise KeyboardInterrupt from None
    except OSError as error:  # of printing: commands report their own errors
        sys.stdout = open(os.devnull, "w")  # the old one would fail again at the end of the process
        print(f"hf-ext: the result could not be printed: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        context: typer.Context | None = getattr(error, "ctx", None)
        command = context.command_path if context else "hf-ext"
        message = " ".join(error.format_message().split()).rstrip(".")
        print(f"{command}: {message} ({command} --help shows how)", file=sys.stderr)
        return 2
