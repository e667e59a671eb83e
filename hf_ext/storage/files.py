"""Writes files and folders whole or not at all, one process at a time, and copies what lies in a folder.

A folder is written beside its place, as a stage, and then exchanged with what is there, in one step of the file system (Linux).
Where that is not possible, the files of the stage move one by one: the old configuration goes first and the new one comes last,
so that an interrupted move leaves a folder that does not load. The next write to the folder completes the move.
All of it is on the disk before it gets its place, so that this holds for a crash of the machine too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import CONFIG
from hf_ext.storage.guards import require_new, require_place
from hf_ext.storage.layout import ADAPTER_CONFIG, MOVING, OURS, PIPELINE, replaced_weights

LOCK = f"{OURS}lock"
STAGE = f"{OURS}partial"
MOVES = f"{OURS}moves"  # in a stage whose files move one by one: their names, and those of the files that they replace
LOADED_BY = (Path(CONFIG), Path(ADAPTER_CONFIG), Path(PIPELINE))  # nothing loads without them


@contextlib.contextmanager
def staged_folder(
    target: str | os.PathLike, stale: Iterable[Path] = (), overwrite: bool | Callable[[], bool] = True
) -> Iterator[Path]:
    """Yields a folder to write a checkpoint into; if the block succeeds, its files go to `target`.

    Other files of `target` stay, except weights that the new checkpoint replaces by others (shards of another count), and the
    files of `stale`, relative to `target`, to which the block may add. If the block fails, `target` does not change.

    Args:
        overwrite: replace files of `target` (see `require_place`).

    Raises:
        CheckpointError: `target` holds other files, or cannot be written, or another process is writing there.
    """
    target = Path(os.path.realpath(target))
    with locked(target):
        _complete_move(target)
        replaces = require_place(target, overwrite)
        beside, inside = target.with_name(f".{_key(target)}{STAGE}"), target / STAGE
        for left in (beside, inside):  # by a kill: no other process uses them, because we hold the lock
            _delete(left)
        stage = beside if _may_be_exchanged(target) else inside
        created = not target.exists()
        try:
            stage.mkdir(parents=True)
            yield stage
            _publish(stage, target, set(stale), replaces)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            if created:
                _remove_empty([target])


@contextlib.contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
    """Lets one thread of one process write to a folder at a time. A thread may take the lock again. Raises CheckpointError if
    another thread or process has the lock, or the folder cannot be written. An OSError of the block becomes one too."""
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
    except OSError as error:  # perhaps of a file that the block reads
        raise CheckpointError(f"{folder} was not written: {error}") from error
    finally:
        if lock.lock_counter == 1:  # its holder deletes it; a process that opened it before notices
            with contextlib.suppress(OSError):
                os.unlink(lock.lock_file)
        lock.release()
        _remove_empty(missing)


def require_another_folder(out: Path, needed: Iterable[str | os.PathLike | None]) -> None:
    """Raises CheckpointError if `out` is one of these folders, or holds one of these files. Ignores all else, such as Hub
    ids."""
    for path in (Path(name) for name in needed if name and os.path.exists(name) and os.path.exists(out)):
        if out.samefile(folder := path if path.is_dir() else path.parent):
            raise CheckpointError(f"{folder} cannot be overwritten, it is still needed; give another folder.")


# ---- from a stage to its target ----


def _key(folder: Path) -> str:
    """Returns the folder's name, shortened for use in the names of files beside it (at most 255 bytes)."""
    name = os.fsencode(folder.name)
    return folder.name if len(name) <= 200 else xxhash.xxh3_128_hexdigest(name)


def _may_be_exchanged(target: Path) -> bool:
    """Checks whether another folder may replace `target`. It must not be a mount or the working directory, and files must be
    writable beside it."""
    try:
        is_working_directory = Path.cwd().is_relative_to(target)
    except OSError:  # the working directory was deleted
        is_working_directory = False
    return os.access(target.parent, os.W_OK) and not target.is_mount() and not is_working_directory


def _publish(stage: Path, target: Path, stale: set[Path], replaces: bool) -> None:
    """Makes the files of a stage those of `target`. Unless `replaces` is true, they must replace no other files."""
    entries = scan(stage)
    files = {path for path, entry in entries.items() if not stat.S_ISDIR(entry.st_mode)}
    _require_places(files, target)
    if not replaces:
        require_new(files, stage, target)
    for path in (*(path for path, entry in entries.items() if not stat.S_ISLNK(entry.st_mode)), Path()):
        flush(stage / path)
    if not os.path.lexists(target):
        try:
            os.rename(stage, target)
            return flush(target.parent)
        except OSError:
            if not os.path.lexists(target):  # else another process has just created it, for example in distributed training
                raise
    dropped = (replaced_weights(files, target) | stale) - files
    if stage.parent == target.parent and _exchanged(stage, target, files, dropped):
        return
    moves = {"files": [path.as_posix() for path in files], "dropped": [path.as_posix() for path in dropped]}
    (stage / MOVES).write_text(json.dumps(moves), encoding="utf-8")
    flush(stage / MOVES)
    os.rename(stage, target / MOVING)
    _complete_move(target)


