"""Writes files and folders whole or not at all, one process at a time.

A folder is written beside its place and then exchanged with what is there, in one step of the file system (Linux). Where that
is not possible, its files move one by one: the old configuration goes first and the new one comes last, so that an interrupted
move leaves a folder that does not load, and the next write completes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import CONFIG
from hf_ext.storage.layout import ADAPTER_CONFIG, INDEX, WEIGHTS, save_of
from hf_ext.storage.tree import GRAVE, HELD, JOURNAL, OURS, STAGE, finish_deletion, scan

LOCK = f"{OURS}lock"
FIRST_AND_LAST = (Path(CONFIG), Path(ADAPTER_CONFIG))  # without them, nothing loads


@contextlib.contextmanager
def staged_folder(target: str | os.PathLike, stale: Iterable[Path] = ()) -> Iterator[Path]:
    """Yields a folder to write a checkpoint into; if the block succeeds, its files go to `target`.

    Other files of `target` stay, except weights that the new checkpoint replaces by others (shards of another count), and the
    files of `stale`, relative to `target`, to which the block may add. If the block fails, `target` does not change.

    Raises:
        CheckpointError: `target` cannot be written, or another process is writing there.
    """
    target = Path(os.path.realpath(target))
    with locked(target):
        _complete(target)
        place = target.parent if _may_be_exchanged(target) else target
        stage = place / f".{_key(target)}.{uuid.uuid4().hex[:8]}{STAGE}"
        created = not target.exists()
        try:
            stage.mkdir(parents=True)
            yield stage
            _publish(stage, target, set(stale))
        finally:
            if not (target / JOURNAL).exists():
                shutil.rmtree(stage, ignore_errors=True)
            if created:
                _remove_empty([target])


@contextlib.contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
    """Lets one thread of one process write to a folder at a time. A thread may take the lock again.

    Raises:
        CheckpointError: another thread or process has the lock, or the folder cannot be written. An OSError of the block
            becomes one too.
    """
    folder = Path(os.path.realpath(folder))
    above = next((path for path in (folder, *folder.parents) if os.path.exists(path)), None)
    if above is not None and not os.path.isdir(above):
        raise CheckpointError(f"{above} is a file; give a folder to write the checkpoint into.")
    missing = [path for path in folder.parents if not os.path.exists(path)]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = folder.parent if os.access(folder.parent, os.W_OK) else folder
        lock = FileLock(place / f".{_key(folder)}{LOCK}", timeout=0, is_singleton=True)
        lock.acquire()
    except Timeout:
        raise CheckpointError(f"Another process is writing to {folder}. Run the command again when it has ended.") from None
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written: {error}") from error
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written: {error}") from error
    finally:
        if lock.lock_counter == 1:  # its holder deletes it; a process that opened it before notices
            with contextlib.suppress(OSError):
                os.unlink(lock.lock_file)
        lock.release()
        _remove_empty(missing)


def _key(folder: Path) -> str:
    """Returns the folder's name, shortened for use in the names of files beside it (at most 255 bytes)."""
    name = os.fsencode(folder.name)
    return folder.name if len(name) <= 200 else xxhash.xxh3_128_hexdigest(name)


def _may_be_exchanged(target: Path) -> bool:
    """Checks whether another folder may replace `target`. It must not be a mount or the working directory, and files must be
    writable beside it."""
    try:
        stands_in_it = Path.cwd().is_relative_to(target)
    except OSError:  # the working directory was deleted
        stands_in_it = False
    return os.access(target.parent, os.W_OK) and not target.is_mount() and not stands_in_it


def _publish(stage: Path, target: Path, stale: set[Path]) -> None:
    """Makes the files of a stage those of `target`, and checks that they are."""
    entries = scan(stage)
    files = {path for path, entry in entries.items() if not stat.S_ISDIR(entry.st_mode)}
    for path in files:
        if (target / path).is_dir() and not (target / path).is_symlink():
            raise CheckpointError(f"{target / path} is a folder, and a file of that name is to be written. Move it away.")
    _require_no_links(files, target)
    if not (stage.parent == target.parent and _renamed(stage, target)):
        dropped = (_replaced(files, target) | stale) - files
        if not (stage.parent == target.parent and _exchanged(stage, target, files, dropped)):
            text = json.dumps({"stage": stage.name, "dropped": [path.as_posix() for path in dropped]})
            write_atomically(target / JOURNAL, lambda beside: beside.write_text(text, encoding="utf-8"))
            _move_files(stage, target, dropped)
    for path in files:
        if not os.path.lexists(target / path) or (target / path).lstat().st_ino != entries[path].st_ino:
            raise CheckpointError(f"Another program has changed {target / path} at the same time. Write {target} again.")


def _renamed(stage: Path, target: Path) -> bool:
    """Makes a stage the target, if there is none yet."""
    if os.path.lexists(target):
        return False
    try:
        os.rename(stage, target)
    except OSError:
        if not os.path.lexists(target):  # else another process has just created it, for example in distributed training
            raise
    return not stage.exists()


