"""Checkpoints as lazily read tensors: a folder or a Hub repository of safetensors files, plain or encoded."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.layout import INDEX, read_index, select_weights

MERGE = "emr"  # metadata key of files whose tensors are of a merge of several models, and so of none of them
FINGERPRINT_SAMPLE = 1024  # bytes read at each of three places of a tensor

# safetensors' names of types, as torch has them.
TORCH_DTYPES = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
        "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64",
    }.items()
    if hasattr(torch, attribute)
}  # fmt: skip
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Entry(NamedTuple):
    """What the header of a safetensors file says of one tensor; its data are the bytes from `begin` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class RawTensor:
    """A tensor as its bytes: `dtype` is safetensors' name of the type, `data` a flat uint8 array, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> RawTensor:
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(f"A tensor of type {tensor.dtype} cannot be kept in a safetensors file.")
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return cls(SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy())

    def to_torch(self) -> torch.Tensor:
        """The same memory as a tensor, so `data` must be writable and nobody else's."""
        if self.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"This PyTorch ({torch.__version__}) has no tensors of type {self.dtype}.")
        if not self.data.size:  # torch cannot view an empty array as another type
            return torch.empty(self.shape, dtype=TORCH_DTYPES[self.dtype])
        return torch.from_numpy(self.data).view(TORCH_DTYPES[self.dtype]).reshape(self.shape)


def parse_header(header: bytes) -> tuple[dict[str, str], dict[str, Entry]]:
    """The metadata and the tensors (in the order of their data) that the header of a safetensors file describes."""
    entries = json.loads(header)
    metadata = entries.pop("__metadata__", None) or {}
    return metadata, {
        name: Entry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    }


