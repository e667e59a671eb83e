"""Sealed safetensors files: their metadata hold a JSON record, its format version, and a checksum of the whole header.

Compressed files, the tasks of merges, and the steps of weight sync are sealed. The payloads have checksums of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from hf_ext.errors import CorruptFileError
from hf_ext.storage.safetensors_file import Entry


@dataclass(frozen=True)
class Seal:
    """The seal of one kind of files."""

    key: str  # of the record in the metadata; the checksum has this key and "_checksum"
    version: int  # of the format
    absent: str  # completes the error for a file without a record, after the file's path; ends with the next step
    repair: str  # what to do about a damaged file

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of the metadata that belong to the seal."""
        return self.key, f"{self.key}_checksum"

    def metadata(self, record: Mapping[str, Any], entries: Mapping[str, Entry]) -> dict[str, str]:
        """Returns the metadata that seal a file with this record and these entries."""
        text = json.dumps({"version": self.version, **record})
        return dict(zip(self.keys, (text, header_checksum(text, entries))))

    def record(self, metadata: Mapping[str, str], entries: Mapping[str, Entry], path: object) -> dict[str, Any]:
        """Returns the record of a file. Its fields may still be forged, so the caller checks them. Raises CorruptFileError if
        the file is not sealed, damaged, or from a newer version."""
        text, checksum = map(metadata.get, self.keys)
        if text is None:
            raise CorruptFileError(f"{path} {self.absent}")
        try:
            record = json.loads(text)
            version = record.pop("version", None)
        except (ValueError, TypeError, AttributeError, RecursionError):
            version = None
        if isinstance(version, int) and version > self.version:
            raise CorruptFileError(
                f"{path} has format version {version}, this hf_ext reads version {self.version}: update hf_ext."
            )
        if version != self.version or checksum != header_checksum(text, entries):
            raise CorruptFileError(f"The header of {path} is damaged: checksum mismatch. {self.repair}")
        return record


def header_checksum(record: str, entries: Mapping[str, Entry]) -> str:
    """Returns the XXH3-64 of a record's text, and of the name, type, shape and place of every entry."""
    digest = xxhash.xxh3_64(record.encode())
    for name in sorted(entries):
        entry = entries[name]
        digest.update(f"\0{name}\0{entry.dtype}\0{list(entry.shape)}\0{entry.begin}\0{entry.end}".encode())
    return digest.hexdigest()