def _replaced(files: set[Path], target: Path) -> set[Path]:
    """Returns the weights of `target` that belong to the same save as weights in `files`, and their indices."""
    saves = {save_of(path) for path in files if WEIGHTS.fullmatch(str(path))}
    indices = {Path(INDEX.replace(".json", save.removeprefix("model") + ".json")) for save in saves}
    weights = {Path(path.name) for path in target.glob("*.safetensors") if WEIGHTS.fullmatch(path.name)}
    return {path for path in weights if save_of(path) in saves} | {path for path in indices if (target / path).exists()}


def _exchanged(stage: Path, target: Path, files: set[Path], dropped: set[Path]) -> bool:
    """Links the other files of `target` into a stage, then exchanges the two folders.

    Returns false if the file system does not support it, or if `target` has other folders, whose files stay where they are."""
    before = scan(target)
    others = {path: entry for path, entry in before.items() if path not in dropped and not os.path.lexists(stage / path)}
    folders = {path for path, entry in others.items() if stat.S_ISDIR(entry.st_mode)}
    if any(path.parent != Path() for path in others) or folders - {parent for path in dropped for parent in path.parents}:
        return False
    try:
        for path in others.keys() - folders:
            os.link(target / path, stage / path, follow_symlinks=False)
        shutil.copymode(target, stage)
    except OSError:  # hard links are not supported, or not to another user's files
        return False
    if not _exchange(stage, target):
        return False
    # Other processes may have written into the folder meanwhile, for example in distributed training.
    for path, entry in scan(stage).items():
        new = path not in before or before[path].st_ino != entry.st_ino
        if new and path not in files and not stat.S_ISDIR(entry.st_mode):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / path, target / path)
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step. Returns false if the system or the file system does not support it."""
    sys.audit("hf_ext.exchange", os.fspath(one), os.fspath(other))
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _require_no_links(files: Iterable[Path], target: Path) -> None:
    """Raises CheckpointError if writing these files, relative to `target`, would follow a link to another folder."""
    for folder in {target / parent for path in files for parent in path.parents if parent != Path()}:
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a link, and files are to be written into a folder of that name. Move it away.")


def _move_files(stage: Path, target: Path, dropped: set[Path]) -> None:
    """Moves the files of a stage one by one, while `target` has a journal. After an interruption, another call resumes."""
    files = [path for path, entry in scan(stage).items() if not stat.S_ISDIR(entry.st_mode)]
    _require_no_links(files, target)
    last = [path for path in FIRST_AND_LAST if path in files]
    for path in (*last, *dropped):
        (target / path).unlink(missing_ok=True)
    _remove_empty({target / path.parent for path in dropped if path.parent != Path()})
    for path in (*(path for path in files if path not in last), *last):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / path, target / path)
        (stage / path).unlink(missing_ok=True)  # if both were links to one file, nothing has moved
    (target / JOURNAL).unlink()


def _complete(target: Path) -> None:
    """Completes the move that a kill interrupted, and removes other stages of `target`. No process uses them, because we hold
    the lock."""
    stages = [*_stages(target.parent, _key(target)), *_stages(target, _key(target))]
    if (target / JOURNAL).exists():
        name, dropped = _read_journal(target)
        for stage in stages:
            if stage.name == name:
                _move_files(stage, target, dropped)
        (target / JOURNAL).unlink(missing_ok=True)
    for stage in stages:
        shutil.rmtree(stage)


def _read_journal(target: Path) -> tuple[str, set[Path]]:
    """Returns the name of the stage and the files to remove. Ignores paths out of the folder, because the journal may come from
    an untrusted source."""
    if not (target / JOURNAL).is_file():  # reading a pipe would wait forever
        return "", set()
    try:
        journal = json.loads((target / JOURNAL).read_text(encoding="utf-8"))
        dropped = {Path(path) for path in journal["dropped"]}
        inside = {path for path in dropped if (target / path).parent.resolve().is_relative_to(target)}
        return str(journal["stage"]), inside
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", set()


def recover(folder: Path) -> None:
    """Completes moves and deletions that kills interrupted, in the folders that `folder` holds."""
    for stage in _stages(folder):
        target = folder / stage.name[1:].rsplit(".", 2)[0]
        with locked(target):
            _complete(target)
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if (path / JOURNAL).exists():
            with locked(path):
                _complete(path)
        target = folder / path.name[1:].rpartition(OURS)[0]
        if path.name.endswith((HELD, GRAVE)):
            finish_deletion(target)
        elif path.name.endswith(LOCK):
            with contextlib.suppress(CheckpointError), locked(target):  # which removes it
                pass


def _stages(place: Path, key: str | None = None) -> list[Path]:
    """Returns the stages in a folder, for one target or for all."""
    name = re.compile(rf"\.{re.escape(key) if key else '.+'}\.[0-9a-f]{{8}}{re.escape(STAGE)}")
    paths = [path for path in place.iterdir() if name.fullmatch(path.name)] if place.is_dir() else []
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def write_atomically(path: str | os.PathLike, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path beside `path`, then renames that file to `path`."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.partial")
    beside.unlink(missing_ok=True)  # it could be a link
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Changes the text of a file, if it exists. Keeps line ends. Replaces read-only files too."""
    if path.exists():
        text = change(path.read_bytes().decode())

        def write(beside: Path) -> None:
            beside.write_bytes(text.encode())
            shutil.copymode(path, beside)

        write_atomically(path, write)


def write_json(path: Path, content: dict) -> None:
    """Writes a JSON file with an indent of two spaces."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
