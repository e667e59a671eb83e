"""A compressed safetensors file: payloads under the tensors' own names, and a header that can restore the original's.

docs/fm_delta_format.md describes the bytes. The file is a valid safetensors file; what makes it one of ours stands in its
metadata.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from hf_ext.errors import CorruptFileError
from hf_ext.storage.delta.codec import STORED, VERSION, VERSIONS, Header, payload_shape, read_header
from hf_ext.storage.safetensors_file import Entry, SafetensorsFile, TensorFile, parse_header

KEY, CHECKSUM_KEY = "fm_delta", "fm_delta_checksum"  # in a file's metadata
MAX_HEADER = 100_000_000  # the safetensors library reads no longer header than this
PAYLOAD_HEADER = 1 << 18  # no payload's header is longer: 255 dimensions and names of 65,535 bytes


@dataclass(frozen=True)
class BaseInfo:
    """Which base a file was compressed against: folder or Hub id, commit on the Hub, `Checkpoint.fingerprint`."""

    name: str
    revision: str | None
    fingerprint: str

    def __str__(self) -> str:
        return f"'{self.name}'" + (f" at revision {self.revision}" if self.revision else "")


class CompressedFile:
    """A file written by this module, with everything but the payloads checked.

    Raises:
        CorruptFileError: the file is damaged, is not compressed, or comes from a newer version.
    """

    def __init__(self, path: str | os.PathLike):
        self.file = SafetensorsFile(path)
        self.path = self.file.path
        record = self.file.metadata.get(KEY)
        if record is None:
            raise CorruptFileError(
                f"{self.path} is not compressed by FM-Delta (a plain checkpoint needs no such step), or its header is damaged."
            )
        try:
            fields = json.loads(record)
        except (ValueError, RecursionError):
            fields = None
        version = fields.get("version") if isinstance(fields, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise CorruptFileError(
                f"{self.path} has format version {version}, this hf_ext reads up to {VERSION}: update hf_ext."
            )
        checksum = _header_checksum(record, self.file.entries.items())
        if version not in VERSIONS or self.file.metadata.get(CHECKSUM_KEY) != checksum:
            raise CorruptFileError(f"The header of {self.path} is damaged: it does not have the checksum it was written with.")
        try:
            self.digest: str = fields["digest"]
            self.fingerprint: str | None = fields.get("fingerprint")
            self.base = BaseInfo(**fields["base"])
            self.original_header = _unpack_header(fields["header"])
            self.original_metadata, self.original = parse_header(self.original_header)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
            raise CorruptFileError(f"The header of {self.path} is damaged: {type(error).__name__} {error}.") from error
        if self.original_metadata != {key: text for key, text in self.file.metadata.items() if key not in (KEY, CHECKSUM_KEY)}:
            raise CorruptFileError(f"The header of {self.path} is damaged: its metadata is not the original file's.")
        if self.original.keys() != self.file.entries.keys() or not _is_contiguous(self.original.values()):
            raise CorruptFileError(f"The header of {self.path} is damaged: its tensors are not the original file's.")

    def payload(self, name: str) -> np.ndarray:
        return self.file[name].data

    def size(self, name: str) -> int:
        """Bytes of the tensor in the original file."""
        return self.original[name].end - self.original[name].begin

    @cached_property
    def headers(self) -> dict[str, Header]:
        """The headers of all tensors; every payload is checked against its checksum."""
        headers = {}
        for name, entry in self.file.entries.items():
            payload = self.payload(name)
            header = headers[name] = read_header(payload, name)
            size = payload.size - header.body if header.mode == STORED else header.size
            written = Entry("U8", payload_shape(len(header.shape), payload.size), entry.begin, entry.end)
            if entry != written or self.original[name][:2] != (header.dtype, header.shape) or self.size(name) != size:
                raise CorruptFileError(f"Tensor '{name}' in {self.path} is not the one the file was written with.")
        return headers


def digest_of(headers: Iterable[Header]) -> str:
    """A hash of the names and contents of all tensors of a checkpoint, over all its shards."""
    digest = xxhash.xxh3_128()
    for name, checksum in sorted((header.name, header.checksum) for header in headers):
        digest.update(f"{name}\0{checksum}\0".encode())
    return digest.hexdigest()


def check_shards(files: Sequence[CompressedFile]) -> None:
    """Raises CorruptFileError unless these files are all the shards of one save."""
    found = digest_of(header for file in files for header in file.headers.values())
    for file in files:
        if file.digest != found or file.base != files[0].base:
            raise CorruptFileError(
                f"{file.path} belongs to another save than the files beside it, or some are missing: the folder was not "
                "written to the end. Save or download the checkpoint again."
            )


class CompressedWriter:
    """Writes one compressed file payload by payload. The header, which needs all sizes, gets its room first and its content
    in `finish`."""

    def __init__(self, path: Path, original: TensorFile, base: BaseInfo):
        self.original = original
        self.headers: list[Header] = []
        self._base = base
        self._entries: dict[str, Entry] = {}
        self._end = 0
        most = sum(entry.end - entry.begin + PAYLOAD_HEADER for entry in original.entries.values())
        widest = dict.fromkeys(original.entries, Entry("U8", (most, most), most, most))
        self._room = len(self._header(widest, "0" * 32, "0" * 32))
        self._file = open(path, "wb")
        self._file.write(bytes(8 + self._room))

    def add(self, name: str, payload: bytes) -> None:
        header = read_header(payload, name)
        self.headers.append(header)
        self._entries[name] = Entry("U8", payload_shape(len(header.shape), len(payload)), self._end, self._end + len(payload))
        self._end += len(payload)
        self._file.write(payload)

    def finish(self, digest: str, fingerprint: str) -> None:
        header = self._header(self._entries, digest, fingerprint).ljust(self._room)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self.close()

    def close(self) -> None:
        self._file.close()

    def _header(self, entries: dict[str, Entry], digest: str, fingerprint: str) -> bytes:
        packed = base64.b85encode(zlib.compress(self.original.header_bytes, 9)).decode()
        fields = {"version": VERSION, "digest": digest, "fingerprint": fingerprint, "base": asdict(self._base)}
        record = json.dumps(fields | {"header": packed})
        metadata = self.original.metadata | {KEY: record, CHECKSUM_KEY: _header_checksum(record, entries.items())}
        header = {"__metadata__": metadata} | {
            name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
            for name, entry in entries.items()
        }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        return text.ljust(-(-len(text) // 8) * 8)


def _header_checksum(record: str, entries: Iterable[tuple[str, Entry]]) -> str:
    digest = xxhash.xxh3_64(record.encode())
    for name, entry in entries:
        digest.update(f"\0{name}\0{entry.begin}\0{entry.end}".encode())
    return digest.hexdigest()


def _unpack_header(packed: str) -> bytes:
    unpacker = zlib.decompressobj()
    header = unpacker.decompress(base64.b85decode(packed), MAX_HEADER)
    if not unpacker.eof:
        raise ValueError(f"the original header has no end within {MAX_HEADER} bytes")
    return header


def _is_contiguous(entries: Iterable[Entry]) -> bool:
    end = 0
    for entry in entries:
        if not entry.begin == end <= entry.end:
            return False
        end = entry.end
    return True
