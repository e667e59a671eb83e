"""Brings tensors in memory to a published step."""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.delta.file import digest_of
from hf_ext.storage.delta.payload import Header
from hf_ext.storage.prefetch import Prefetcher
from hf_ext.storage.safetensors_file import RawTensor, torch_dtype
from hf_ext.weight_sync.memory import Home, KeptTensor, Parts, Piece, layout_of, rows_of
from hf_ext.weight_sync.places import Place, open_place
from hf_ext.weight_sync.rows import checkpoint_name
from hf_ext.weight_sync.step_file import Index, Part, Step, StepFile

logger = logging.getLogger(__name__)

MOST_DAMAGED = 32  # files that an update may find damaged or missing before it gives up


class Subscriber:
    """Reads the steps that a `Publisher` writes to a place.

    Checks every file before it changes a tensor, and the checksum of every changed tensor before and after. If a file is
    missing or damaged, a warning names it, and the tensors start again from the newest anchor.

    Args:
        place: as for `Publisher`.

    Attributes:
        step: the step that the tensors are at; None before the first `update` and after one that failed halfway.
        is_mixed: true after an update that failed halfway: the tensors are of no one step.
        tensors: copies in CPU memory of the tensors that cannot change where the caller keeps them.
        changed: names of the published tensors that the last `update` changed.
    """

    def __init__(self, place: str | os.PathLike | Place):
        self.place = open_place(place)
        self.step: int | None = None
        self.is_mixed = False
        self.tensors: dict[str, torch.Tensor] = {}
        self.changed: set[str] = set()
        self._run = ""
        self._ranks: list[_Rank] = []  # none: nothing is known of the tensors
        self._kept: dict[str, KeptTensor] = {}  # in the last `update`, by published name

    def steps(self) -> list[int]:
        """Returns the steps at the place, oldest first.

        Raises:
            CorruptFileError: an index is damaged, or from a newer version.
        """
        return _steps(self._indices())

    def update(
        self,
        named_tensors: Mapping[str, torch.Tensor] | None = None,
        step: int | None = None,
        locate: Callable[[str], Piece | None] | None = None,
        strict: bool = False,
    ) -> int:
        """Updates tensors in place to a step, whichever step they are at.

        Applies all missed steps in one pass over the tensors. Contiguous tensors in CPU memory change where they are. Of other
        tensors, such as those on a GPU, this object keeps a copy in CPU memory and copies the changed rows from there.

        Args:
            named_tensors: the tensors to change, by name. By default, copies of all published tensors, in `tensors`.
            step: number of the step; the newest by default.
            locate: returns where the caller keeps a published tensor, or None if it does not. Defaults to the same name.
            strict: do not accept that the caller lacks a published tensor.

        Returns:
            The step. If damaged files prevent a newer one, this is the newest step that can be reached.

        Raises:
            CheckpointError: nothing is published, `step` is not there, or the tensors do not fit the published ones.
            CorruptFileError: damaged files prevent the update. The tensors are unchanged, unless the message says otherwise.
        """
        damaged: dict[str, str] = {}  # by name: what is wrong
        files: dict[str, StepFile] = {}
        while True:
            indices = self._indices()
            if self._ranks and [index.run for index in indices] != [self._run] * len(self._ranks):
                logger.warning(
                    f"{self.place} no longer holds the run '{self._run}' of the tensors. They start again from an anchor."
                )
                self._ranks = []
            target, paths = self._find(indices, step, damaged)
            try:
                ranks = [self._after(index, path, files) for index, path in zip(indices, paths)]
                chains = _by_key(files[name] for path in paths for stage in path for name in stage.files)
                checksums = self._checksums(paths)
                layout = layout_of((key, part, rank.headers[key]) for rank in ranks for key, part in rank.parts.items())
                homes, kept_tensors = self._homes(layout, checksums, chains, named_tensors, locate, strict)
                break
            except _DamagedFile as error:
                logger.warning(f"{error} Other files take its place.")
                damaged[error.name] = str(error)
                if len(damaged) > MOST_DAMAGED:
                    raise CorruptFileError(f"{error} More than {MOST_DAMAGED} files at {self.place} are damaged.") from None
            except _ChangedTensor as error:
                logger.warning(f"{error}: all tensors begin at an anchor.")
                self._ranks = []
        self._ranks, self.step, self.is_mixed = [], None, True
        try:
            for key, rows in Prefetcher(lambda key: homes[key].apply(chains.get(key, ())), dict.fromkeys(homes, 1)):
                homes[key].copy(rows)
        except (BaseModelError, CorruptFileError) as error:
            raise CorruptFileError(f"{error} The tensors are now of no one step: update them again.") from error
        self._ranks, self._run, self.step, self.is_mixed = ranks, indices[0].run, target, False
        self._kept = {name: KeptTensor.of(*where) for name, where in kept_tensors.items()}
        self.changed = {rank.parts[key].name for rank in ranks for key in rank.parts if key in chains}
        return target

    def _checksums(self, paths: list[list[_Stage]]) -> dict[str, int]:
        """Returns the checksums of the tensors in memory, except where the tensors begin at an anchor."""
        return {
            key: header.checksum
            for rank, path in zip(self._ranks, paths)
            if not any(stage.is_anchor for stage in path)
            for key, header in rank.headers.items()
        }

    def _indices(self) -> list[Index]:
        """Returns the indices of all ranks; none if a rank has none yet."""
        first = Index.read(self.place, 0)
        if first is None:
            return []
        indices = [first]
        for rank in range(1, first.world_size):
            index = Index.read(self.place, rank)
            if index is None or index.run != first.run:
                return []
            indices.append(index)
        return indices

    def _find(self, indices: list[Index], step: int | None, damaged: Mapping[str, str]) -> tuple[int, list[list[_Stage]]]:
        """Returns the step to go to, the newest that can be reached, and for each rank the files on the way."""
        steps = _steps(indices)
        if step is not None and step not in steps:
            there = f"there are {steps[0]} to {steps[-1]}" if steps else "there are none"
            raise CheckpointError(f"Step {step} is not, or no longer, at {self.place}: {there}.")
        for target in reversed(steps) if step is None else [step]:
            digests: list[str | None] = [rank.digest for rank in self._ranks] or [None for _ in indices]
            paths = [_path(index.steps, target, digest, damaged) for index, digest in zip(indices, digests)]
            reachable = [path for path in paths if path is not None]
            if len(reachable) == len(indices):
                return target, reachable
        if damaged:
            raise CorruptFileError(f"{next(iter(damaged.values()))} No other files at {self.place} lead to the step.")
        raise CheckpointError(f"Nothing is published at {self.place} that these tensors could begin with.")

    def _after(self, index: Index, path: list[_Stage], files: dict[str, StepFile]) -> _Rank:
        """Opens the files of a rank, which go into `files`, and returns its state when they are applied."""
        state = self._ranks[index.rank] if self._ranks else _Rank({}, {}, "")
        for entry, is_anchor, names in path:
            before, state = state, _Rank({}, {}, entry.after)
            if not is_anchor:
                state.parts.update(before.parts)
                state.headers.update(before.headers)
            for name in names:
                if name not in files:
                    try:
                        files[name] = StepFile(self.place.get(name), f"{name} at {self.place}")
                    except FileNotFoundError:
                        raise _DamagedFile(name, f"{name} is missing at {self.place}.") from None
                    except CorruptFileError as error:
                        raise _DamagedFile(name, str(error)) from error
                file = files[name]
                expected = (index.run, index.rank, entry.step, entry.before, entry.after)
                if (file.run, file.rank, file.step, file.before, file.after) != expected:
                    raise _DamagedFile(name, f"{name} at {self.place} is not the file of this run and step.")
                # Only the payload itself limits the size of a tensor without a base: a stranger cannot make it take memory.
                if is_anchor and any(header.base_values for header in file.headers.values()):
                    raise _DamagedFile(name, f"{name} at {self.place} does not hold whole weights.")
                kind = _Rank(file.parts, file.headers, entry.after).kind
                if not is_anchor and any(kind(key) != before.kind(key) for key in file.parts):
                    raise _DamagedFile(name, f"{name} at {self.place} changes other tensors than those of this run.")
                state.parts.update(file.parts)
                state.headers.update(file.headers)
            if digest_of((key, header.checksum) for key, header in state.headers.items()) != entry.after:
                raise _DamagedFile(name, f"{name} at {self.place} does not lead to the weights of step {entry.step}.")
        return state

    def _homes(
        self,
        layout: Mapping[str, Parts],
        checksums: Mapping[str, int],
        chains: Mapping[str, object],
        named_tensors: Mapping[str, torch.Tensor] | None,
        locate: Callable[[str], Piece | None] | None,
        strict: bool,
    ) -> tuple[dict[str, Home], dict[str, tuple[torch.Tensor, Piece]]]:
        """Returns where those parts are kept that have to change, by key, once it is sure that all hold what they should; and
        what the caller keeps, by published name."""
        homes: dict[str, Home] = {}
        kept_tensors: dict[str, tuple[torch.Tensor, Piece]] = {}
        used: set[str] = set()
        places: dict[int, tuple[str, list[int]]] = {}  # by address: the first tensor there, and its checksums
        if named_tensors is None:
            for name, parts in layout.items():
                self._copy_of(name, parts, checksums)
            for name in self.tensors.keys() - layout.keys():  # of another run
                del self.tensors[name]
            named_tensors, locate = self.tensors, None
        elif locate is None:
            named_tensors = {checkpoint_name(name): tensor for name, tensor in named_tensors.items()}
        for name, parts in layout.items():
            piece = locate(name) if locate else Piece(name) if name in named_tensors else None
            if piece is None:
                if strict:
                    raise CheckpointError(f"'{name}', which {self.place} publishes, is not among the tensors given.")
                continue
            if piece.tensor not in named_tensors:
                raise CheckpointError(f"'{piece.tensor}', where '{name}' is to be kept, is not among the tensors given.")
            used.add(piece.tensor)
            tensor = named_tensors[piece.tensor]
            kept_tensors[name] = tensor, piece
            is_as_left = name in self._kept and self._kept[name].is_still(tensor, piece)
            rows = rows_of(tensor, piece, parts, is_whole=locate is None)
            # Of two names for the same memory, as tied weights have, the second is copied to it.
            in_place = rows.device.type == "cpu" and rows.is_contiguous() and rows.data_ptr() not in places
            sums = [header.checksum for *_, header in parts]
            twin, theirs = places.setdefault(rows.data_ptr(), (name, sums))
            if theirs != sums and rows.numel() and locate is None:
                raise CheckpointError(
                    f"'{name}' and '{twin}' are one tensor here, but the training gave them different values."
                )
            for key, part, header in parts:
                first, last = max(part.begin, piece.begin), min(part.end(header), piece.begin + len(rows))
                if first >= last:
                    continue
                kept = rows[first - piece.begin : last - piece.begin]
                if in_place and (first, last) == (part.begin, part.end(header)):
                    home = Home(kept, kept, None)
                else:
                    copy = self._copy_of(name, parts, checksums)[part.begin : part.end(header)]
                    home = Home(copy, copy[first - part.begin : last - part.begin], kept, first - part.begin)
                is_new = home.elsewhere is not None and not is_as_left
                # What a caller keeps may have changed even where this step changes nothing.
                if key in checksums and (key in chains or is_new or home.elsewhere is None):
                    if xxhash.xxh3_64_intdigest(RawTensor.from_torch(home.part).data) != checksums[key]:
                        raise _ChangedTensor(f"'{piece.tensor}' is not as the last update left it")
                if key in chains or is_new:
                    homes[key] = home._replace(is_new=is_new)
        if missing := sorted(set(named_tensors) - used):
            raise CheckpointError(f"Nothing is published at {self.place} for the tensor '{missing[0]}'.")
        return homes, kept_tensors

    def _copy_of(self, name: str, parts: Parts, checksums: Mapping[str, int]) -> torch.Tensor:
        """Returns this object's copy of a tensor, a scalar as one row. Memory is taken only for what is written there."""
        key, part, header = parts[0]
        copy, dtype = self.tensors.get(name), torch_dtype(header.dtype)
        if copy is None or (copy.shape, copy.dtype) != (part.shape, dtype):  # that of another run
            self.tensors[name] = torch.empty(part.shape, dtype=dtype)
            if key in checksums:
                raise _ChangedTensor(f"There is no copy of '{name}' in memory yet")
        return torch.atleast_1d(self.tensors[name])


