"""The commands for compressed models and merges alike."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from hf_ext.cli.command import Json, MovedBase, Plot, Result, Section, Verbose, argument, drawn, missing_config, option

section = Section(
    "Inspect a compressed model or a merge, and check it",
    "$ hf-ext inspect my-bert-small --plot sizes.png\n$ hf-ext verify my-bert-merged",
)


Stored = Annotated[str, argument("SRC", "Compressed folder, folder of a merge, or the id of one on the Hub.")]


@section.command(
    "show sizes of tensors, or how close tasks are to their models",
    "  hf-ext inspect my-bert-small --plot sizes.png\n  hf-ext inspect my-bert-merged --json",
    "The first example below is for a compressed model, the second for a merge. The base is not required. Of a "
    "compressed model, --verbose adds a row for each tensor. docs/emr.md explains the columns for a merge.",
)
def inspect(
    src: Annotated[str, argument("SRC", "Compressed folder or file, folder of a merge, or the id of one on the Hub.")],
    plot: Plot = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> Result:
    from hf_ext import emr

    folder, method = opened(src)
    report: Any = emr.report(folder) if method is emr else method.inspect(folder)
    missing = drawn(lambda: report.plot(plot)) if plot else ""
    text = str(report) if verbose or method is emr else f"{report.kind_table()}\n\n{report.summary()}"
    return Result(text + missing, report.to_dict())


@section.command(
    "decode every tensor and compare it with its checksum",
    "  hf-ext verify my-bert-small\n  hf-ext verify my-bert-merged --base /mnt/bert    # the base moved",
    "For a merge, also checks every mask. If a file is damaged, the error names it and the exit code is 1.",
)
def verify(src: Stored, base: MovedBase = None, as_json: Json = False) -> Result:
    folder, method = opened(src)
    count = method.verify(folder, base=base)
    text = f"All {count} tensors of {src} match their checksums. Files without weights have none.{missing_config(folder)}"
    return Result(text, {"src": src, "tensors": count})


@section.command(
    "record another place of the base, in config.json alone",
    "  hf-ext rebase my-bert-small --base /mnt/bert\n  hf-ext rebase my-bert-small --base google-bert/bert-base-uncased",
    "Checks that it is the same model. A base beside the folder is recorded by a relative path: both can move together. "
    "Without this command, a base that has moved is searched for in the folders of HF_EXT_BASES.",
)
def rebase(
    folder: Annotated[str, argument("FOLDER", "Compressed folder, or folder of a merge.")],
    base: Annotated[str, option("--base", "Folder or Hub id where the base is now.")],
    as_json: Json = False,
) -> Result:
    from hf_ext.storage.open import rebase

    rebase(Path(folder), base)
    return Result(f"{folder} now names the base {base}.", {"folder": folder, "base": base})


def opened(src: str) -> tuple[Path, ModuleType]:
    """Returns the local path of a checkpoint, and the module of the method that wrote it: `emr` or `fm_delta`."""
    from hf_ext import emr, fm_delta
    from hf_ext.errors import CheckpointError
    from hf_ext.storage.config_file import is_merge
    from hf_ext.storage.hub import local_copy
    from hf_ext.storage.layout import all_weights

    folder = local_copy(src)
    checkpoints = sorted(folder.glob("checkpoint-*[0-9]"))
    if checkpoints and not all_weights(folder):
        raise CheckpointError(
            f"{folder} has no weights of its own, only checkpoints. Give one of them, such as {checkpoints[0]}."
        )
    return folder, emr if is_merge(folder) else fm_delta
