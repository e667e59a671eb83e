"""Plans an update: which files of a place bring tensors to a step, checked before any tensor changes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage.delta.file import digest_of
from hf_ext.storage.delta.payload import Header
from hf_ext.weight_sync.places import Place
from hf_ext.weight_sync.step_file import Index, Part, PartsByKey, Step, StepFile

logger = logging.getLogger(__name__)

MOST_DAMAGED = 32  # files that an update may find damaged or missing before it gives up

Parts = list[tuple[str, Part, Header]]  # of a tensor, in the order of rows: the key of each, and the header of its payload


class State(NamedTuple):
    """The weights of a run after a step: what each of its ranks publishes."""

    run: str
    step: int
    ranks: list[PartsByKey]


class Plan(NamedTuple):
    """An update of tensors to a step.

    Attributes:
        state: state of the tensors after the update.
        layout: the parts of each tensor, by the tensor's name.
        payloads: the payloads to apply to each part, by key. Parts that have none are up to date.
        checksums: the checksum of each part before the update, by key. Parts that begin at an anchor may be anything.
    """

    state: State
    layout: dict[str, Parts]
    payloads: dict[str, list[tuple[np.ndarray, Header]]]
    checksums: dict[str, int]


class _Stage(NamedTuple):
    """A step on the way to another one, and the files that lead there: all weights of the step, or what it changed."""

    step: Step
    is_anchor: bool
    files: Mapping[str, int]


class Planner:
    """Plans an update. Avoids the files that it finds damaged or missing."""

    def __init__(self, place: Place):
        self.place = place
        self._files: dict[str, StepFile] = {}
        self._damaged: dict[str, str] = {}  # the message for each file

    def plan(self, state: State | None, step: int | None) -> Plan:
        """Plans the update from a state to a step.

        Args:
            state: state of the tensors; None if it is not known, so that they begin at an anchor.
            step: number of the step. Defaults to the newest one that can be reached.

        Raises:
            CheckpointError: nothing is published, the step is not there, or the ranks do not publish whole tensors.
            CorruptFileError: damaged files prevent the update.
        """
        while True:
            indices = read_indices(self.place)  # again after damage: the publisher may have removed the file that is missing
            if state is not None and [index.run for index in indices] != [state.run] * len(state.ranks):
                logger.warning(
                    f"{self.place} no longer holds the run '{state.run}' of the tensors. They start again from an anchor."
                )
                state = None
            before: list[PartsByKey] = state.ranks if state else [{} for _ in indices]
            target, ways = self._ways(indices, before, step)
            after = [self._follow(index, way, parts) for index, way, parts in zip(indices, ways, before)]
            ranks = [parts for parts in after if parts is not None]
            if len(ranks) == len(indices):
                break
        payloads = defaultdict(list)
        for file in (self._files[name] for way in ways for stage in way for name in stage.files):
            for key, payload in file.payloads.items():
                payloads[key].append((payload, file.parts[key][1]))
        checksums = {
            key: header.checksum
            for parts, way in zip(before, ways)
            if not any(stage.is_anchor for stage in way)
            for key, (_, header) in parts.items()
        }
        return Plan(State(indices[0].run, target, ranks), _layout(ranks), dict(payloads), checksums)

    def _ways(self, indices: list[Index], ranks: list[PartsByKey], step: int | None) -> tuple[int, list[list[_Stage]]]:
        """Returns the step to go to, the newest that can be reached, and each rank's way to it."""
        steps = common_steps(indices)
        if step is not None and step not in steps:
            there = f"there are {steps[0]} to {steps[-1]}" if steps else "there are none"
            raise CheckpointError(f"Step {step} is not, or no longer, at {self.place}: {there}.")
        digests = [_digest(parts) for parts in ranks]
        for target in reversed(steps) if step is None else [step]:
            shortest = [_way(index.steps, target, digest, self._damaged) for index, digest in zip(indices, digests)]
            ways = [way for way in shortest if way is not None]
            if len(ways) == len(indices):
                return target, ways
        if self._damaged:
            raise CorruptFileError(f"{next(iter(self._damaged.values()))} No other files at {self.place} lead to the step.")
        raise CheckpointError(f"Nothing is published at {self.place} that these tensors could begin with.")

    def _follow(self, index: Index, way: list[_Stage], parts: PartsByKey) -> PartsByKey | None:
        """Opens the files on a rank's way, and returns its parts after them; None if one is damaged."""
        for stage in way:
            before: PartsByKey = {} if stage.is_anchor else parts
            parts = dict(before)
            for name in stage.files:
                file = self._open(name, index, stage, before)
                if file is None:
                    return None
                parts.update(file.parts)
            if _digest(parts) != stage.step.after:
                self._exclude(name, f"{name} at {self.place} does not lead to the weights of step {stage.step.step}.")
                return None
        return parts

    def _open(self, name: str, index: Index, stage: _Stage, before: PartsByKey) -> StepFile | None:
        """Opens and checks a file of a stage, which follows the parts `before`. Returns None if it is damaged or missing."""
        try:
            file = self._files.get(name) or StepFile(self.place.get(name), f"{name} at {self.place}")
        except FileNotFoundError:
            self._exclude(name, f"{name} is missing at {self.place}.")
            return None
        except CorruptFileError as error:
            self._exclude(name, str(error))
            return None
        if fault := _fault(file, index, stage, before):
            self._exclude(name, f"{name} at {self.place} {fault}.")
            return None
        self._files[name] = file
        return file

    def _exclude(self, name: str, message: str) -> None:
        """Avoids a damaged file from now on. Raises CorruptFileError if there are too many."""
        logger.warning(f"{message} Other files take its place.")
        self._damaged[name] = message
        if len(self._damaged) > MOST_DAMAGED:
            raise CorruptFileError(f"{message} More than {MOST_DAMAGED} files at {self.place} are damaged.")