def _exchanged(stage: Path, target: Path, files: set[Path], dropped: set[Path]) -> bool:
    """Links the other files of `target` into a stage, then exchanges the two folders. Returns false if the file system does not
    support it."""
    before = scan(target)
    kept = {path: entry for path, entry in before.items() if path not in dropped and not os.path.lexists(stage / path)}
    emptied = {parent for path in dropped for parent in path.parents}
    folders = [path for path, entry in kept.items() if stat.S_ISDIR(entry.st_mode) and path not in emptied]
    links = [path for path, entry in kept.items() if not stat.S_ISDIR(entry.st_mode)]
    for path in {*folders, *(path.parent for path in links)}:
        (stage / path).mkdir(parents=True, exist_ok=True)
    try:
        for path in links:
            os.link(target / path, stage / path, follow_symlinks=False)
        for path in reversed(folders):
            shutil.copystat(target / path, stage / path)
        shutil.copymode(target, stage)
    except OSError:  # hard links are not supported, or not to another user's files
        return False
    if not _exchange(stage, target):
        return False
    flush(target.parent)
    # Other processes may have written into the folder meanwhile, for example in distributed training.
    for path, entry in scan(stage).items():
        new = path not in before or before[path].st_ino != entry.st_ino
        if new and path not in files and not stat.S_ISDIR(entry.st_mode):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / path, target / path)
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step. Returns false if the system or the file system does not support it."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _complete_move(target: Path) -> None:
    """Moves the files of a stage that lies in `target` one by one, if there is one. After a kill, another call resumes."""
    stage = target / MOVING
    if stage.is_dir() and not stage.is_symlink():
        files, dropped = _read_moves(stage, target)
        _require_places(files, target)
        last = [path for path in LOADED_BY if os.path.lexists(stage / path)]
        for path in (*last, *dropped):
            (target / path).unlink(missing_ok=True)
        _remove_empty({target / path.parent for path in dropped if path.parent != Path()})
        for path in (*(path for path in files if path not in last), *last):
            if os.path.lexists(stage / path):
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(stage / path, target / path)
        flush(target)
    _delete(stage)


def _read_moves(stage: Path, target: Path) -> tuple[set[Path], set[Path]]:
    """Returns the files of a stage to move, and the files of `target` to remove. Ignores paths out of the folder, because the
    record may come from an untrusted source."""
    try:
        if not (stage / MOVES).is_file():  # reading a pipe would wait forever
            return set(), set()
        moves = json.loads((stage / MOVES).read_text(encoding="utf-8"))
        files, dropped = ({Path(path) for path in moves[key]} for key in ("files", "dropped"))
        inside = {path for path in files | dropped if (target / path).parent.resolve().is_relative_to(target)}
        return files & inside, dropped & inside
    except (ValueError, KeyError, TypeError, RecursionError):
        return set(), set()


def _require_places(files: Iterable[Path], target: Path) -> None:
    """Raises CheckpointError if a folder is in the place of one of these files, relative to `target`, or if writing them would
    follow a link to another folder."""
    for path in files:
        if (target / path).is_dir() and not (target / path).is_symlink():
            raise CheckpointError(f"{target / path} is a folder, and a file of that name is to be written. Move it away.")
    for folder in {target / parent for path in files for parent in path.parents if parent != Path()}:
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a link, and files are to be written into a folder of that name. Move it away.")


def flush(path: Path) -> None:
    """Writes a file or the names in a folder to the disk, if the system caches them."""
    # Some file systems cannot flush folders. The mode of a file, which may be a copy, may forbid to open it.
    with contextlib.suppress(OSError if path.is_dir() else PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _delete(path: Path) -> None:
    """Deletes a folder, or a link or file in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


# ---- what lies in a folder ----


def scan(folder: Path) -> dict[Path, os.stat_result]:
    """Returns the status of everything below a folder, by relative path: files, folders, links (their own) and all others.
    Leaves out temporary files of this package. Raises CheckpointError if a folder cannot be listed, or changes while it is
    listed."""

    def stop(error: OSError) -> None:
        raise error

    entries = {}
    try:
        for path, folders, names in os.walk(folder, onerror=stop):
            folders[:] = [name for name in folders if OURS not in name]
            for name in (*folders, *(name for name in names if OURS not in name)):
                entry = Path(path, name)
                entries[entry.relative_to(folder)] = entry.lstat()
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} could not be listed: {error.strerror}.") from error
    return entries


def copy_entries(src: Path, paths: Iterable[Path], out: Path) -> None:
    """Copies files, folders and links, given relative to `src`, with their times and modes. The contents of a folder are
    separate paths. A link to a file becomes a copy of the file. Other links stay links: to folders, and to nothing. Raises
    CheckpointError if a path is a device, a socket or a pipe."""
    folders = []
    for path in sorted(paths):
        source, target = src / path, out / path
        mode = source.lstat().st_mode
        if stat.S_ISDIR(mode):
            target.mkdir(parents=True, exist_ok=True)
            folders.append(path)
        elif source.is_symlink() and not source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(_place_of_link(source, src))
        elif source.is_file():
            copy(source, target)
        else:
            kind = "socket" if stat.S_ISSOCK(mode) else "pipe" if stat.S_ISFIFO(mode) else "device"
            raise CheckpointError(f"{source} is a {kind}, which cannot be copied. Move it out of {src}.")
    for path in reversed(folders):
        shutil.copystat(src / path, out / path)


def _place_of_link(link: Path, src: Path) -> str:
    """Returns the path for the copy of a link: relative if the link leads into `src`, else absolute."""
    place = os.readlink(link)
    above, last = os.path.split(place)
    leads_to = os.path.normpath(os.path.join(os.path.realpath(link.parent / above), last))
    if not Path(leads_to).is_relative_to(os.path.realpath(src)):
        return leads_to
    return os.path.relpath(leads_to, os.path.realpath(link.parent)) if os.path.isabs(place) else place


def copy(source: Path, target: Path) -> None:
    """Copies a file with its times and mode, and creates the folder it goes to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


# ---- single files ----


def write_atomically(path: str | os.PathLike, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path beside `path`, then renames that file to `path`, once it is on the disk."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.partial")
    beside.unlink(missing_ok=True)  # it could be a link
    try:
        write(beside)
        flush(beside)
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
