"""The files of a run: what one step changed (`step-…`), all weights of a step (`anchor-…`), and an index of both.

Tensors are stored in parts of at most PART values: whole small tensors, and ranges of rows of larger ones. A part is a payload
of the delta format. A run keeps its parts, so that each is the base of the same part one step later. docs/weight_sync.md
describes the files byte by byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np

from hf_ext.errors import CorruptFileError
from hf_ext.storage.delta.payload import Header, read_header
from hf_ext.storage.safetensors_file import MAX_HEADER, Entry, parse_header, require_valid, write_header
from hf_ext.storage.sealed import Seal
from hf_ext.weight_sync.places import Buffer, Place

VERSION = 1
REPAIR = "Publish the step again."
SEAL = Seal("weight_sync", VERSION, f"is not a file of weight sync, or its header is damaged. {REPAIR}", REPAIR)
PART = 1 << 22  # values
FILE_NAME = re.compile(r"(step|anchor)-\d+-\d+-\d+\.safetensors")


class Part(NamedTuple):
    """Rows of a tensor, from `begin` on. `shape` is that of the whole tensor."""

    name: str
    begin: int
    shape: tuple[int, ...]

    def end(self, header: Header) -> int:
        """Returns the row behind the last one, given the header of the part's payload. A scalar counts as one row."""
        return self.begin + (header.shape[0] if header.shape else 1)


PartsByKey = dict[str, tuple[Part, Header]]  # each with the header of its newest payload


@dataclass
class Step:
    """A step as the index lists it."""

    step: int
    before: str | None  # digest of all parts of the rank before the step; None if there is no delta
    after: str
    attempt: str = ""  # tells apart steps of one number that a resumed training published again; the same for all ranks
    delta: dict[str, int] = field(default_factory=dict)  # bytes of the files, by name
    anchor: dict[str, int] = field(default_factory=dict)

    def is_valid(self) -> bool:
        """Checks what a stranger may have written: no name may lead out of the place."""
        files = [*self.delta.items(), *self.anchor.items()]
        is_named = all(FILE_NAME.fullmatch(name) and isinstance(size, int) for name, size in files)
        return isinstance(self.step, int) and isinstance(self.attempt, str) and is_named


@dataclass
class Index:
    """The steps that one rank of a run has published."""

    run: str
    rank: int
    world_size: int
    session: str  # tells publishers apart that continue one run
    steps: list[Step]  # oldest first, of increasing numbers

    def to_bytes(self) -> bytes:
        return json.dumps({"version": VERSION} | asdict(self), indent=1).encode()

    @classmethod
    def read(cls, place: Place, rank: int) -> Index | None:
        """Returns the index of a rank; None if nothing was published."""
        name = index_name(rank)
        try:
            fields = json.loads(bytes(place.get(name)))
            version = fields.pop("version")
            index = cls(**fields | {"steps": [Step(**step) for step in fields["steps"]]}) if version == VERSION else None
            is_valid = index is None or index.is_valid(rank)
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(f"{name} at {place} is damaged: {type(error).__name__} {error}.") from error
        if index is None:
            raise CorruptFileError(
                f"{name} at {place} is damaged, or of a newer hf_ext: it has version {version}, not {VERSION}."
            )
        if not is_valid:
            raise CorruptFileError(f"{name} at {place} is damaged: its fields do not fit together. {REPAIR}")
        return index

    def is_valid(self, rank: int) -> bool:
        """Checks the fields, which a stranger may have written, as the index of a rank."""
        if not all(step.is_valid() for step in self.steps):
            return False
        numbers = [step.step for step in self.steps]
        is_ordered = numbers == sorted(set(numbers))
        return self.rank == rank < self.world_size and type(self.world_size) is int and is_ordered


def index_name(rank: int) -> str:
    return f"index-{rank:05d}.json"


def file_name(kind: str, step: int, rank: int, number: int) -> str:
    """Returns the name of a file of a step; `number` counts the files of a large one."""
    return f"{kind}-{step:08d}-{rank:05d}-{number:05d}.safetensors"


def write_file(index: Index, step: Step, payloads: Mapping[str, bytes], parts: Mapping[str, Part]) -> bytes:
    """Returns a file with these payloads. `parts` tells of those that are not whole tensors which rows they are."""
    entries = entries_of(payloads)
    fields = {"run": index.run, "rank": index.rank, "step": step.step, "before": step.before, "after": step.after}
    rows = {key: part for key, part in parts.items() if key != part.name}
    return safetensors_bytes(SEAL.metadata(fields | {"parts": rows}, entries), payloads)


def entries_of(payloads: Mapping[str, bytes]) -> dict[str, Entry]:
    """Returns the header's entries of payloads that lie one behind the other."""
    entries, end = {}, 0
    for key, payload in payloads.items():
        entries[key] = Entry("U8", (len(payload),), end, end := end + len(payload))
    return entries


def safetensors_bytes(metadata: Mapping[str, str], payloads: Mapping[str, bytes]) -> bytes:
    """Returns a safetensors file whose tensors are payloads."""
    header = write_header(metadata, entries_of(payloads))
    return b"".join([len(header).to_bytes(8, "little"), header, *payloads.values()])


class StepFile:
    """A file of a step, checked whole: its header, and the checksum of every payload. Its attributes are fields of the index,
    the parts that it holds by key, with the headers of their payloads, and the payloads."""

    def __init__(self, content: Buffer, name: str):
        data = np.frombuffer(content, np.uint8)
        length = int.from_bytes(data[:8].tobytes(), "little")
        try:
            if not 0 < length <= min(data.size - 8, MAX_HEADER):
                raise ValueError(f"its header cannot have {length} bytes")
            metadata, entries = parse_header(data[8 : 8 + length].tobytes())
            require_valid(entries, data.size - 8 - length)
            fields = SEAL.record(metadata, entries, name)
            self.run, self.rank, self.step = fields["run"], fields["rank"], fields["step"]
            self.before, self.after = fields["before"], fields["after"]
            rows = {key: Part(part[0], part[1], tuple(part[2])) for key, part in fields["parts"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise CorruptFileError(f"{name} is damaged: {error}.") from error
        body = data[8 + length :]
        self.payloads = {key: body[entry.begin : entry.end] for key, entry in entries.items()}
        self.parts: PartsByKey = {}
        for key, payload in self.payloads.items():
            try:
                header = read_header(payload, key)
            except CorruptFileError as error:
                raise CorruptFileError(f"{name} is damaged. {error}") from error
            part = rows.get(key, Part(key, 0, header.shape))
            numbers = (part.begin, *part.shape)
            is_valid = isinstance(part.name, str) and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
            if not is_valid or len(part.shape) != len(header.shape) or part.shape[1:] != header.shape[1:]:
                raise CorruptFileError(f"{name} is damaged: '{key}' cannot be rows of a tensor of shape {list(part.shape)}.")
            self.parts[key] = part, header
