"""SGLang's layout of published weights, which its `/pull_weights` reads: a folder `weight_vNNNNNN` for each version.

A version is a delta, or a model's folder with all weights. A delta has an index and a safetensors file, whose tensors are zstd
frames of the XOR with the version before, whole tensors under the names of the checkpoint, with the checksums of the new ones.
Version 0 is the model that the servers start with. docs/weight_sync.md describes the files. Source: SGLang's reader, as of
slime's docker/patch/latest/sglang-pull_weights.patch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from hf_ext.errors import CheckpointError, CorruptFileError, MissingDependencyError
from hf_ext.storage.files import copy, staged_folder, write_json
from hf_ext.storage.hub import OTHER_WEIGHTS
from hf_ext.storage.layout import INDEX, INDICES, OWN_FOLDER, SINGLE, WEIGHTS
from hf_ext.storage.prefetch import Prefetcher
from hf_ext.storage.safetensors_file import RawTensor, SafetensorsFile, torch_dtype
from hf_ext.storage.source import TensorSource
from hf_ext.storage.weights import open_plain_weights, open_weights
from hf_ext.weight_sync.places import Folder, Place, open_place
from hf_ext.weight_sync.rows import Weights, equal, local_rows, split
from hf_ext.weight_sync.step_file import safetensors_bytes
from hf_ext.weight_sync.subscriber import Allocate, Subscriber, allocate_here

logger = logging.getLogger(__name__)

VERSION = re.compile(r"weight_v(\d{6,})")
FORMATS = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "xxh3-128"}
STEP = "hf_ext_step"  # in the metadata of an index: the training's step; SGLang ignores it
LEVEL = 1  # of zstd, as others write it
CHUNK = 1 << 21  # bytes that stay in the processor's cache


class Version(NamedTuple):
    """A version as its index describes it: with all weights, or the files of the tensors that it changes."""

    number: int
    folder: Path
    step: int
    is_whole: bool
    files: list[str]
    tensors: int

    @classmethod
    def read(cls, folder: Path, number: int) -> Version | None:
        """Returns the version in a folder; None if it is not complete yet, because neither an index nor a model is there.

        Raises:
            CorruptFileError: the index is damaged.
            CheckpointError: it is of a form that this package cannot read.
        """
        try:
            fields = json.loads((folder / INDEX).read_bytes())
            metadata, weight_map = fields.get("metadata") or {}, fields["weight_map"]
            step, files = int(metadata.get(STEP, number)), sorted({*weight_map.values()})
            if "delta_encoding" not in metadata:
                return cls(number, folder, step, True, files, len(weight_map))
            forms = {key: metadata[key] for key in FORMATS}
            numbers = int(metadata["version"]), int(metadata["base_version"])
            is_valid = numbers == (number, number - 1) and all(OWN_FOLDER.fullmatch(file) for file in files)
        except FileNotFoundError:
            return cls(number, folder, number, True, [SINGLE], 0) if (folder / SINGLE).exists() else None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(f"{folder / INDEX} is damaged: {type(error).__name__} {error}.") from error
        if forms != FORMATS:
            raise CheckpointError(f"{folder} has the form {forms}, but only {FORMATS} can be read. Set these in the trainer.")
        if not is_valid:
            raise CorruptFileError(f"{folder / INDEX} is damaged: its fields are not those of version {number}.")
        return cls(number, folder, step, False, files, len(weight_map))

    def changes(self) -> dict[str, Change]:
        """Returns what a delta changes, by tensor, from the headers of its files.

        Raises:
            CorruptFileError: a file is missing or damaged.
        """
        opened = [SafetensorsFile(self.folder / name) for name in self.files]
        changes = {
            name: Change(self.number, file[name].data, file.metadata.get(name, "")) for file in opened for name in file.entries
        }
        if len(changes) != self.tensors:
            raise CorruptFileError(f"{self.folder} is damaged: its files do not have the tensors that {INDEX} lists.")
        return changes


class Change(NamedTuple):
    """The frame of a tensor in a version, and the checksum of the tensor after it."""

    number: int
    frame: np.ndarray
    checksum: str


def read_versions(folder: Path, read: Mapping[int, Version] | None = None) -> dict[int, Version]:
    """Returns the complete versions in a folder, by number, except those read before only from their indices."""
    numbers = sorted(int(match[1]) for name in _listing(folder) if (match := VERSION.fullmatch(name)))
    versions = {number: (read or {}).get(number) or Version.read(folder / _name(number), number) for number in numbers}
    return {number: version for number, version in versions.items() if version}


def open_reader(
    place: str | os.PathLike | Place, allocate: Allocate | None = None, base: Callable[[], TensorSource] | None = None
) -> Subscriber | VersionReader:
    """Returns a reader of the steps at a place, in whichever layout they are. If nothing is there yet, a `Subscriber`."""
    place = open_place(place)
    if isinstance(place, Folder) and any(VERSION.fullmatch(name) for name in _listing(place.path)):
        return VersionReader(place, allocate, base)
    return Subscriber(place, allocate)


class VersionReader:
    """Brings tensors in CPU memory to a version, as `Subscriber` does to a step. Checks each tensor before it changes any.

    The tensors must at first be those of version 0, or of any later one, unless a version with all weights leads to the step.
    A version's step is that of the training if hf_ext published it, otherwise the version's number.

    Args:
        allocate: as for `Subscriber`.
        base: opens version 0, for the copies that this object keeps if the caller gives no tensors.

    Attributes:
        is_mixed, tensors, changed: as of `Subscriber`.
    """

    def __init__(self, place: Folder, allocate: Allocate | None = None, base: Callable[[], TensorSource] | None = None):
        _zstandard()
        self.place, self.is_mixed = place, False
        self.tensors: dict[str, torch.Tensor] = {}
        self._allocate, self._base = allocate or allocate_here, base
        self.changed: set[str] = set()
        self.step: int | None = None
        self._number: int | None = None  # version of the tensors; None if it is not known
        self._versions: dict[int, Version] = {}

    def steps(self) -> list[int]:
        """Returns the steps at the place, oldest first.

        Raises:
            CorruptFileError: an index is damaged.
            CheckpointError: a version is of a form that this package cannot read.
        """
        return [*self._steps()]

    def number(self, step: int | None) -> int:
        """Returns the number of a step's version, by default the newest. Raises CheckpointError if it is not at the place."""
        steps = self._steps()
        step = max(steps, default=None) if step is None else step
        if step is None or step not in steps:
            there = f"there are {min(steps)} to {max(steps)}" if steps else "there are none"
            raise CheckpointError(f"Step {step} is not, or no longer, at {self.place}: {there}.")
        return steps[step]

    def update(
        self, named_tensors: Mapping[str, torch.Tensor] | None = None, step: int | None = None, strict: bool = True
    ) -> int:
        """Updates contiguous tensors in CPU memory, by default those of `tensors`, to a step, by default the newest. It is
        always strict: every published tensor must be among those given.

        Raises:
            CheckpointError: the step is not there, or the tensors do not fit the published ones.
            CorruptFileError: files are missing or damaged, or the tensors are those of another model. They are unchanged.
        """
        number = self.number(step)
        step = self._versions[number].step
        if named_tensors is None:
            named_tensors = self.tensors = self.tensors or self._copies()
        memories = {name: _memory(name, tensor) for name, tensor in named_tensors.items()}
        try:
            ways = self._ways(number, memories, self._number)
        except CorruptFileError as error:
            if self._number is None:
                raise
            logger.warning(f"{error} All tensors are compared with the versions.")
            self._versions = {}
            number = self.number(step)
            ways = self._ways(number, memories, None)
        self._number, self.step, self.is_mixed = None, None, True
        sizes = {name: memories[name].size for name in ways}
        for _ in Prefetcher(lambda name: _change(memories[name], *ways[name]), sizes):
            pass
        self._number, self.step, self.is_mixed, self.changed = number, step, False, {*ways}
        return step

    def _copies(self) -> dict[str, torch.Tensor]:
        """Returns new tensors with the values of version 0."""
        assert self._base is not None
        base = self._base()
        entries = {name: base.entry(name) for name in base.names()}
        tensors = self._allocate({name: (torch_dtype(entry.dtype), entry.shape) for name, entry in entries.items()})
        for name, raw in Prefetcher(base.read, {name: entry.nbytes for name, entry in entries.items()}):
            _memory(name, tensors[name])[:] = raw.data
            base.release(name)
        return tensors

    def _steps(self) -> dict[int, int]:
        """Returns the number of the version for each step. A training that was resumed replaces the steps that it repeats."""
        self._versions = read_versions(self.place.path, self._versions)
        steps: dict[int, int] = {}
        for number, version in self._versions.items():
            while steps and next(reversed(steps)) >= version.step:
                steps.popitem()
            steps[version.step] = number
        return steps

    def _ways(
        self, target: int, memories: Mapping[str, np.ndarray], start: int | None
    ) -> dict[str, tuple[np.ndarray, list[np.ndarray]]]:
        """Returns the bytes and the frames to XOR them with that give each tensor of a version which is not there yet.

        Args:
            start: version of the tensors, if it is known. Otherwise their checksums tell those that a version has changed; the
                others come from the newest version with all weights, or are as in version 0.
        """
        versions = self._versions
        wholes = [number for number, version in versions.items() if version.is_whole]
        anchor = max((number for number in wholes if number <= target), default=0)
        next_anchor = min((number for number in wholes if number > target), default=max(versions) + 1)
        if start is not None and not anchor <= start < next_anchor:
            start = None
        if start is not None:
            first, last = min(start, target), max(start, target)
        elif anchor:
            first, last = anchor, target
        elif wholes:
            raise CheckpointError(f"Version {target} at {self.place} lies before the first with all weights. Go to that one.")
        else:
            first, last = 0, max(versions)
        changes: dict[str, list[Change]] = defaultdict(list)
        for number in range(first + 1, last + 1):
            if number in versions:
                for name, change in versions[number].changes().items():
                    changes[name].append(change)
            elif number <= target:
                raise CorruptFileError(f"{self.place.path / _name(number)} is missing, or has no {INDEX}.")
            else:
                break
        if other := sorted(changes.keys() - memories.keys()):
            raise CheckpointError(f"'{other[0]}', which {self.place} publishes, is not among the tensors given.")
        whole = self._whole(versions[anchor].folder, memories) if start is None and anchor else {}

        def way(name: str) -> tuple[np.ndarray, list[np.ndarray]] | None:
            memory, links = memories[name], changes.get(name, [])
            count = sum(change.number <= target for change in links)
            checksums = [change.checksum for change in links]
            digest = xxhash.xxh3_128_hexdigest(memory) if links else ""
            if not links and not whole or count and digest == checksums[count - 1]:
                return None
            is_dated = digest in checksums  # the tensor is as one of these versions left it
            source, place = (memory, checksums.index(digest) + 1) if is_dated else (whole.get(name, memory), 0)
            frames = [change.frame for change in links[min(place, count) : max(place, count)]]
            is_ahead = start is not None and start > target
            if (is_dated or not is_ahead) and (not count or _digest(source, frames) == checksums[count - 1]):
                return source, frames
            raise CorruptFileError(
                f"'{name}' does not get the checksum of version {target} at {self.place}: files there are damaged, or the "
                "training did not begin with this model. Give a copy of the model's folder that it began with."
            )

        found = Prefetcher(way, {name: memory.size for name, memory in memories.items()})
        return {name: result for name, result in found if result is not None and (result[1] or result[0] is not memories[name])}

    def _whole(self, folder: Path, memories: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns all tensors of a version with all weights. They must be those of the caller."""
        whole = {name: file[name].data for file in open_weights(folder) for name in file.entries}
        if {name: data.size for name, data in whole.items()} != {name: memory.size for name, memory in memories.items()}:
            raise CheckpointError(f"The tensors in {folder} are not those given: names or sizes differ.")
        return whole


class VersionWriter:
    """Writes versions. The arguments are those of `Publisher`. Every `anchor_every`th version has all weights.

    Attributes:
        start: the weights of the newest version.
    """

    def __init__(self, place: Place, base: Path, anchor_every: int, keep_anchors: int, resume: bool):
        _zstandard()
        if not isinstance(place, Folder):
            raise CheckpointError(f'layout="sglang" requires a folder as place, which servers share, not {place}.')
        self.place, self.base, self.anchor_every, self.keep_anchors = place, base, anchor_every, keep_anchors
        self._files = open_plain_weights(base)
        versions = read_versions(place.path)
        if versions and not resume:
            raise CheckpointError(
                f"{place} holds the versions of another training. Give an empty place, or continue it with resume=True."
            )
        tensors = {name: file[name].to_torch() for file in self._files for name in file.entries}
        self.next_step, self._number = 0, max(versions, default=0)
        if versions:
            self.next_step = VersionReader(place).update(tensors) + 1
        rows = [each for name, tensor in tensors.items() for each in split(name, local_rows(name, tensor))]
        self.start = Weights({key: part for key, _, part in rows}, {key: part for key, part, _ in rows})

    def write(self, weights: Weights, before: Weights | None, step: int) -> None:
        """Writes the next version. It is visible when it is complete, and on the disk."""
        assert before is not None  # at first `start`
        number = self._number + 1
        folder = self.place.path / _name(number)
        if folder.exists():
            raise CheckpointError(f"Another publisher writes to {self.place}, so step {step} was not published. End one.")
        keys: dict[str, list[str]] = defaultdict(list)
        for key, part in weights.parts.items():
            keys[part.name].append(key)
        with staged_folder(folder, overwrite=False) as stage:
            if number % self.anchor_every:
                metadata = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}"} | FORMATS
                weight_map = _write_delta(stage, keys, weights, before)
            else:
                metadata, weight_map = {}, self._write_whole(stage, keys, weights)
            write_json(stage / INDEX, {"metadata": metadata | {STEP: str(step)}, "weight_map": weight_map})
        self._number, self.next_step = number, step + 1
        if not number % self.anchor_every:
            self._remove_old()

    def _write_whole(self, stage: Path, keys: Mapping[str, Sequence[str]], weights: Weights) -> dict[str, str]:
        """Writes a model's folder with these weights, whose other files are those of the base. Returns the file of each."""
        for path in self.base.iterdir():
            is_weights = WEIGHTS.fullmatch(path.name) or any(path.match(pattern) for pattern in (*OTHER_WEIGHTS, *INDICES))
            if path.is_file() and not is_weights:
                copy(path, stage / path.name)
        for file in self._files:
            with open(stage / file.path.name, "wb") as target:
                target.write(len(file.header_bytes).to_bytes(8, "little") + file.header_bytes)
                for key in (key for name in file.entries for key in keys[name]):
                    target.write(RawTensor.from_torch(weights.tensors[key]).data)
        return {name: file.path.name for file in self._files for name in file.entries}

    def _remove_old(self) -> None:
        """Removes the versions before the oldest anchor to keep, if there are that many."""
        anchors = [number for number, version in read_versions(self.place.path).items() if version.is_whole]
        oldest = anchors[-self.keep_anchors] if len(anchors) >= self.keep_anchors else 0
        for name in _listing(self.place.path):
            match = VERSION.fullmatch(name.removeprefix("."))
            if match and int(match[1]) < oldest:
                hidden = self.place.path / f".{match[0]}"  # no reader takes what is left for a version
                if not name.startswith("."):
                    os.rename(self.place.path / name, hidden)
                shutil.rmtree(hidden, ignore_errors=True)


def _write_delta(stage: Path, keys: Mapping[str, Sequence[str]], weights: Weights, before: Weights) -> dict[str, str]:
    """Writes the frames of the tensors that differ. Returns the file of each."""

    def encode(name: str) -> tuple[bytes, str] | None:
        pairs = [tuple(RawTensor.from_torch(each.tensors[key]).data for each in (weights, before)) for key in keys[name]]
        if all(equal(new, old) for new, old in pairs):
            return None
        stream = _zstandard().ZstdCompressor(level=LEVEL).compressobj(size=sum(new.size for new, _ in pairs))
        hasher, frame = xxhash.xxh3_128(), bytearray()
        for new, old in pairs:
            hasher.update(new)
            frame += stream.compress(memoryview(new ^ old))
        return bytes(frame + stream.flush()), hasher.hexdigest()

    sizes = {name: sum(weights.tensors[key].nbytes for key in of_tensor) for name, of_tensor in keys.items()}
    changed = {name: result for name, result in Prefetcher(encode, sizes) if result is not None}
    file = stage / "model-00000-of-00001.safetensors"
    if changed:
        checksums = {name: checksum for name, (_, checksum) in changed.items()}
        file.write_bytes(safetensors_bytes(checksums, {name: frame for name, (frame, _) in changed.items()}))
    return dict.fromkeys(changed, file.name)


def _name(number: int) -> str:
    return f"weight_v{number:06d}"


def _listing(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _memory(name: str, tensor: torch.Tensor) -> np.ndarray:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise CheckpointError(f"'{name}' must be contiguous and in CPU memory to follow SGLang's layout.")
    return RawTensor.from_torch(tensor).data


def _xored(source: np.ndarray, frames: Sequence[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """Yields where each chunk of a tensor begins, and its bytes XOR those of the frames. A frame's end counts as zeros, so that
    the checksum tells."""
    streams = [_zstandard().ZstdDecompressor().stream_reader(memoryview(frame)) for frame in frames]
    for begin in range(0, source.size, CHUNK):
        chunk = source[begin : begin + CHUNK].copy()
        for stream in streams:
            read = 0
            while part := stream.read(chunk.size - read):
                chunk[read : read + len(part)] ^= np.frombuffer(part, np.uint8)
                read += len(part)
        yield begin, chunk


def _digest(source: np.ndarray, frames: Sequence[np.ndarray]) -> str | None:
    """Returns the checksum of bytes XOR those of the frames; None if a frame is damaged."""
    hasher = xxhash.xxh3_128()
    try:
        for _, chunk in _xored(source, frames):
            hasher.update(chunk)
    except _zstandard().ZstdError:
        return None
    return hasher.hexdigest()


def _change(memory: np.ndarray, source: np.ndarray, frames: Sequence[np.ndarray]) -> None:
    for begin, chunk in _xored(source, frames):
        memory[begin : begin + chunk.size] = chunk


@cache
def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise MissingDependencyError("SGLang's layout requires zstandard: pip install zstandard") from error
    return zstandard
