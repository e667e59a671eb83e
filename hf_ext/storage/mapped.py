"""Memory-mapped files that stay mapped without an open file, because a model may have more shards than a process may open
files."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from pathlib import Path

import numpy as np

MADV_POPULATE_WRITE = 23  # not in the mmap module; before Linux 5.14 an error, which is ignored
POPULATED = 1 << 24  # bytes; NumPy asks for huge pages for larger tensors, and a forged size must not take memory at once

_WITHOUT_FILE = os.name == "posix"


class MappedFile:
    """A memory-mapped file. If the file is replaced, the mapping keeps the old contents. `data` are its bytes, read-only, which
    stay mapped as long as this array or a view of it is in use; `inode` identifies the file among those of its file system."""

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            self.inode = status.st_ino
            self.data = _map(file.fileno(), status.st_size) if _WITHOUT_FILE else np.memmap(file, np.uint8, "r")

    def read_sparsely(self, sparsely: bool = True) -> None:
        """Turns read-ahead off, or on again."""
        if _WITHOUT_FILE:
            self._advise(mmap.MADV_RANDOM if sparsely else mmap.MADV_NORMAL, 0, self.data.size)

    def release(self, begin: int, end: int) -> None:
        """Gives back the memory that reading these bytes took. Reading them again is possible."""
        first, last = -(-begin // mmap.PAGESIZE), end // mmap.PAGESIZE
        if _WITHOUT_FILE and last > first:
            self._advise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, last * mmap.PAGESIZE)

    def _advise(self, advice: int, begin: int, end: int) -> None:
        _libc.madvise(self.data.ctypes.data + begin, end - begin, advice)


def fresh_memory(size: int) -> np.ndarray:
    """Returns uninitialized memory for a tensor of this size in bytes. On Linux, one call brings in the pages of a small one:
    a fault for each page takes longer."""
    memory = np.empty(size, np.uint8)
    start = memory.ctypes.data
    begin, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and begin < end and size <= POPULATED:
        _libc.madvise(begin, end - begin, MADV_POPULATE_WRITE)
    return memory


def _map(descriptor: int, size: int) -> np.ndarray:
    # The mmap module keeps a copy of the descriptor; from Python 3.13 on it need not (trackfd=False).
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"cannot map a file of {size} bytes: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_uint8 * size).from_address(address)
    # Not at the exit of the process, where other threads may still read.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    data = np.frombuffer(memory, np.uint8)
    data.flags.writeable = False
    return data


if _WITHOUT_FILE:
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
