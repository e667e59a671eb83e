"""A compressed safetensors file: payloads under the tensors' own names, and a record that restores the original header.

docs/fm_delta_format.md describes the bytes. The file is a valid safetensors file; the record is in its metadata.
"""

from __future__ import annotations

import base64
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage.config_file import HINT
from hf_ext.storage.delta.payload import STORED, VERSION, Header, payload_shape, read_header, require_intact, unchecked_header
from hf_ext.storage.safetensors_file import MAX_HEADER, Entry, SafetensorsFile, TensorFile, parse_header, write_header
from hf_ext.storage.sealed import Seal
from hf_ext.storage.weights import KEY

SEAL = Seal(
    KEY,
    VERSION,
    "is not compressed by FM-Delta, or its header is damaged. A plain checkpoint needs no decompression; "
    "download or save a damaged file again.",
    "Download or save the file again.",
)
HEADER_GROWTH, HEADER_START = 16, 1 << 20  # limits of the original header: a multiple of the compressed file's, plus a constant
MAX_USES = 16  # tensors that one base tensor may predict: reading any of them reads that one too
PAYLOAD_HEADER = 1 << 18  # limit of a payload's header: 255 dimensions and two names of 65,535 bytes


@dataclass(frozen=True)
class BaseInfo:
    """The base of a compressed file: folder or Hub id, commit on the Hub, `TensorSource.fingerprint`."""

    name: str
    revision: str | None
    fingerprint: str

    def __str__(self) -> str:
        return f"'{self.name}'" + (f" at revision {self.revision}" if self.revision else "")


class CompressedFile:
    """A compressed file, given by its path or opened. Opening it checks everything but the payloads. Raises CorruptFileError if
    the file is damaged, is not compressed, or has another format version."""

    def __init__(self, file: str | os.PathLike | SafetensorsFile):
        self.file = SafetensorsFile(file) if isinstance(file, str | os.PathLike) else file
        self.path = self.file.path
        fields = SEAL.record(self.file.metadata, self.file.entries, self.path)
        try:
            self.digest: str = fields["digest"]
            self.fingerprint: str = fields["fingerprint"]
            self.base = None if fields["base"] is None else BaseInfo(**fields["base"])
            self.original_header = _unpack_header(fields["header"], len(self.file.header_bytes))
            self.original_metadata, self.original = parse_header(self.original_header)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
            raise CorruptFileError(f"The header of {self.path} is damaged: {type(error).__name__} {error}.") from error
        if not isinstance(self.original_metadata, dict) or _others(self.original_metadata) != _others(self.file.metadata):
            raise CorruptFileError(f"The header of {self.path} is damaged: its metadata differ from the original file's.")
        entries = self.original.values()
        is_contiguous = all(end == entry.begin <= entry.end for end, entry in zip([0, *(e.end for e in entries)], entries))
        if self.original.keys() != self.file.entries.keys() or not is_contiguous:
            raise CorruptFileError(f"The header of {self.path} is damaged: its tensors differ from the original file's.")

        self._intact: set[str] = set()

    def payload(self, name: str) -> np.ndarray:
        """Returns the payload of a tensor, checked against its checksum the first time. Raises CorruptFileError if it is
        damaged."""
        payload = self.file[name].data
        if name not in self._intact:
            try:
                require_intact(payload, name)
            except CorruptFileError as error:
                raise CorruptFileError(f"{self.path}: {error}") from error
            self._intact.add(name)
        return payload

    def size(self, name: str) -> int:
        """Returns a tensor's size in bytes in the original file."""
        return self.original[name].nbytes

    @cached_property
    def headers(self) -> dict[str, Header]:
        """The headers of all payloads. Each fits the file's own header; `payload` checks the rest of it."""
        self.file.read_sparsely()
        try:
            return {name: self._header(name) for name in self.file.entries}
        finally:
            self.file.read_sparsely(False)

    def require_whole(self) -> None:
        """Raises CorruptFileError if a mapped file was truncated since it was opened: reading it would end the process."""
        self.file.require_whole()

    def require_intact(self) -> None:
        """Raises CorruptFileError if any payload is damaged."""
        for name in self.file.entries:
            self.payload(name)

    def _header(self, name: str) -> Header:
        """Returns the header of a tensor's payload. If it does not fit the file's own header, checks the whole payload."""
        entry, payload = self.file.entries[name], self.file[name].data
        try:
            header = unchecked_header(payload, name)
        except CorruptFileError as error:
            self.payload(name)
            raise CorruptFileError(f"{self.path}: {error}") from error
        size = payload.size - header.body if header.mode == STORED else header.size
        expected = Entry("U8", payload_shape(len(header.shape), payload.size), entry.begin, entry.end)
        if entry != expected or self.original[name][:2] != (header.dtype, header.shape) or self.size(name) != size:
            self.payload(name)
            raise CorruptFileError(
                f"Tensor '{name}' in {self.path} is not the one the file was written with: its type, shape or size differs."
            )
        if self.base is None and header.base_values:
            self.payload(name)
            raise CorruptFileError(
                f"{self.path} is damaged: tensor '{name}' needs '{header.base_name}' of a base, but the file records no base. "
                "Download or save the file again."
            )
        return header