class _Rank(NamedTuple):
    """The state of what one rank of the training publishes: its parts, the headers of their newest payloads, and the digest of
    all."""

    parts: dict[str, Part]
    headers: dict[str, Header]
    digest: str

    def kind(self, key: str) -> tuple[Part, str, tuple[int, ...]] | None:
        """Returns what all payloads of a part have in common; None if there is no such part."""
        return (self.parts[key], self.headers[key].dtype, self.headers[key].shape) if key in self.parts else None


class _Stage(NamedTuple):
    """A step on the way to another one, and the files that lead there: all weights of the step, or what it changed."""

    step: Step
    is_anchor: bool
    files: Mapping[str, int]


class _DamagedFile(Exception):
    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


class _ChangedTensor(Exception):
    pass


def _steps(indices: list[Index]) -> list[int]:
    """Returns the steps that all ranks have published, oldest first."""
    if not indices:
        return []
    common = set.intersection(*({(entry.step, entry.attempt) for entry in index.steps} for index in indices))
    return sorted(step for step, _ in common)


def _path(steps: list[Step], target: int, digest: str | None, damaged: Mapping[str, object]) -> list[_Stage] | None:
    """Returns the way to a step that takes the fewest bytes, from the state of this digest or from an anchor."""
    best: list[_Stage] | None = None
    least, size = math.inf, 0
    chain: list[_Stage] = []
    wanted = None
    for entry in reversed([entry for entry in steps if entry.step <= target]):
        if wanted not in (None, entry.after):
            break  # what the chain begins with is not there
        if entry.after == digest and size < least:
            best, least = chain, size
        if entry.anchor and not damaged.keys() & entry.anchor and size + sum(entry.anchor.values()) < least:
            best, least = [_Stage(entry, True, entry.anchor), *chain], size + sum(entry.anchor.values())
        if not entry.delta or damaged.keys() & entry.delta:
            break
        chain, size, wanted = [_Stage(entry, False, entry.delta), *chain], size + sum(entry.delta.values()), entry.before
        if wanted == digest and size < least:
            best, least = chain, size
    return best


def _by_key(files: Iterable[StepFile]) -> dict[str, list[tuple[np.ndarray, Header]]]:
    """Returns the payloads of each part, in the order in which they apply."""
    chains = defaultdict(list)
    for file in files:
        for key, payload in file.payloads.items():
            chains[key].append((payload, file.headers[key]))
    return dict(chains)
