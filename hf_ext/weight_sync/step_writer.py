"""Writes the steps of a run to a place, in this package's own layout (see step_file.py)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count

import xxhash

from hf_ext.errors import CheckpointError
from hf_ext.storage.delta.codec import encode_raw
from hf_ext.storage.delta.file import digest_of
from hf_ext.storage.delta.payload import peek_header
from hf_ext.storage.prefetch import Prefetcher, threads_for
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.weight_sync.places import Place
from hf_ext.weight_sync.rows import Weights, equal
from hf_ext.weight_sync.step_file import Index, Step, file_name, index_name, write_file

FILE = 1 << 30  # bytes of payloads in a file, beyond which another one begins
LEVEL = 1  # of compression: the change of a step has no low-rank part worth looking for


class StepWriter:
    """Writes deltas and anchors, and the index that lists them. The arguments are those of `Publisher`.

    It takes the place at once, with an index of its own, so that a second publisher is refused before it has trained."""

    def __init__(
        self, place: Place, anchor_every: int, keep_anchors: int, run: str | None, resume: bool, rank: int, world_size: int
    ):
        self.place, self.anchor_every, self.keep_anchors = place, anchor_every, keep_anchors
        previous = Index.read(place, rank)
        if previous is not None and not resume:
            raise CheckpointError(
                f"{place} holds the steps of another training ('{previous.run}'). Give an empty place, or continue that "
                "training with resume=True."
            )
        if previous is not None and (run or previous.run, world_size) != (previous.run, previous.world_size):
            raise CheckpointError(
                f"{place} holds the steps of run '{previous.run}', published by {previous.world_size} ranks. Give another "
                "place."
            )
        run = previous.run if previous else run or uuid.uuid4().hex[:8]
        self._attempt = _common(uuid.uuid4().hex, world_size) if resume else ""
        self._index = Index(run, rank, world_size, uuid.uuid4().hex, previous.steps if previous else [])
        self._checksums: dict[str, int] = {}
        place.put({index_name(rank): self._index.to_bytes()})

    @property
    def next_step(self) -> int:
        """The number after the last step at the place; 0 if there is none."""
        return self._index.steps[-1].step + 1 if self._index.steps else 0

    def write(self, weights: Weights, before: Weights | None, step: int) -> None:
        """Writes the files of a step, as the difference from the weights `before`, if there are any; then the index."""
        index_at_place = Index.read(self.place, self._index.rank)
        if index_at_place is None or index_at_place.session != self._index.session:
            raise CheckpointError(f"Another publisher writes to {self.place}, so step {step} was not published. End one.")
        tensors = {key: RawTensor.from_torch(weight) for key, weight in weights.tensors.items()}
        bases = {key: RawTensor.from_torch(weight) for key, weight in before.tensors.items()} if before else {}
        digest_before, changed = None, {}
        if before:
            digest_before, changed = self._index.steps[-1].after, dict(_encoded(tensors, bases))
            checksums = self._checksums | {key: peek_header(memoryview(payload)).checksum for key, payload in changed.items()}
        else:
            checksums = {key: xxhash.xxh3_64_intdigest(tensor.data) for key, tensor in tensors.items()}
        entry = Step(step, digest_before, digest_of(checksums.items()), self._attempt)
        files_at_place = _files(index_at_place.steps)
        # A training that was resumed comes again to steps that had been published.
        steps = [earlier for earlier in self._index.steps if earlier.step < step]
        is_anchor = not any(earlier.anchor for earlier in steps[max(len(steps) - self.anchor_every + 1, 0) :])
        waiting: dict[str, bytes] = {}

        def add(kind: str, payloads: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, int]]:
            # Under names that the index does not have: until it is replaced, its files stay as they are.
            names = (file_name(kind, step, self._index.rank, number) for number in count())
            for name, share in zip((name for name in names if name not in files_at_place), _shares(payloads)):
                if sum(map(len, waiting.values())) > FILE:
                    self.place.put(waiting)
                    waiting.clear()
                waiting[name] = write_file(self._index, entry, share, weights.parts)
                yield name, len(waiting[name])

        if before:
            entry.delta |= add("step", changed.items())
        if is_anchor or not before:
            entry.anchor |= add("anchor", _encoded(tensors, {}))
        steps.append(entry)
        anchors = [place for place, earlier in enumerate(steps) if earlier.anchor]
        steps = steps[anchors[max(len(anchors) - self.keep_anchors, 0)] :]
        index = replace(self._index, steps=steps)
        waiting[index_name(index.rank)] = index.to_bytes()
        self.place.put(waiting, remove=sorted(files_at_place - _files(steps)))
        self._index, self._checksums = index, checksums


def _common(text: str, world_size: int) -> str:
    """Returns the text that the first of several ranks has."""
    if world_size == 1:
        return text
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() == world_size):
        raise ValueError("several ranks can only resume together, as the ranks of torch.distributed")
    texts = [text]
    distributed.broadcast_object_list(texts, src=0)
    return texts[0]


def _encoded(tensors: Mapping[str, RawTensor], bases: Mapping[str, RawTensor]) -> Iterator[tuple[str, bytes]]:
    """Yields the payloads of the tensors that differ from their bases."""

    def encode(key: str) -> bytes | None:
        tensor, base = tensors[key], bases.get(key)
        if base is not None and equal(tensor.data, base.data):
            return None
        return encode_raw(tensor, base, key, "" if base is None else key, threads_for(tensor.data.size), LEVEL)

    for key, payload in Prefetcher(encode, {key: tensor.data.size for key, tensor in tensors.items()}):
        if payload is not None:
            yield key, payload


def _shares(payloads: Iterable[tuple[str, bytes]]) -> Iterator[dict[str, bytes]]:
    """Yields the payloads in groups of up to FILE bytes; at least one group."""
    share: dict[str, bytes] = {}
    size = 0
    for key, payload in payloads:
        if share and size + len(payload) > FILE:
            yield share
            share, size = {}, 0
        share[key] = payload
        size += len(payload)
    yield share


def _files(steps: Iterable[Step]) -> set[str]:
    return {name for step in steps for name in (*step.delta, *step.anchor)}