def digest_of(checksums: Iterable[tuple[str, int]]) -> str:
    """Returns a hash of the names and contents of all tensors of a checkpoint, over all its shards, given `Header.checksum` of
    each."""
    digest = xxhash.xxh3_128()
    for name, checksum in sorted(checksums):
        digest.update(f"{name}\0{checksum}\0".encode())
    return digest.hexdigest()


def check_shards(files: Sequence[CompressedFile]) -> None:
    """Checks that these files are all the shards of one save. Reads the headers of payloads only. Raises CorruptFileError if a
    file belongs to another save, shards are missing, or too many tensors need the same base tensor."""
    digest = digest_of((header.name, header.checksum) for file in files for header in file.headers.values())
    for file in files:
        if file.digest != digest or file.base != files[0].base:
            for shard in files:
                shard.require_intact()  # else one has a damaged checksum
            raise CorruptFileError(
                f"{file.path} belongs to another save than the files beside it, or some are missing: the folder was not "
                "written completely. Save or download the checkpoint again."
            )
    uses = Counter(header.base_name for file in files for header in file.headers.values() if header.base_values)
    if uses and max(uses.values()) > MAX_USES:
        raise CorruptFileError(f"{files[0].path} is damaged: one tensor of the base predicts {max(uses.values())} others.")


class CompressedWriter:
    """A writer of a compressed file, payload by payload. It reserves space for the header first, of which `original` gives the
    entries. `finish` writes the header when the payloads of all shards are known; `close` comes before, so that only one shard
    is open at a time."""

    def __init__(self, path: Path, original: TensorFile, base: BaseInfo | None):
        self.original = original
        self.headers: list[Header] = []
        self._base = base
        self._entries: dict[str, Entry] = {}
        self._end = 0
        most = sum(entry.nbytes + PAYLOAD_HEADER for entry in original.entries.values())
        widest = dict.fromkeys(original.entries, Entry("U8", (most, most), most, most))
        self._room = len(self._header(widest, "0" * 32, "0" * 32))
        if len(original.header_bytes) > HEADER_GROWTH * self._room + HEADER_START:
            raise CheckpointError(
                f"The header of {original.path} has {len(original.header_bytes)} bytes, far more than its tensors need. Load "
                "and save the model again."
            )
        self._path = path
        self._file = open(path, "wb")
        self._file.write(bytes(8 + self._room))

    def add(self, name: str, payload: bytes) -> None:
        """Appends a tensor's payload."""
        header = read_header(payload, name)
        self.headers.append(header)
        self._entries[name] = Entry("U8", payload_shape(len(header.shape), len(payload)), self._end, self._end + len(payload))
        self._end += len(payload)
        self._file.write(payload)

    def finish(self, digest: str, fingerprint: str) -> None:
        """Writes the header. Call `close` first."""
        header = self._header(self._entries, digest, fingerprint).ljust(self._room)
        with open(self._path, "r+b") as file:
            file.write(len(header).to_bytes(8, "little") + header)

    def close(self) -> None:
        """Ends the payloads."""
        self._file.close()

    def _header(self, entries: dict[str, Entry], digest: str, fingerprint: str) -> bytes:
        packed = base64.b85encode(zlib.compress(self.original.header_bytes, 9)).decode()
        record = {"hint": HINT, "digest": digest, "fingerprint": fingerprint, "base": self._base and asdict(self._base)}
        return write_header({**self.original.metadata, **SEAL.metadata(record | {"header": packed}, entries)}, entries)


def _unpack_header(packed: str, size: int) -> bytes:
    """Returns the original header, after checking that it names the same tensors as the compressed file's own header of `size`
    bytes."""
    limit = min(HEADER_GROWTH * size + HEADER_START, MAX_HEADER)
    unpacker = zlib.decompressobj()
    header = unpacker.decompress(base64.b85decode(packed), limit)
    if not unpacker.eof:
        raise ValueError(f"the original header has no end within {limit} bytes")
    return header


def _others(metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns the metadata that do not belong to this format."""
    return {key: text for key, text in metadata.items() if key not in SEAL.keys}
