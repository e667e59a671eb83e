"""Publishes the weights of a training, step by step, as deltas."""

from __future__ import annotations

import operator
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import numpy as np
import torch
import xxhash

from hf_ext.errors import CheckpointError
from hf_ext.storage.delta.codec import encode_raw
from hf_ext.storage.delta.file import digest_of
from hf_ext.storage.delta.payload import peek_header
from hf_ext.storage.prefetch import Prefetcher, threads_for
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.weight_sync.places import Place, open_place
from hf_ext.weight_sync.rows import NamedTensors, checkpoint_name, local_rows, split
from hf_ext.weight_sync.step_file import Index, Part, Step, file_name, index_name, write_file

FILE = 1 << 30  # bytes of payloads in a file, beyond which another one begins
LEVEL = 1  # of compression: the change of a step has no low-rank part worth looking for


class Publisher:
    """Writes each step of a training to a place, as its lossless difference from the step published before.

    `publish` returns when the tensors are copied. A thread encodes and writes them. The publisher needs memory for two
    copies of the weights in the published type, and for the encoded changes.

    Args:
        place: a folder; `hf://owner/name` (a Hub repository) or `hf://buckets/owner/name`; or an object with the methods of
            `Place`.
        anchor_every: number of steps from one anchor to the next. An anchor has all weights, so a subscriber can start there.
        keep_anchors: number of anchors to keep at the place, with all steps since the oldest of them. Older files are removed.
        dtype: type that floats are rounded to, such as torch.bfloat16 for a training in float32. None keeps the tensors' types.
        transform: function that gets copies of the tensors by name, rounded, on their devices. It returns the tensors to
            publish: those that servers hold, such as quantized weights and their scales. `publish` waits for it. It requires
            whole tensors.
        run: name of the training. Required if several ranks publish, and the same for all of them. Random by default.
        resume: continue the run at the place, if there is one. The first step is then an anchor. Several ranks resume together,
            under torch.distributed.
        rank, world_size: of this publisher, if each publishes a share of the weights: sharded tensors (DTensor), `Rows`, or
            whole tensors that no other rank publishes.

    Raises:
        CheckpointError: the place has steps and `resume` is not set, or has steps of another run.
        CorruptFileError: the index there is damaged.
    """

    def __init__(
        self,
        place: str | os.PathLike | Place,
        *,
        anchor_every: int = 50,
        keep_anchors: int = 2,
        dtype: torch.dtype | None = None,
        transform: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None,
        run: str | None = None,
        resume: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ):
        if min(operator.index(anchor_every), operator.index(keep_anchors)) < 1:
            raise ValueError("anchor_every and keep_anchors must be 1 or more")
        if not 0 <= operator.index(rank) < operator.index(world_size):
            raise ValueError(f"rank {rank} is not one of {world_size}, which are numbered from 0")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a float type, such as torch.bfloat16, not {dtype!r}")
        if world_size > 1 and run is None:
            raise ValueError("several ranks that publish need the name of their run: Publisher(…, run='name')")
        if world_size > 1 and transform is not None:
            raise ValueError("transform requires whole tensors, but several ranks publish shares of them")
        self.place = open_place(place)
        self.anchor_every, self.keep_anchors, self.dtype, self.world_size = anchor_every, keep_anchors, dtype, world_size
        self.transform = transform
        previous = Index.read(self.place, rank)
        if previous is not None and not resume:
            raise CheckpointError(
                f"{self.place} holds the steps of another training ('{previous.run}'). Give an empty place, or continue that "
                "training with resume=True."
            )
        if previous is not None and (run or previous.run, world_size) != (previous.run, previous.world_size):
            raise CheckpointError(
                f"{self.place} holds the steps of run '{previous.run}', published by {previous.world_size} ranks. Give another "
                "place."
            )
        run = previous.run if previous else run or uuid.uuid4().hex[:8]
        self._attempt = _common(uuid.uuid4().hex, world_size) if resume else ""
        self._index = Index(run, rank, world_size, uuid.uuid4().hex, previous.steps if previous else [])
        self._session = previous and previous.session  # of the index at the place, unless another publisher writes there
        self._parts: dict[str, Part] = {}
        self._current: dict[str, torch.Tensor] = {}  # the parts as last published
        self._spare: dict[str, torch.Tensor] = {}  # memory for the next step
        self._checksums: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(1, "publisher")
        self._running: Future[None] | None = None
        self._lock = threading.RLock()  # two threads at once would copy into the same memory

    def publish(self, named_tensors: NamedTensors, step: int) -> None:
        """Copies the tensors, from any device, and publishes them in the background as the weights of this step.

        First waits for the previous step. If that step could not be written, raises its error; the next call then publishes the
        difference from the last step that was written.

        Args:
            named_tensors: all weights, with the names and shapes of the checkpoint. They must be the same in each step.
                Names may contain the `_orig_mod.` of `torch.compile`, which is left out.
            step: number of the step, 0 or more, and larger than that of the previous step.

        Raises:
            CheckpointError: names, types or shapes differ from those of the step before, or another publisher writes to the
                place.
            OSError: the previous step could not be written.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step must be 0 or more, not {step}")
        with self._lock:
            self.wait()
            if self._has_base and step <= self._index.steps[-1].step:
                raise ValueError(f"step {step} does not follow step {self._index.steps[-1].step}, which was published before")
            with torch.inference_mode(False):  # such tensors could not be changed outside of the mode later
                weights, parts = self._copy(self._transformed(named_tensors))
            self._running = self._pool.submit(self._write, weights, parts, step)

    def wait(self) -> None:
        """Waits until the last step is written to the place. Raises the error if it could not be written."""
        with self._lock:
            running, self._running = self._running, None
            if running is not None:
                running.result()

    def close(self) -> None:
        """Waits as `wait` does, and ends the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def last_step(self) -> int | None:
        """The last step that this object has written to the place."""
        return self._index.steps[-1].step if self._has_base else None

    @property
    def next_step(self) -> int:
        """The number after the last step at the place, which may be that of a run that this object continues; 0 if none."""
        return self._index.steps[-1].step + 1 if self._index.steps else 0

    @property
    def _has_base(self) -> bool:
        """True if this object holds the weights of the last step, so that the next one can be a delta."""
        return self._session == self._index.session

    def _transformed(self, named_tensors: NamedTensors) -> NamedTensors:
        """Returns the tensors that servers hold."""
        if self.transform is None:
            return named_tensors
        with torch.no_grad():
            whole = {name: local_rows(name, tensor).tensor.detach() for name, tensor in dict(named_tensors).items()}
            copies = {checkpoint_name(name): tensor.to(self._dtype(tensor), copy=True) for name, tensor in whole.items()}
            return self.transform(copies)

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Returns the type that a tensor is rounded to."""
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _copy(self, named_tensors: NamedTensors) -> tuple[dict[str, torch.Tensor], dict[str, Part]]:
        """Returns copies of all parts in this machine's memory, and what they are parts of."""
        copies: dict[str, torch.Tensor] = {}
        parts: dict[str, Part] = {}
        copying: set[torch.device] = set()
        for parameter, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
            name = checkpoint_name(parameter)
            for key, part, rows in split(name, local_rows(name, tensor)):
                if key in parts or key == "__metadata__":  # which safetensors reserves
                    raise CheckpointError(f"'{key}' is given twice, or is no name for a tensor.")
                dtype = rows.dtype if self.transform else self._dtype(rows)
                if self._has_base and (self._parts.get(key) != part or self._current[key].dtype != dtype):
                    raise _other_tensors(key)
                copy = self._spare.get(key)
                if copy is None:
                    copy = torch.empty(rows.shape, dtype=dtype, pin_memory=rows.is_cuda)
                copies[key], parts[key] = copy.copy_(rows.detach(), non_blocking=rows.is_cuda), part
                copying |= {rows.device} if rows.is_cuda else set()
        if missing := self._parts.keys() - parts.keys():
            raise _other_tensors(min(missing))
        for device in copying:
            torch.cuda.synchronize(device)
        return copies, parts

    def _write(self, weights: dict[str, torch.Tensor], parts: dict[str, Part], step: int) -> None:
        """Writes the files of a step, then the index, and makes the weights the base of the next step."""
        index_at_place = Index.read(self.place, self._index.rank)
        # The first index of this object may be there although `put` failed: the answer was lost, or a removal failed.
        if (index_at_place and index_at_place.session) not in (self._session, self._index.session):
            raise CheckpointError(f"Another publisher writes to {self.place}, so step {step} was not published. End one.")
        tensors = {key: RawTensor.from_torch(weight) for key, weight in weights.items()}
        bases = {key: RawTensor.from_torch(weight) for key, weight in self._current.items()}
        before, changed = None, {}
        if self._has_base:
            before, changed = self._index.steps[-1].after, dict(_encoded(tensors, bases))
            checksums = self._checksums | {key: peek_header(memoryview(payload)).checksum for key, payload in changed.items()}
        else:
            checksums = {key: xxhash.xxh3_64_intdigest(tensor.data) for key, tensor in tensors.items()}
        entry = Step(step, before, digest_of(checksums.items()), self._attempt)
        files_at_place = _files(index_at_place.steps) if index_at_place else set()
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
                waiting[name] = write_file(self._index, entry, share, parts)
                yield name, len(waiting[name])

        if self._has_base:
            entry.delta |= add("step", changed.items())
        if is_anchor or not self._has_base:
            entry.anchor |= add("anchor", _encoded(tensors, {}))
        steps.append(entry)
        anchors = [place for place, earlier in enumerate(steps) if earlier.anchor]
        steps = steps[anchors[max(len(anchors) - self.keep_anchors, 0)] :]
        index = replace(self._index, steps=steps)
        waiting[index_name(index.rank)] = index.to_bytes()
        self.place.put(waiting, remove=sorted(files_at_place - _files(steps)))
        self._index, self._session, self._parts, self._checksums = index, index.session, parts, checksums
        self._current, self._spare = weights, self._current


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
        if base is not None and _equal(tensor.data, base.data):
            return None
        return encode_raw(tensor, base, key, "" if base is None else key, threads_for(tensor.data.size), LEVEL)

    for key, payload in Prefetcher(encode, {key: tensor.data.size for key, tensor in tensors.items()}):
        if payload is not None:
            yield key, payload


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    words = np.uint8 if one.size % 8 else np.uint64
    return np.array_equal(one.view(words), other.view(words))


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


def _other_tensors(key: str) -> CheckpointError:
    return CheckpointError(
        f"'{key}' is new, missing, or of another type or shape than in the step before. A run keeps its tensors; publish "
        "others to another place."
    )
