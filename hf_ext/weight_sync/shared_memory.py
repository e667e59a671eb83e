"""Tensors in memory that several processes of a Linux machine share. It has no name: nothing is left of a killed process."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

Kind = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: type and shape

ALIGNMENT = 64  # of each tensor, in bytes


def machine() -> tuple[str, int] | None:
    """Returns an identity that two processes have in common if they can share memory. Returns None if this system cannot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


class Share(NamedTuple):
    """The place of shared tensors, for other processes of the machine."""

    path: str
    size: int
    kinds: Mapping[str, Kind]

    def open(self) -> dict[str, torch.Tensor]:
        """Maps the tensors, with the values that they have now. Writing to them does not change the shared memory."""
        return self.map(shared=False)

    def map(self, shared: bool) -> dict[str, torch.Tensor]:
        memory, begin, tensors = torch.from_file(self.path, shared, self.size, dtype=torch.uint8), 0, {}
        for name, (dtype, shape) in self.kinds.items():
            size = math.prod(shape) * dtype.itemsize
            tensors[name] = memory[begin : begin + size].view(dtype).reshape(shape)
            begin += aligned(size)
        return tensors


class SharedTensors:
    """Tensors in one block of memory, allocated as `Subscriber` asks for it. `share` lets other processes map them."""

    share: Share
    _file: BinaryIO  # other processes map the memory by its descriptor

    def allocate(self, kinds: Mapping[str, Kind]) -> dict[str, torch.Tensor]:
        """Returns new tensors. Memory is taken only for what is written there."""
        self._file = os.fdopen(os.memfd_create("hf_ext"), "r+b")
        size = sum(aligned(math.prod(shape) * dtype.itemsize) for dtype, shape in kinds.values())
        self.share = Share(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", size, dict(kinds))
        return self.share.map(shared=True)


def aligned(size: int) -> int:
    """Returns the bytes from one tensor to the next: at least one more than its size, so that no two begin at one address."""
    return (size // ALIGNMENT + 1) * ALIGNMENT
