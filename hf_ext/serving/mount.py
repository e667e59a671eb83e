"""A read-only file system that shows compressed models and merges as plain folders.

Programs without this package can read it: other servers, converters, `sha256sum`. Requires FUSE.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hf_ext.emr.folder import MergeFolder, is_merge, task_files_into
from hf_ext.errors import CheckpointError, HfExtError, MissingDependencyError
from hf_ext.fm_delta.restore import restored_files
from hf_ext.storage.prefetch import cores
from hf_ext.storage.safetensors_file import TensorFile

try:
    import mfusepy
except (ImportError, OSError) as error:  # OSError: there is no libfuse
    raise MissingDependencyError(
        "Mounting requires FUSE: pip install 'mfusepy>=3', and libfuse of your system (on Debian: apt-get install fuse3)."
    ) from error

CACHE = 1 << 30  # bytes of decoded tensors that are kept
AHEAD = 2  # tensors that are decoded before they are asked for, per file


def mount(src: str | os.PathLike, where: str | os.PathLike, base: str | os.PathLike | None = None) -> None:
    """Shows the plain folder of a compressed model, or a folder for each task of a merge. Returns when it is unmounted.

    Tensors are decoded when their bytes are read, and checked. Memory: at most 1 GiB of tensors, or the last six.

    Args:
        src: folder of a compressed model or a merge.
        where: an empty folder, or one to create.
        base: folder or Hub id of the base, if it is no longer where config.json says.

    Raises:
        CheckpointError: `src` holds neither, or `where` is not empty or cannot be mounted.
        BaseModelError: the base is missing or differs from the recorded one.
        CorruptFileError: a file is damaged.
    """
    src, where = Path(src).absolute(), Path(where).absolute()  # libfuse changes the working directory
    try:
        is_free = not where.exists() or where.is_dir() and not any(where.iterdir())
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        raise CheckpointError(f"{where} is still mounted by a process that was killed. Run: fusermount3 -u {where}") from error
    if not is_free:
        raise CheckpointError(f"{where} is not an empty folder; give a new one.")
    with tempfile.TemporaryDirectory(prefix="hf-ext-mount-") as stage:
        files = {path: VirtualFile(file) for path, file in plain_files_of(src, Path(stage), base)}
        os.chmod(stage, 0o755)  # the root of the file system
        folder = PlainFolder(Path(stage), files)
        is_new = not where.exists()
        where.mkdir(parents=True, exist_ok=True)
        try:
            mfusepy.FUSE(folder, os.fspath(where), foreground=True, ro=True, fsname="hf_ext")
        except RuntimeError as error:
            if folder.was_mounted:  # ended by a signal
                return
            raise CheckpointError(f"{where} cannot be mounted (FUSE error {error}). Is /dev/fuse there and allowed?") from error
        finally:
            if is_new and where.is_dir() and not os.path.ismount(where):
                where.rmdir()


def plain_files_of(src: Path, stage: Path, base: str | os.PathLike | None) -> Iterator[tuple[str, TensorFile]]:
    """Writes all files without weights into `stage`, and yields those with weights, by their paths there."""
    if not is_merge(src):
        for file in restored_files(src, stage, base):
            yield f"/{file.path.name}", file
        return
    merged = MergeFolder(src, base)
    for task in merged.tasks:
        (stage / task).mkdir()
        for weights in task_files_into(merged, task, stage / task):
            yield f"/{task}/{weights.path.name}", weights


class VirtualFile:
    """The bytes of a safetensors file whose tensors are decoded when they are read."""

    def __init__(self, file: TensorFile):
        self._file = file
        self._head = len(file.header_bytes).to_bytes(8, "little") + file.header_bytes
        entries = sorted(file.entries.items(), key=lambda item: item[1].begin)
        self._names = [name for name, _ in entries]
        self._begins = [len(self._head) + entry.begin for _, entry in entries]
        self.size = len(self._head) + max((entry.end for _, entry in entries), default=0)

    def read(self, begin: int, end: int, tensors: TensorCache) -> bytes:
        """Returns the bytes from `begin` to `end`, or to the end of the file."""
        chunks = [self._head[begin:end]]
        first = max(bisect_right(self._begins, begin) - 1, 0)
        for place in range(first, bisect_left(self._begins, end)):
            name, *following = self._names[place : place + 1 + AHEAD]
            data, start = tensors.get(self._file, name, following), self._begins[place]
            chunks.append(data[max(begin - start, 0) : end - start].tobytes())
        return b"".join(chunks)


class TensorCache:
    """Decoded tensors, the last ones used."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(cores())
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[TensorFile, str], Future[np.ndarray]] = OrderedDict()
        self._size = 0  # bytes of all that are kept or under way

    def get(self, file: TensorFile, name: str, following: list[str]) -> np.ndarray:
        """Returns a tensor's bytes, and has the following ones of its file decoded meanwhile."""
        with self._lock:
            futures = [self._decoded(file, each) for each in (name, *following)]
            while len(self._kept) > 2 * len(futures) and self._size > CACHE:
                (oldest, tensor), _ = self._kept.popitem(last=False)
                self._size -= oldest.entries[tensor].nbytes
        return futures[0].result()

    def _decoded(self, file: TensorFile, name: str) -> Future[np.ndarray]:
        key = (file, name)
        if key not in self._kept:
            self._size += file.entries[name].nbytes
        if key not in self._kept or self._kept[key].done() and self._kept[key].exception():
            self._kept[key] = self._pool.submit(lambda: file[name].data)
        self._kept.move_to_end(key)
        return self._kept[key]


class PlainFolder(mfusepy.Operations):
    """The file system: files without weights from a folder, and those with weights.

    Args:
        stage: the folder.
        files: by their paths, which begin with "/".
    """

    use_ns = True
    was_mounted = False

    def __init__(self, stage: Path, files: Mapping[str, VirtualFile]):
        self._stage, self._files = stage, files
        self._tensors = TensorCache()

    def init(self, path: str) -> None:
        self.was_mounted = True

    def getattr(self, path: str, fh: int | None = None) -> dict:
        weights = self._files.get(path)
        place = os.lstat(self._stage if weights else f"{self._stage}{path}")
        attributes = {key: getattr(place, key) for key in ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")}
        attributes |= {f"st_{kind}time": getattr(place, f"st_{kind}time_ns") for kind in "amc"}
        return attributes | {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": weights.size} if weights else attributes

    def readdir(self, path: str, fh: int) -> list[str]:
        parent = path.rstrip("/")
        weights = [file.rpartition("/")[2] for file in self._files if file.rpartition("/")[0] == parent]
        return [".", "..", *os.listdir(f"{self._stage}{path}"), *weights]

    def readlink(self, path: str) -> str:
        return os.readlink(f"{self._stage}{path}")

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if path not in self._files:
            with open(f"{self._stage}{path}", "rb") as file:
                file.seek(offset)
                return file.read(size)
        try:
            return self._files[path].read(offset, offset + size, self._tensors)
        except (HfExtError, OSError) as error:
            print(f"hf-ext mount: {path[1:]} cannot be read: {error}", file=sys.stderr, flush=True)
            raise mfusepy.FuseOSError(errno.EIO) from error
