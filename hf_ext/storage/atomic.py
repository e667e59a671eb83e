"""Writes files and folders whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hf_ext.errors import CheckpointError
from hf_ext.storage.layout import CONFIG, INDEX, STAGE, WEIGHTS, save_of


@contextlib.contextmanager
def staged_folder(target: str | os.PathLike, stale: Iterable[Path] = ()) -> Iterator[Path]:
    """Yields a folder to write a checkpoint into; if the block succeeds, its files move into `target`.

    Weights move first, config.json last, each file in one step. If the block fails, `target` stays as it was.

    Before config.json moves, weights in `target` that the new checkpoint replaces by others (shards of another count) are
    removed, so that whoever finds config.json finds its weights. The same goes for files of `stale`, relative to `target`,
    that the new checkpoint lacks.
    """
    target = Path(target)
    created = not os.path.exists(target)
    above = next((path for path in (target, *target.parents) if os.path.exists(path)), None)
    if above is not None and not os.path.isdir(above):
        raise CheckpointError(f"{above} is a file; give a folder to write the checkpoint into.")
    stage = target / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir(parents=True)
        yield stage
        _move_into(stage, target, stale)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if created and os.path.exists(target) and not any(target.iterdir()):
            target.rmdir()


def _move_into(stage: Path, target: Path, stale: Iterable[Path]) -> None:
    def move(path: Path) -> None:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / path, target / path)

    files = {path.relative_to(stage) for path in stage.rglob("*") if path.is_file()}
    weights = {path for path in files if WEIGHTS.fullmatch(str(path))}
    config = files & {Path(CONFIG)}
    saves = {save_of(path) for path in weights}
    indices = [target / INDEX.replace(".json", save.removeprefix("model") + ".json") for save in saves]
    for path in [*sorted(weights), *sorted(files - weights - config)]:
        move(path)
    for old in [*target.glob("*.safetensors"), *indices]:
        replaced = old in indices or WEIGHTS.fullmatch(old.name) and save_of(old) in saves
        if replaced and old.relative_to(target) not in files:
            old.unlink(missing_ok=True)
    for path in set(stale) - files - config:
        (target / path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder is not empty, or is `target` itself
            if path.parent != Path():
                (target / path.parent).rmdir()
    for path in config:
        move(path)


def write_atomically(path: str | os.PathLike, write: Callable[[Path], object]) -> None:
    """Calls `write` with a path beside `path`, then renames that file to `path`."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.partial")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Changes the text of a file, if it exists. Line ends stay; a read-only file is replaced too."""
    if path.exists():
        text = change(path.read_bytes().decode())
        write_atomically(path, lambda beside: beside.write_bytes(text.encode()))


def write_json(path: Path, content: dict) -> None:
    """Writes a JSON file with an indent of two spaces."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy(source: Path, target: Path) -> None:
    """Copies a file with its times, and creates the folder it goes to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def link(source: Path, target: Path) -> None:
    """Makes a hard link to a file, or a copy on file systems without links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        copy(source, target)


def flush_folder(folder: Path) -> None:
    """Waits until the files of a folder are on the disk, so that they survive a loss of power."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        for path in (*folder.rglob("*"), folder, folder.absolute().parent):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def delete_folder(folder: Path) -> None:
    """Deletes a folder in one step as seen by others: it is renamed first. A second call removes what a kill left.

    Raises:
        CheckpointError: it could not be deleted.
    """
    folder = folder.resolve()
    grave = folder.with_name(f".{folder.name}{STAGE}")
    try:
        if grave.exists():
            shutil.rmtree(grave)
        if folder.exists():
            os.rename(folder, grave)
            shutil.rmtree(grave)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be deleted: {error}") from error
