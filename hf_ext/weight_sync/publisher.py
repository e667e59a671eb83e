"""Publishes the weights of a training, step by step, as deltas."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from hf_ext.errors import CheckpointError
from hf_ext.weight_sync.places import Place, open_place
from hf_ext.weight_sync.rows import NamedTensors, Weights, checkpoint_name, local_rows, split
from hf_ext.weight_sync.sglang_layout import VersionWriter
from hf_ext.weight_sync.step_writer import StepWriter


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
        layout: "hf_ext", or "sglang", which SGLang's `/pull_weights` reads: a folder `weight_vNNNNNN` for each step, whose
            tensors are zstd frames of the XOR. It requires a folder as place, whole tensors, and `zstandard`.
        base: for layout="sglang", the model's folder that the servers start with, in the published type.
        run: name of the training. Required if several ranks publish, and the same for all of them. Random by default.
        resume: continue the run at the place, if there is one. The first step is then an anchor, unless layout="sglang".
            Several ranks resume together, under torch.distributed.
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
        layout: Literal["hf_ext", "sglang"] = "hf_ext",
        base: str | os.PathLike | None = None,
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
        if layout not in ("hf_ext", "sglang") or (layout == "sglang") != (base is not None):
            raise ValueError(
                'layout is "hf_ext", or "sglang" together with base, the folder of the model that servers start with'
            )
        if layout == "sglang" and world_size > 1:
            raise ValueError('layout="sglang" requires whole tensors; gather them: tensor.full_tensor()')
        self.place, self.dtype, self.transform, self.world_size = open_place(place), dtype, transform, world_size
        self._writer: StepWriter | VersionWriter
        self._current: Weights | None  # as last published; None if the next step cannot be a difference from them
        if base is not None:
            self._writer = VersionWriter(self.place, Path(base), anchor_every, keep_anchors, resume)
            self._current = self._writer.start
        else:
            self._writer = StepWriter(self.place, anchor_every, keep_anchors, run, resume, rank, world_size)
            self._current = None
        self._last: int | None = None
        self._spare: dict[str, torch.Tensor] = {}  # memory for the next step
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
            if self._last is not None and step <= self._last:
                raise ValueError(f"step {step} does not follow step {self._last}, which was published before")
            with torch.inference_mode(False):  # such tensors could not be changed outside of the mode later
                weights = self._copy(self._transformed(named_tensors))
            self._running = self._pool.submit(self._write, weights, step)

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
        return self._last

    @property
    def next_step(self) -> int:
        """The number after the last step at the place, which may be that of a run that this object continues; 0 if none."""
        return self._writer.next_step

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

    def _copy(self, named_tensors: NamedTensors) -> Weights:
        """Returns copies of all parts in this machine's memory."""
        copies, before = Weights({}, {}), self._current
        copying: set[torch.device] = set()
        for parameter, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
            name = checkpoint_name(parameter)
            for key, part, rows in split(name, local_rows(name, tensor)):
                if key in copies.parts or key == "__metadata__":  # which safetensors reserves
                    raise CheckpointError(f"'{key}' is given twice, or is no name for a tensor.")
                dtype = rows.dtype if self.transform else self._dtype(rows)
                if before and (before.parts.get(key) != part or before.tensors[key].dtype != dtype):
                    raise _other_tensors(key)
                copy = self._spare.get(key)
                if copy is None:
                    copy = torch.empty(rows.shape, dtype=dtype, pin_memory=rows.is_cuda)
                copies.tensors[key] = copy.copy_(rows.detach(), non_blocking=rows.is_cuda)
                copies.parts[key] = part
                copying |= {rows.device} if rows.is_cuda else set()
        if before and (missing := before.parts.keys() - copies.parts.keys()):
            raise _other_tensors(min(missing))
        for device in copying:
            torch.cuda.synchronize(device)
        return copies

    def _write(self, weights: Weights, step: int) -> None:
        """Writes a step, and makes its weights the base of the next one."""
        self._writer.write(weights, self._current, step)
        self._spare = self._current.tensors if self._current else {}
        self._current, self._last = weights, step


def _other_tensors(key: str) -> CheckpointError:
    return CheckpointError(
        f"'{key}' is new, missing, or of another type or shape than in the step before. A run keeps its tensors; publish "
        "others to another place."
    )