class SafetensorsFile:
    """One safetensors file, mapped into memory. Its header is checked by the safetensors library before anything is read."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            with safe_open(self.path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise CorruptFileError(f"{self.path} is not a readable safetensors file: {error}") from error
        with open(self.path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(self._map[:8], "little")
        self.header_bytes: bytes = self._map[8 : 8 + length]
        self.metadata, self.entries = parse_header(self.header_bytes)
        self._data = np.frombuffer(self._map, np.uint8, offset=8 + length)

    def __getitem__(self, name: str) -> RawTensor:
        """Reads nothing yet: the data is a view of the mapped file."""
        entry = self.entries[name]
        return RawTensor(entry.dtype, entry.shape, self._data[entry.begin : entry.end])

    def read_sparsely(self) -> None:
        """Tells the system that only a few places will be read, so that it reads none of what stands behind them."""
        if hasattr(mmap, "MADV_RANDOM"):  # not on Windows
            self._map.madvise(mmap.MADV_RANDOM)

    def forget(self, name: str, begin: int, end: int) -> None:
        """Gives back the memory that reading these bytes of a tensor took; reading them again is possible."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            start = 8 + len(self.header_bytes) + self.entries[name].begin
            first, last = -(-(start + begin) // mmap.PAGESIZE), (start + end) // mmap.PAGESIZE
            if last > first:
                self._map.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


class ComputedFile:
    """A safetensors file yet to be written, whose tensors are made when they are asked for.

    Args:
        name: of the file.
        tensors: type and shape of each tensor.
        compute: makes one; called from several threads.
        metadata: of the file's header.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        compute: Callable[[str], RawTensor],
        metadata: Mapping[str, str],
    ):
        self.path = Path(name)
        self.metadata = dict(metadata)
        self._compute = compute
        self.entries: dict[str, Entry] = {}
        end = 0
        # Large elements first, as the safetensors library does, so that all are aligned.
        for tensor, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-itemsize(item[1][0]), item[0])):
            begin, end = end, end + math.prod(shape) * itemsize(dtype)
            self.entries[tensor] = Entry(dtype, tuple(shape), begin, end)
        self.header_bytes = write_header(self.metadata, self.entries)

    def __getitem__(self, name: str) -> RawTensor:
        return self._compute(name)


def write_header(metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> bytes:
    """The header of a safetensors file, padded so that the data behind it are aligned."""
    header: dict = {"__metadata__": dict(metadata)}
    header |= {name: {"dtype": e.dtype, "shape": e.shape, "data_offsets": (e.begin, e.end)} for name, e in entries.items()}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text.ljust(-(-len(text) // 8) * 8)


def itemsize(dtype: str) -> int:
    if dtype not in TORCH_DTYPES:
        raise CheckpointError(f"This PyTorch ({torch.__version__}) has no tensors of type {dtype}.")
    return TORCH_DTYPES[dtype].itemsize


class Hub(NamedTuple):
    """How the Hub is asked.

    Attributes:
        token: in place of the one that was saved (`hf auth login`) or that HF_TOKEN holds.
        cache_dir: where downloads are kept.
        local_files_only: take what was downloaded before, and ask nobody.
    """

    token: str | bool | None = None
    cache_dir: str | os.PathLike | None = None
    local_files_only: bool = False

    def download(self, name: str, file: str, revision: str | None) -> Path:
        """A file of a repository, from the cache if it is there; raises what `huggingface_hub` does."""
        return Path(hf_hub_download(name, file, revision=revision, **self._asdict()))


HUB = Hub()  # as the environment says


@contextlib.contextmanager
def reaching(name: str, revision: str | None) -> Iterator[None]:
    """Turns what `huggingface_hub` raises in the block into a BaseModelError that names the repository."""
    try:
        yield
    except (HFValidationError, RepositoryNotFoundError, EntryNotFoundError) as error:
        private = isinstance(error, RepositoryNotFoundError)
        advice = " If it is private, sign in with `hf auth login` or set HF_TOKEN." if private else ""
        raise BaseModelError(
            f"'{name}' is neither a folder nor a Hub repository with safetensors weights that can be reached "
            f"(revision {revision or 'main'}): {first_line(error)}{advice}"
        ) from error
    except (HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise BaseModelError(f"'{name}' could not be downloaded: {first_line(error)}") from error


class Checkpoint:
    """All tensors of a model by name, each read only when it is asked for.

    Args:
        name: a folder, or the id of a repository on the Hub.
        revision: branch, tag or commit on the Hub; `self.revision` is the commit it led to, None for a folder.
        hub: how that is asked.

    Raises:
        BaseModelError: there are no safetensors weights of that name, or they are damaged.
    """

    def __init__(self, name: str | os.PathLike, revision: str | None = None, hub: Hub = HUB):
        self.name = os.fspath(name)
        self.revision = revision
        try:
            self.files = [SafetensorsFile(path) for path in self._locate(hub)]
        except (CheckpointError, CorruptFileError) as error:
            raise BaseModelError(f"The weights of '{self.name}' cannot be read: {error}") from error
        self._file_of = {key: file for file in self.files for key in file.entries}

    def _locate(self, hub: Hub) -> list[Path]:
        if os.path.isdir(self.name):
            self.revision = None
            return select_weights(Path(self.name))
        if os.path.exists(self.name) or self.name.startswith((".", "/", "~")):
            raise CheckpointError(f"there is no folder '{self.name}'. Give the folder of the model, or its id on the Hub.")
        with reaching(self.name, self.revision):
            try:
                paths = [hub.download(self.name, "model.safetensors", self.revision)]
            except EntryNotFoundError:
                index = hub.download(self.name, INDEX, self.revision)
                paths = [hub.download(self.name, shard, self.revision) for shard in read_index(index)]
        self.revision = paths[0].parent.name
        return paths

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> RawTensor:
        return self._file_of[name][name]

    def read(self, name: str, out: np.ndarray) -> RawTensor:
        """A tensor, made in the memory `out` (writable bytes of its size) if it has to be made."""
        return self[name]

    def names(self) -> list[str]:
        return list(self._file_of)

    def entry(self, name: str) -> Entry:
        """Type, shape and size of a tensor, without reading it."""
        return self._file_of[name].entries[name]

    def read_sparsely(self) -> None:
        """Tells the system that only a few places of each tensor will be read."""
        for file in self.files:
            file.read_sparsely()

    def forget(self, name: str, begin: int, end: int) -> None:
        """Gives back the memory that reading these bytes of a tensor took."""
        self._file_of[name].forget(name, begin, end)

    def __str__(self) -> str:
        return f"'{self.name}'" + (f" at revision {self.revision}" if self.revision else "")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every name, type, shape and of a few bytes of every tensor; how they are sharded does not matter."""
        return fingerprint_of({name: sample(name, self[name]) for name in self._file_of})

    @cached_property
    def _by_ending(self) -> dict[str, str | None]:
        """Canonical name and each of its endings -> the name; None where several names share an ending."""
        endings: dict[str, str | None] = {}
        for name in self._file_of:
            for ending in _endings(name):
                endings[ending] = None if ending in endings else name
        return endings

    def twin_of(self, name: str) -> str | None:
        """The name of the same parameter here: the name itself, or one that differs by a prefix (`bert.`, `model.`) or
        by the old names of normalisation parameters (gamma, beta)."""
        if name in self:
            return name
        for ending in _endings(name):
            if twin := self._by_ending.get(ending):
                return twin
        return None


def sample(name: str, tensor: RawTensor) -> bytes:
    """What a fingerprint takes of a tensor."""
    size = tensor.data.size
    parts = [tensor.data[start:][:FINGERPRINT_SAMPLE] for start in (0, size // 2, max(size - FINGERPRINT_SAMPLE, 0))]
    return f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode() + b"".join(part.tobytes() for part in parts)


def fingerprint_of(samples: Mapping[str, bytes]) -> str:
    """The fingerprint of a checkpoint with these tensors."""
    digest = xxhash.xxh3_128()
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()


def _endings(name: str) -> Iterator[str]:
    parts = re.sub(r"\.beta$", ".bias", re.sub(r"\.gamma$", ".weight", name)).split(".")
    # One part alone ("weight") says too little.
    for start in range(max(len(parts) - 1, 1)):
        yield ".".join(parts[start:])


def first_line(error: Exception) -> str:
    """Of what an error says: huggingface_hub goes on for several."""
    return str(error).strip().split("\n")[0]


@dataclass(frozen=True)
class Encoding:
    """How one method stores tensors relative to a base, for others that read such checkpoints or store their own that way.

    Attributes:
        open: makes a Checkpoint of plain tensors, with `base` and `digest`, of the files of one; optionally of the base's name
            and revision, where they are not those that the files record, and of `hub`, how it is asked for the base.
        write: stores sets of files (of those that are read together) against a base into a folder; returns the name, revision
            and fingerprint under which the base is recorded, and each set's digest.
        name_of: the name of the tensor that stands encoded in a tensor of bytes, or None.
    """

    open: Callable[..., Checkpoint]
    write: Callable[[Sequence[Sequence[ComputedFile]], Checkpoint, Path], Any]
    name_of: Callable[[torch.Tensor], str | None]


#: By the metadata key that marks its files. `hf_ext.registration` fills it.
ENCODINGS: dict[str, Encoding] = {}


def open_checkpoint(name: str | os.PathLike, revision: str | None = None, hub: Hub = HUB) -> Checkpoint:
    """Opens a checkpoint in whatever form it is stored.

    Raises:
        BaseModelError: there are no weights of that name, or the base they need is missing or another.
        CheckpointError: they are a merge of several models.
        CorruptFileError: they are damaged.
    """
    checkpoint = Checkpoint(name, revision, hub)
    if any(MERGE in file.metadata for file in checkpoint.files):
        raise CheckpointError(f"{checkpoint} holds several models merged into one; `hf-ext extract` writes one of them.")
    for key, encoding in ENCODINGS.items():
        if any(key in file.metadata for file in checkpoint.files):
            return encoding.open([file.path for file in checkpoint.files], hub=hub)
    return checkpoint


def open_plain(name: str | os.PathLike, revision: str | None = None) -> Checkpoint:
    """Opens a base model, whose tensors must stand in files as they are.

    Raises:
        BaseModelError: it cannot be read, or is itself encoded.
    """
    checkpoint = Checkpoint(name, revision)
    if any(key in file.metadata for key in ENCODINGS for file in checkpoint.files):
        raise BaseModelError(f"The base {checkpoint} is itself compressed; decompress it first and give the plain folder.")
    return checkpoint


def name_of(payload: torch.Tensor) -> str | None:
    """The name of the tensor that stands encoded in one of bytes; None if none does."""
    names = (encoding.name_of(payload) for encoding in ENCODINGS.values())
    return next((name for name in names if name is not None), None)
