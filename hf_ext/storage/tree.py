"""Lists, copies and deletes everything below a folder. Links to folders are not followed, and nothing is left out silently."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

import xxhash

from hf_ext.errors import CheckpointError
from hf_ext.storage.files import LOCK, STAGE, copy, locked, scan, staged_folder
from hf_ext.storage.layout import MOVING, OURS

HELD, GRAVE = f"{OURS}held", f"{OURS}deleted"  # names of a folder while it is checked, and while it is deleted


def real_path(path: Path) -> Path:
    """Returns the path without links. A link that leads to itself stays, where `Path.resolve` raises RuntimeError."""
    return Path(os.path.realpath(path))


def stamp(folder: Path) -> str:
    """Returns a hash of everything below a folder, by names, modes, sizes and times. It changes when a file is written."""
    digest = xxhash.xxh3_128()
    for path, entry in sorted(scan(folder).items()):
        written = (entry.st_size, entry.st_mtime_ns) if not stat.S_ISDIR(entry.st_mode) else ()
        digest.update(repr((path.as_posix(), entry.st_mode, *written)).encode(errors="surrogateescape"))
    return digest.hexdigest()


def link(source: Path, target: Path) -> None:
    """Makes a hard link to a file, or a copy on file systems without links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        copy(source, target)


def flush_folder(folder: Path) -> None:
    """Waits until the files of a folder are on the disk, so that they survive a loss of power."""
    if os.name != "posix":  # other systems cannot open a folder
        return
    entries = scan(folder).items()
    inside = [folder / path for path, entry in entries if stat.S_ISREG(entry.st_mode) or stat.S_ISDIR(entry.st_mode)]
    for path in (*inside, folder, folder.absolute().parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported for folders on this file system
                raise
        finally:
            os.close(handle)


def delete_folder(folder: Path, seen: str | None = None, needed: Iterable[str | os.PathLike] = ()) -> None:
    """Deletes a folder in one step for other processes, by renaming it first. After a kill, a second call completes the
    deletion.

    Args:
        seen: its `stamp` when it was read.
        needed: files and folders without which what replaces the folder cannot be read.

    Raises:
        CheckpointError: the folder cannot be deleted, has changed since `seen`, or is a link, or a needed path is gone; it is
            unchanged then.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link and is not deleted; give the folder that it leads to.")
    folder = real_path(folder)
    held, grave = (folder.with_name(f".{folder.name}{suffix}") for suffix in (HELD, GRAVE))
    try:
        if not finish_deletion(folder) and folder.exists():
            os.rename(folder, held)  # no process writes to it by its name any more
            try:
                if seen is not None and stamp(held) != seen:
                    raise CheckpointError(
                        f"{folder} is not deleted: files in it were written or removed while it was read. Run the command "
                        "again."
                    )
                # Another process may be deleting a needed folder. If it needs this one, it finds this one gone in turn.
                if gone := [path for path in needed if not os.path.exists(path)]:
                    raise CheckpointError(
                        f"{folder} is not deleted: {gone[0]} is gone, without which the result cannot be read. Restore "
                        "that, or delete the result."
                    )
                os.rename(held, grave)
            except BaseException:
                os.rename(held, folder)
                raise
            shutil.rmtree(grave)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be deleted: {error}") from error


def finish_deletion(folder: Path) -> bool:
    """Completes the deletion of a folder that a kill interrupted, or restores the folder if it was not checked yet. Returns
    whether a folder was deleted and none of that name exists now.

    Raises:
        CheckpointError: there is something else under the names that folders have while they are deleted.
    """
    folder = folder.absolute()
    held, grave = (folder.with_name(f".{folder.name}{suffix}") for suffix in (HELD, GRAVE))
    try:
        for path in (held, grave):
            if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
                raise CheckpointError(f"{folder} cannot be deleted: {path} is not a folder of this package. Move it away.")
        if held.exists() and not folder.exists():
            os.rename(held, folder)
        if not grave.exists():
            return False
        shutil.rmtree(grave)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be deleted: {error}") from error
    return not folder.exists()


def recover(folder: Path) -> None:
    """Completes moves and deletions that kills interrupted, in the folders that `folder` holds."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        name = path.name[1:].rpartition(OURS)[0]
        if path.name.endswith(STAGE) or (path / MOVING).is_dir():
            with contextlib.suppress(CheckpointError), staged_folder(folder / name if name else path):
                pass
        elif path.name.endswith((HELD, GRAVE)):
            finish_deletion(folder / name)
        elif path.name.endswith(LOCK):
            with contextlib.suppress(CheckpointError), locked(folder / name):  # which removes it
                pass
