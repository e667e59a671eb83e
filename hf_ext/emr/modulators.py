"""The file of one task of a merge: its masks, rescalers, coded and own tensors. docs/emr_format.md describes the bytes.

It is a safetensors file. Masks are deflated (zlib), so rows that no task or only one task changed take almost no space. All
contents have checksums, which are checked before use.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import xxhash

from hf_ext.emr.election import mask_bytes
from hf_ext.errors import CorruptFileError
from hf_ext.storage.delta.codec import decode_raw
from hf_ext.storage.delta.deflate import deflate, inflate
from hf_ext.storage.delta.payload import Header, read_header
from hf_ext.storage.delta.source import read_base
from hf_ext.storage.hub import OTHER_WEIGHTS
from hf_ext.storage.prefetch import threads_for
from hf_ext.storage.safetensors_file import BITS, Entry, RawTensor, SafetensorsFile, write_header
from hf_ext.storage.sealed import Seal
from hf_ext.storage.source import TensorSource

FILE = "modulators.safetensors"
TASK_FOLDER = "task-"  # and the task's name
REPAIR = "Merge or download it again."
SEAL = Seal("emr_task", 1, f"is not the file of a merge's task, or its header is damaged. {REPAIR}", REPAIR)
# Of files at the top of a model's folder: its configuration, weights, card and the state of its training.
NO_ASSETS = re.compile(
    r"(adapter_)?config\.json|README\.md|trainer_state\.json|(all|train|eval|test|predict)_results\.json|.*\.index\.json|"
    r".*\.safetensors"
)
TRAINING = re.compile(r"checkpoint-\d+|global_step\d+|runs")  # folders of a training's state
MASK, OWN, ROWS, CODE = "mask/", "own/", "rows/", "code/"  # kinds of entries; the tensor's name follows


def is_asset(name: str) -> bool:
    """Checks whether a file of a model's folder (a path with slashes) belongs to it besides config.json and weights: tokenizer,
    generation settings, code, modules in folders of their own. Weights in other formats, hidden files, the card and the state
    of a training do not."""
    path = PurePosixPath(name)
    is_plain = str(path) == name and not path.is_absolute() and name.isprintable() and "\\" not in name
    if not is_plain or any(part.startswith(".") for part in path.parts):
        return False
    if len(path.parts) == 1:
        return not NO_ASSETS.fullmatch(name) and not any(path.match(pattern) for pattern in OTHER_WEIGHTS)
    exported = any(path.match(pattern) for pattern in OTHER_WEIGHTS if pattern != "*.bin")  # a module's weights may be .bin
    return not (exported or path.parts[0].startswith(TASK_FOLDER) or TRAINING.fullmatch(path.parts[0]))


@dataclass(frozen=True)
class Modulated:
    """The rule that makes a task's tensor from the elected one."""

    scale: float  # λ of this tensor
    prior: str  # XXH3-64 of the base's bytes of this tensor, cast to the type of the elected one
    rows: int | None = None  # how many come from an elected tensor of another number of rows; the task's file has further ones


@dataclass
class TaskRecord:
    """The contents of the header of a task's file."""

    task: str
    elected: str  # digest of the elected weights that the masks belong to
    modulated: dict[str, Modulated] = field(default_factory=dict)  # the tensors that are made from elected ones
    shared: list[str] = field(default_factory=list)  # the tensors that are stored unchanged among the elected weights
    files: list[str] = field(default_factory=list)  # besides config.json and the weights; paths with slashes
    config: str = ""  # XXH3-64 of the task's config.json
    report: dict[str, float] = field(default_factory=dict)  # figures for people, see reports.py
    checksums: dict[str, str] = field(default_factory=dict)  # XXH3-64 of the bytes of each entry of the file
    ties: dict[str, str] = field(default_factory=dict)  # of weights that other tasks hold apart: the one tied to, by name


