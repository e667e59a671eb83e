"""Places for decoded files: the folder that HF_EXT_DECODED names, where they stay for later loads, and temporary ones."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import xxhash

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage.files import locked, staged_folder
from hf_ext.storage.plain_writer import write_files
from hf_ext.storage.safetensors_file import SafetensorsFile, TensorFile

try:
    import fcntl
except ImportError:  # on Windows, where open files cannot be removed
    fcntl = None  # type: ignore[assignment]

FOLDER, LIMIT = "HF_EXT_DECODED", "HF_EXT_DECODED_GB"  # of the environment
SHARED_MEMORY = Path("/dev/shm")
ENTRY = "decoded-"  # begins the name of an entry, before 32 digits


def decoded_folder(digest: str, files: Sequence[TensorFile], held: contextlib.ExitStack) -> Path:
    """Returns a folder that holds these files, whose contents `digest` identifies. Decodes them unless an earlier load did. No
    process removes the folder until `held` is closed. Raises CheckpointError if there is no space for the files, they cannot be
    written, or another process is writing them, and another HfExtError if a tensor cannot be decoded."""
    root, key = Path(os.path.expanduser(os.environ[FOLDER])).absolute(), xxhash.xxh3_128(digest.encode())
    for file in files:  # another checkpoint may have the same tensors in other files
        key.update(file.path.name.encode() + file.header_bytes)
    entry = root / f"{ENTRY}{key.hexdigest()}"
    if not _holds(entry, files, held):
        if not entry.exists():
            with contextlib.suppress(OSError):
                entry.unlink()  # a link to nothing
        with staged_folder(entry) as stage:
            _make_room(root, stage, _size(files))
            write_files(files, stage, "Decoding")
            _hold(stage, files, held)
    with contextlib.suppress(OSError):  # of another user's folder
        os.utime(entry)
    return entry


def place_for(files: Sequence[TensorFile], shared: bool = False) -> Path:
    """Returns a folder with room for temporary decoded files: that of TMPDIR. With `shared`, it is shared memory if the files
    take at most half of what is free. Raises CheckpointError if there is no room."""
    size = _size(files)
    if shared and os.access(SHARED_MEMORY, os.W_OK):
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if 2 * size <= min(shutil.disk_usage(SHARED_MEMORY).free, int(available[1]) * 1024 if available else 0):
            return SHARED_MEMORY
    place = Path(tempfile.gettempdir())
    if size > (free := shutil.disk_usage(place).free):
        raise CheckpointError(
            f"The weights are decoded to temporary files first. {size / 1e9:.1f} GB do not fit into {place}: "
            f"{free / 1e9:.1f} GB are free. Set TMPDIR to a folder with more space, or write a plain checkpoint."
        )
    return place


def _size(files: Sequence[TensorFile]) -> int:
    return sum(tensor.nbytes for file in files for tensor in file.entries.values())


def _holds(entry: Path, files: Sequence[TensorFile], held: contextlib.ExitStack) -> bool:
    try:
        with contextlib.ExitStack() as stack:
            file = _hold(entry, files, stack)
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):  # it was replaced before it was locked
                return False
            if any(SafetensorsFile(entry / file.path.name).header_bytes != file.header_bytes for file in files):
                return False
            held.enter_context(stack.pop_all())
            return True
    except (CorruptFileError, OSError):
        return False


def _hold(folder: Path, files: Sequence[TensorFile], held: contextlib.ExitStack) -> IO[bytes]:
    """Opens and locks a file of a folder, which prevents that `_make_room` removes the folder."""
    file = held.enter_context(open(folder / files[0].path.name, "rb"))
    _lock(file)
    return file


def _lock(file: IO[bytes], exclusive: bool = False) -> None:
    """Locks a file until it is closed. Does nothing where the system or the file system has no locks. Raises BlockingIOError if
    another file object has a lock, and this one is to be exclusive."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except BlockingIOError:
        raise
    except OSError:
        pass


@contextlib.contextmanager
def _unused(entry: Path) -> Iterator[None]:
    """Keeps loads from using an entry meanwhile. Raises BlockingIOError if one uses it."""
    with contextlib.ExitStack() as stack:
        for path in entry.iterdir():
            if path.is_file():
                _lock(stack.enter_context(open(path, "rb")), exclusive=True)
        yield


def _is_used(entry: Path) -> bool:
    try:
        with _unused(entry):
            return False
    except BlockingIOError:
        return True


def _make_room(root: Path, stage: Path, size: int) -> None:
    """Removes entries until a new one of this size fits, the least recently loaded first, but none that a model uses. Raises
    CheckpointError if it would not fit after all of them. None is removed then."""
    try:
        limit = float(os.environ.get(LIMIT, 100)) * 1e9
        if not limit >= 0:
            raise ValueError
    except ValueError:
        raise CheckpointError(f"{LIMIT} is '{os.environ[LIMIT]}', not a number of GB.") from None
    entries = [path for path in root.glob(f"*{ENTRY}{'[0-9a-f]' * 32}*") if path.is_dir() and path != stage]
    entries.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    sizes = {path: sum(file.lstat().st_size for file in path.iterdir()) for path in entries}
    unused = [path for path in entries if not _is_used(path)]
    removable = sum(sizes[path] for path in unused)
    used = sum(sizes.values()) - removable

    def fits(removable: int) -> bool:
        return size + sum(sizes.values()) - removable <= limit and size <= shutil.disk_usage(root).free + removable

    while fits(removable) and not fits(0) and unused:
        oldest = unused.pop()
        name = oldest.name[oldest.name.index(ENTRY) :][: len(ENTRY) + 32]  # of the entry, also if this is its stage
        with contextlib.suppress(CheckpointError), locked(root / name), _unused(oldest):
            shutil.rmtree(oldest, ignore_errors=True)
        removable -= sizes[oldest]
        if not oldest.exists():  # else another process is writing it
            del sizes[oldest]
    if not fits(0):
        raise CheckpointError(
            f"{size / 1e9:.1f} GB of decoded weights do not fit into {root}: {LIMIT} is {limit / 1e9:g}, "
            f"{shutil.disk_usage(root).free / 1e9:.1f} GB are free, and {used / 1e9:.1f} GB are in use."
        )
