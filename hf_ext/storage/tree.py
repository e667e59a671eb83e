"""Lists, copies and deletes everything below a folder. Links to folders are not followed, and nothing is left out silently."""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

import xxhash

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from hf_ext.errors import CheckpointError

OURS = ".hf_ext-"  # in the names of temporary files and folders of this package
STAGE = f"{OURS}partial"
JOURNAL = f"{OURS}journal"  # in a folder into which files are moving: the stage that they come from, and what they replace
FICLONE = 0x40049409  # Linux: makes a file share the blocks of another until either is written
HELD, GRAVE = f"{OURS}held", f"{OURS}deleted"  # names of a folder while it is checked, and while it is deleted


def scan(folder: Path, with_ours: bool = False) -> dict[Path, os.stat_result]:
    """Returns the status of everything below a folder, by relative path: files, folders, links (their own) and all others.

    Args:
        with_ours: whether temporary files of this package count.

    Raises:
        CheckpointError: a folder cannot be listed, or changes while it is listed.
    """

    def stop(error: OSError) -> None:
        raise error

    entries = {}
    try:
        for path, folders, names in os.walk(folder, onerror=stop):
            folders[:] = [name for name in folders if with_ours or OURS not in name]
            for name in (*folders, *names):
                if with_ours or OURS not in name:
                    entry = Path(path, name)
                    entries[entry.relative_to(folder)] = entry.lstat()
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} could not be listed: {error.strerror}.") from error
    return entries


def real_path(path: Path) -> Path:
    """Returns the path without links. A link that leads to itself stays, where `Path.resolve` raises RuntimeError."""
    return Path(os.path.realpath(path))


def stamp(folder: Path) -> str:
    """Returns a hash of everything below a folder, by names, modes, sizes and times. It changes when a file is written."""
    digest = xxhash.xxh3_128()
    for path, entry in sorted(scan(folder, with_ours=True).items()):
        written = (entry.st_size, entry.st_mtime_ns) if not stat.S_ISDIR(entry.st_mode) else ()
        digest.update(repr((path.as_posix(), entry.st_mode, *written)).encode(errors="surrogateescape"))
    return digest.hexdigest()


def copy_entries(src: Path, paths: Iterable[Path], out: Path, like: Path | None = None) -> None:
    """Copies files, folders and links, given relative to `src`, with their times and modes. The contents of a folder are
    separate paths.

    A link to a file becomes a copy of the file. Other links stay links: to folders, and to nothing.

    Args:
        like: a folder some of whose files may equal those of `src`. See `copy`.

    Raises:
        CheckpointError: a path is a device, a socket or a pipe.
    """
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
            copy(source, target, like and like / path)
        else:
            kind = "socket" if stat.S_ISSOCK(mode) else "pipe" if stat.S_ISFIFO(mode) else "device"
            raise CheckpointError(f"{source} is a {kind}, which cannot be copied. Move it out of {src}.")
    for path in reversed(folders):
        shutil.copystat(src / path, out / path)


def _place_of_link(link: Path, src: Path) -> str:
    """Returns the path for the copy of a link: relative if the link leads into `src`, else absolute."""
    place = os.readlink(link)
    leads_to = Path(os.path.normpath(link.parent.absolute() / place))
    if not leads_to.is_relative_to(src.absolute()):
        return os.fspath(leads_to)
    return os.path.relpath(leads_to, link.parent.absolute()) if os.path.isabs(place) else place


def copy(source: Path, target: Path, twin: Path | None = None) -> None:
    """Copies a file with its times and mode, and creates the folder it goes to.

    On Linux file systems that can (Btrfs, XFS), the copy takes no space: it shares the blocks of `source`, or those of
    `twin` if that is a file with the same contents. Writing to one of them later does not change the others.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _clone(source, target):
        shutil.copyfile(source, target)
    elif twin is not None and twin.is_file() and filecmp.cmp(source, twin, shallow=False):
        _clone(twin, target)
    shutil.copystat(source, target)


def _clone(source: Path, target: Path) -> bool:
    """Makes a new file share the blocks of another. Returns true if the file system supports it."""
    if fcntl is None:
        return False
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            fcntl.ioctl(new, FICLONE, old.fileno())
        except OSError:
            return False
    return True


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