class TaskWriter:
    """Collects a task's entries on disk in any order, then writes the file in the order of their names. An entry replaces an
    earlier one of the same name."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._parts = TemporaryFile(dir=path.parent)
        self.entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def add_mask(self, name: str, mask: np.ndarray) -> None:
        """Adds the mask of a tensor, unless no bit is set. May be called from any thread."""
        if mask.any():  # the bits within a row are random, so only runs and byte frequencies can be compressed
            self.add_bytes(MASK + name, deflate(mask, level=9))

    def add_bytes(self, key: str, data: bytes) -> None:
        """Adds an entry of bytes under its full name. May be called from any thread."""
        self.add(key, RawTensor("U8", (len(data),), np.frombuffer(data, np.uint8)))

    def add(self, key: str, tensor: RawTensor) -> None:
        """Adds an entry under its full name in the file. May be called from any thread."""
        with self._lock:
            begin = self._parts.seek(0, os.SEEK_END)
            self._parts.write(tensor.data)
            self.entries[key] = Entry(tensor.dtype, tensor.shape, begin, begin + tensor.data.size)

    def finish(self, record: TaskRecord) -> None:
        """Writes the file and fills in `record.checksums`."""
        placed, end = {}, 0
        # Wide types first, so that all data are aligned.
        order = sorted(self.entries, key=lambda key: (-BITS.get(self.entries[key].dtype, 0), key))
        for key in order:
            entry = self.entries[key]
            placed[key] = entry._replace(begin=end, end=(end := end + entry.nbytes))
            digest = xxhash.xxh3_64()
            self._copy(self.entries[key], digest.update)
            record.checksums[key] = digest.hexdigest()
        with open(self.path, "wb") as file:
            header = write_header(SEAL.metadata(asdict(record), placed), placed)
            file.write(len(header).to_bytes(8, "little") + header)
            for key in order:
                self._copy(self.entries[key], file.write)

    def close(self) -> None:
        self._parts.close()

    def _copy(self, entry: Entry, write: Callable[[bytes], object]) -> None:
        """Passes the bytes of an entry to `write`, in pieces."""
        self._parts.seek(entry.begin)
        left = entry.nbytes
        while left:
            data = self._parts.read(min(left, 1 << 22))
            write(data)
            left -= len(data)


class TaskFile:
    """A task's file, whose entries have full names such as "mask/lm_head.weight". Checks the header, with the `record` and its
    checksum `digest`, which covers those of all entries, when it is opened, and each entry when it is read. `own` and `coded`
    are the names of the task's own tensors, and of the coded ones, which are made from the base's."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise CorruptFileError(f"{path} is missing: the folder is incomplete. {REPAIR}")
        self._file = SafetensorsFile(path)
        self.entries = self._file.entries
        fields = SEAL.record(self._file.metadata, self.entries, path)
        self.digest = self._file.metadata[SEAL.keys[1]]
        try:
            self.record = _record_of(fields)
        except (TypeError, ValueError, AttributeError) as error:
            raise CorruptFileError(f"The header of {path} contains invalid values: {error}.") from error
        self.own, self.coded = (
            [key.removeprefix(kind) for key in self.entries if key.startswith(kind)] for kind in (OWN, CODE)
        )
        self._names = dict.fromkeys(sorted([*self.record.modulated, *self.record.shared, *self.coded, *self.own]))
        self._headers: dict[str, Header] = {}
        if lost := self.record.ties.values() - self._names.keys():
            raise CorruptFileError(f"{path} is damaged: it ties weights to '{min(lost)}', which it does not have. {REPAIR}")

    def require_whole(self) -> None:
        """Raises CorruptFileError if the file was cut off since it was opened."""
        self._file.require_whole()

    def names(self) -> list[str]:
        """Returns the names of all tensors of the task's checkpoint."""
        return list(self._names)

    def mask(self, name: str, values: int) -> np.ndarray | None:
        """Returns the mask of an elected tensor with this number of values; None if no bit is set."""
        if MASK + name not in self.entries:
            return None
        data = self.read(MASK + name).data
        try:
            return inflate(data, mask_bytes(values))
        except ValueError as error:
            raise CorruptFileError(
                f"The mask of '{name}' in {self.path} does not fit its tensor: the file is damaged. {REPAIR}"
            ) from error

    def is_coded(self, name: str) -> bool:
        return CODE + name in self.entries

    def is_modulated(self, name: str) -> bool:
        """Checks whether a tensor is made from the elected one and has its shape."""
        return name in self.record.modulated and self.record.modulated[name].rows is None

    def is_from_base(self, name: str) -> bool:
        """Checks whether a tensor is made from the base's."""
        return name in self.record.modulated or self.is_coded(name)

    def header(self, name: str) -> Header:
        """Returns the header of a coded tensor."""
        if name not in self._headers:
            self._headers[name] = read_header(self.read(CODE + name).data, name)
        return self._headers[name]

    def decoded(self, name: str, base: TensorSource, out: np.ndarray | None = None) -> RawTensor:
        """Returns a coded tensor, in `out` if its mode allows that."""
        data, header = self.read(CODE + name).data, self.header(name)
        return decode_raw(data, read_base(base, header.base_name), header, threads_for(header.size), out)

    def modulators_size(self) -> int:
        """Returns the bytes of all masks and coded tensors in the file."""
        return sum(entry.nbytes for key, entry in self.entries.items() if key.startswith((MASK, CODE)))

    def verify(self) -> int:
        """Checks all entries of the file and returns their number."""
        for key in self.entries:
            self.read(key)
        return len(self.entries)

    def read(self, key: str) -> RawTensor:
        """Returns the entry of this full name, checked."""
        tensor = self._file[key]
        if xxhash.xxh3_64_hexdigest(tensor.data) != self.record.checksums.get(key):
            raise CorruptFileError(f"'{key}' in {self.path} is damaged: checksum mismatch. {REPAIR}")
        return tensor


def copy_task(source: TaskFile, target: Path, omitted: Collection[str] = (), **changes: Any) -> None:
    """Copies a task's file without the `omitted` entries, with these fields of its record changed."""
    with closing(TaskWriter(target)) as writer:
        for key in source.entries.keys() - {*omitted}:
            writer.add(key, source.read(key))
        writer.finish(replace(source.record, checksums={}, **changes))


def _record_of(fields: dict[str, Any]) -> TaskRecord:
    """Returns the record in a header, checked: a header with a matching checksum may still be forged."""
    record = TaskRecord(**fields)
    record.modulated = {name: Modulated(**values) for name, values in fields.get("modulated", {}).items()}
    for name, modulated in record.modulated.items():
        scale, rows = modulated.scale, modulated.rows
        is_scale = type(scale) in (int, float) and 0 <= scale < math.inf
        if not is_scale or not (rows is None or type(rows) is int and rows >= 0):
            raise ValueError(f"scale {scale!r} and rows {rows!r} of '{name}'")
    texts = [record.task, record.elected, record.config, *record.shared, *record.files]
    texts += [modulated.prior for modulated in record.modulated.values()]
    texts += [*record.checksums, *record.checksums.values(), *record.ties, *record.ties.values()]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a name that is no text")
    for name in record.files:
        if not is_asset(name):
            raise ValueError(f"a file called '{name}'")
    return record
