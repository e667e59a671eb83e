"""Checkpoints as lazily read tensors: a folder or a Hub repository of safetensors files. Folders written whole or not."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(\.[\w-]+)?(-\d{5}-of-\d{5})?\.safetensors")
STAGE = ".hf_ext-partial"  # one fixed name, so that what a killed process left is cleared by the next save
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


class Checkpoint:
    """All tensors of a model by name, each read only when it is asked for.

    Args:
        name: a folder, or the id of a repository on the Hub.
        revision: branch, tag or commit on the Hub; `self.revision` is the commit it led to, None for a folder.

    Raises:
        BaseModelError: there are no safetensors weights of that name, or they are damaged.
    """

    def __init__(self, name: str | os.PathLike, revision: str | None = None):
        self.name = os.fspath(name)
        self.revision = revision
        try:
            self.files = [SafetensorsFile(path) for path in self._locate()]
        except (CheckpointError, CorruptFileError) as error:
            raise BaseModelError(f"The weights of '{self.name}' cannot be read: {error}") from error
        self._file_of = {key: file for file in self.files for key in file.entries}

    def _locate(self) -> list[Path]:
        if os.path.isdir(self.name):
            self.revision = None
            return select_weights(Path(self.name))
        if os.path.exists(self.name) or self.name.startswith((".", "/", "~")):
            raise CheckpointError(f"there is no folder '{self.name}'. Give the folder of the model, or its id on the Hub.")
        try:
            try:
                first = hf_hub_download(self.name, "model.safetensors", revision=self.revision)
                paths = [Path(first)]
            except EntryNotFoundError:
                first = hf_hub_download(self.name, INDEX, revision=self.revision)
                paths = [Path(hf_hub_download(self.name, shard, revision=self.revision)) for shard in read_index(Path(first))]
        except (HFValidationError, RepositoryNotFoundError, EntryNotFoundError, LocalEntryNotFoundError) as error:
            raise BaseModelError(
                f"'{self.name}' is neither a folder nor a Hub repository with safetensors weights that can be reached "
                f"(revision {self.revision or 'main'}): {_first_line(error)}"
            ) from error
        except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
            raise BaseModelError(f"'{self.name}' could not be downloaded: {_first_line(error)}") from error
        self.revision = Path(first).parent.name
        return paths

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> RawTensor:
        return self._file_of[name][name]

    def names(self) -> list[str]:
        return list(self._file_of)

    def __str__(self) -> str:
        return f"'{self.name}'" + (f" at revision {self.revision}" if self.revision else "")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every name, type, shape and of a few bytes of every tensor; how they are sharded does not matter."""
        digest = xxhash.xxh3_128()
        for name in sorted(self._file_of):
            tensor = self[name]
            digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
            size = tensor.data.size
            for start in (0, size // 2, max(size - FINGERPRINT_SAMPLE, 0)):
                digest.update(np.ascontiguousarray(tensor.data[start : start + FINGERPRINT_SAMPLE]))
        return digest.hexdigest()

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


def _endings(name: str) -> Iterator[str]:
    parts = re.sub(r"\.beta$", ".bias", re.sub(r"\.gamma$", ".weight", name)).split(".")
    # One part alone ("weight") says too little.
    for start in range(max(len(parts) - 1, 1)):
        yield ".".join(parts[start:])


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def select_weights(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder that `from_pretrained` reads: the single file or else the shards.

    Raises:
        CheckpointError: there are none.
    """
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if (folder / INDEX).exists():
        return [folder / shard for shard in read_index(folder / INDEX)]
    files = all_weights(folder)
    if not files:
        raise CheckpointError(
            f"{folder} holds no safetensors weights (model.safetensors or shards of it). If its weights are .bin files, "
            "load the model with Transformers and save it again."
        )
    return files


def read_index(path: Path) -> list[str]:
    """The names of the shards that an index lists."""
    try:
        return sorted({Path(shard).name for shard in json.loads(path.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not an index of shards.") from error


def read_config(path: Path) -> dict:
    """What a config.json says; nothing if there is none.

    Raises:
        CorruptFileError: it is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise CorruptFileError(f"{path} is not a JSON object.")
    return config


def all_weights(folder: Path) -> list[Path]:
    """Every file of weights in a folder: by its name, variants included, or because the index lists it."""
    listed = read_index(folder / INDEX) if (folder / INDEX).exists() else []
    return sorted(path for path in folder.iterdir() if WEIGHTS.fullmatch(path.name) or path.name in listed)


@contextlib.contextmanager
def staged_folder(target: str | os.PathLike) -> Iterator[Path]:
    """A folder to write a checkpoint into; when the block ends well its files move into `target`, weights first, config.json
    last, each in one step. When it does not, `target` stays as it was.

    Weights in `target` that the new checkpoint replaces by others (shards of another count) are removed before config.json
    comes, so that whoever finds it finds the weights it belongs to.
    """
    target = Path(target)
    created = not os.path.exists(target)
    if not created and not target.is_dir():
        raise CheckpointError(f"{target} is a file; give a folder to write the checkpoint into.")
    stage = target / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir(parents=True)
        yield stage
        _move_into(stage, target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if created and os.path.exists(target) and not any(target.iterdir()):
            target.rmdir()


def _move_into(stage: Path, target: Path) -> None:
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
        stale = old in indices or WEIGHTS.fullmatch(old.name) and save_of(old) in saves
        if stale and old.relative_to(target) not in files:
            old.unlink(missing_ok=True)
    for path in config:
        move(path)


def save_of(path: Path) -> str:
    """What the shards of one checkpoint and its single file have in common: `model`, or `model.fp16` of a variant."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", path.name)


def shard_sets(paths: list[Path]) -> list[list[Path]]:
    """The weights of one folder as the sets that are read together: those that the index lists, and those whose names differ
    only by their number. A folder may hold a model whole and in shards, and variants of it."""
    index = paths[0].parent / INDEX
    listed = read_index(index) if index.exists() else []
    sets: dict[str, list[Path]] = {}
    for path in paths:
        key = INDEX if path.name in listed else re.sub(r"-\d+(-of-\d+\.safetensors)$", r"\1", path.name)
        sets.setdefault(key, []).append(path)
    return list(sets.values())


def write_atomically(path: str | os.PathLike, write: Callable[[Path], None]) -> None:
    """Calls `write` with a path beside `path`, then renames it."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.partial")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
