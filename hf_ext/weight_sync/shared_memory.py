"""Tensors in memory that several processes of a Linux machine share. It has no name: nothing is left of a killed process."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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
    kinds: Mapping[str, Kind]

    def open(self, shared: bool = False) -> dict[str, torch.Tensor]:
        """Maps the tensors, with the values that they have now. Unless `shared`, writing to them does not change the memory."""
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in self.kinds.values()]
        spaces = [(size // ALIGNMENT + 1) * ALIGNMENT for size in sizes]  # never 0: no two tensors begin at one address
        parts = torch.from_file(self.path, shared, sum(spaces), dtype=torch.uint8).split(spaces)
        kinds = zip(self.kinds.items(), parts, sizes)
        return {name: part[:size].view(dtype).reshape(shape) for (name, (dtype, shape)), part, size in kinds}


class SharedTensors:
    """Tensors in one block of memory, allocated as `Subscriber` asks for it. `share` lets other processes map them."""

    share: Share

    def allocate(self, kinds: Mapping[str, Kind]) -> dict[str, torch.Tensor]:
        """Returns new tensors. Memory is taken only for what is written there."""
        self._file = os.fdopen(os.memfd_create("hf_ext"), "r+b")  # open as long as others may map it
        self.share = Share(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", kinds)
        return self.share.open(shared=True)