def read_indices(place: Place) -> list[Index]:
    """Returns the indices of all ranks; none if a rank has none yet. Raises CorruptFileError if one is damaged."""
    first = Index.read(place, 0)
    if first is None:
        return []
    indices = [first]
    for rank in range(1, first.world_size):
        index = Index.read(place, rank)
        if index is None or index.run != first.run:
            return []
        indices.append(index)
    return indices


def common_steps(indices: list[Index]) -> list[int]:
    """Returns the steps that all ranks have published, oldest first."""
    if not indices:
        return []
    common = set.intersection(*({(entry.step, entry.attempt) for entry in index.steps} for index in indices))
    return sorted(step for step, _ in common)


def _way(steps: list[Step], target: int, digest: str, damaged: Collection[str]) -> list[_Stage] | None:
    """Returns the way to a step that takes the fewest bytes, from the state of this digest or from an anchor. Returns None if
    none leads there without damaged files."""
    ways: list[list[_Stage]] = []
    chain: list[_Stage] = []  # from the step `entry` to the target
    for entry in reversed([entry for entry in steps if entry.step <= target]):
        if chain and chain[0].step.before != entry.after:
            break  # the step before the chain is not there
        if entry.after == digest:
            ways.append(chain)
        if entry.anchor and entry.anchor.keys().isdisjoint(damaged):
            ways.append([_Stage(entry, True, entry.anchor), *chain])
        if not entry.delta or not entry.delta.keys().isdisjoint(damaged):
            break
        chain = [_Stage(entry, False, entry.delta), *chain]
        if entry.before == digest:
            ways.append(chain)
    return min(ways, key=lambda way: sum(sum(stage.files.values()) for stage in way), default=None)


def _fault(file: StepFile, index: Index, stage: _Stage, before: PartsByKey) -> str | None:
    """Returns why a file cannot be one of a stage, which follows the parts `before`; None if it can."""
    step = stage.step
    if (file.run, file.rank, file.step, file.before, file.after) != (index.run, index.rank, step.step, step.before, step.after):
        return "is not the file of this run and step"
    # Only the payload itself limits the size of a tensor without a base: a stranger cannot make it take memory.
    if stage.is_anchor and any(header.base_values for _, header in file.parts.values()):
        return "does not hold whole weights"
    if not stage.is_anchor and not _kinds(file.parts).items() <= _kinds(before).items():
        return "changes other tensors than those of this run"
    return None


def _kinds(parts: PartsByKey) -> dict[str, tuple[Part, str, tuple[int, ...]]]:
    """Returns what all payloads of a part have in common, by key."""
    return {key: (part, header.dtype, header.shape) for key, (part, header) in parts.items()}


def _digest(parts: PartsByKey) -> str:
    return digest_of((key, header.checksum) for key, (_, header) in parts.items())


def _layout(ranks: Iterable[PartsByKey]) -> dict[str, Parts]:
    """Returns the parts of each tensor in the order of rows. Raises CheckpointError if they do not make up the tensors."""
    layout: dict[str, Parts] = defaultdict(list)
    for rank in ranks:
        for key, (part, header) in rank.items():
            layout[part.name].append((key, part, header))
    for name, parts in layout.items():
        parts.sort(key=lambda entry: entry[1].begin)
        shape, dtype, end = parts[0][1].shape, parts[0][2].dtype, 0
        for _, part, header in parts:
            if (part.begin, part.shape, header.dtype) != (end, shape, dtype):
                raise CheckpointError(f"The ranks of the training do not publish each row of '{name}' once, from row {end} on.")
            end = part.end(header)
        if end != (shape[0] if shape else 1):
            raise CheckpointError(f"No rank of the training publishes the rows of '{name}' from {end} on.")
    return dict(layout)
