"""Places for decoded files: the folder that HF_EXT_DECODED names, where they stay for later loads, and temporary ones."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import xxhash

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage.files import locked, staged_folder
from hf_ext.storage.plain_writer import write_files
from hf_ext.storage.safetensors_file import SafetensorsFile, TensorFile

FOLDER, LIMIT = "HF_EXT_DECODED", "HF_EXT_DECODED_GB"  # of the environment
SHARED_MEMORY = Path("/dev/shm")
ENTRY = "decoded-"  # begins the name of an entry, before 32 digits


def decoded_folder(digest: str, files: Sequence[TensorFile]) -> Path:
    """Returns a folder that holds these files. Decodes them unless an earlier load did.

    Args:
        digest: identifies the contents of the files.

    Raises:
        CheckpointError: there is no space for the files, they cannot be written, or another process is writing them.
        HfExtError: a tensor cannot be decoded.
    """
    root, key = Path(os.path.expanduser(os.environ[FOLDER])).absolute(), xxhash.xxh3_128(digest.encode())
    for file in files:  # another checkpoint may have the same tensors in other files
        key.update(file.path.name.encode() + file.header_bytes)
    entry = root / f"{ENTRY}{key.hexdigest()}"
    if not _holds(entry, files):
        with staged_folder(entry) as stage:
            _make_room(root, stage, _size(files))
            write_files(files, stage, "Decoding")
    with contextlib.suppress(OSError):  # of another user's folder
        os.utime(entry)
    return entry


def place_for(files: Sequence[TensorFile], shared: bool = False) -> Path:
    """Returns a folder with room for temporary decoded files: that of TMPDIR. With `shared`, it is shared memory if the files
    take at most half of what is free.

    Raises:
        CheckpointError: there is no room.
    """
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


def _holds(entry: Path, files: Sequence[TensorFile]) -> bool:
    try:
        return all(SafetensorsFile(entry / file.path.name).header_bytes == file.header_bytes for file in files)
    except CorruptFileError:
        return False


def _make_room(root: Path, stage: Path, size: int) -> None:
    """Removes entries until a new one of this size fits, the least recently loaded first.

    Raises:
        CheckpointError: it would not fit after all of them. None is removed then.
    """
    try:
        limit = float(os.environ.get(LIMIT, 100)) * 1e9
        if not limit >= 0:
            raise ValueError
    except ValueError:
        raise CheckpointError(f"{LIMIT} is '{os.environ[LIMIT]}', not a number of GB.") from None
    entries = [path for path in root.glob(f"*{ENTRY}{'[0-9a-f]' * 32}*") if path.is_dir() and path != stage]
    entries.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in entries}
    if size > min(limit, shutil.disk_usage(root).free + sum(sizes.values())):
        raise CheckpointError(
            f"{size / 1e9:.1f} GB of decoded weights do not fit into {root}: {LIMIT} is {limit / 1e9:g}, and "
            f"{shutil.disk_usage(root).free / 1e9:.1f} GB are free."
        )
    while entries and (size + sum(sizes.values()) > limit or size > shutil.disk_usage(root).free):
        oldest = entries.pop()
        name = oldest.name[oldest.name.index(ENTRY) :][: len(ENTRY) + 32]  # of the entry, also if this is its stage
        with contextlib.suppress(CheckpointError), locked(root / name):  # not if another process is writing it
            shutil.rmtree(oldest, ignore_errors=True)
        del sizes[oldest]
