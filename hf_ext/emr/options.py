"""The options of a merge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hf_ext.display import bytes_of
from hf_ext.errors import CheckpointError

METHODS = CODED, ELECTED = "switch", "emr"
RESCALE = ("tensor", "paper", "tensor_mean")
BITS = 0.25  # per parameter and task, by default
LEAST_BITS = 0.001  # per parameter and task


@dataclass(frozen=True)
class MergeOptions:
    """The options of `merge` and `add_task`, checked: raises CheckpointError if one is invalid. `bits` is the size of each new
    task if the tasks are coded and `size` is None. `size` is the bytes that the folder may take; it also accepts a text such as
    "50MB"."""

    rescale: str = RESCALE[0]
    max_shard_size: int | str = "50GB"
    overwrite: bool = False
    accept_conflicts: bool = False
    method: str = CODED
    bits: float | None = None
    size: Any = None  # an int or None, once checked

    def __post_init__(self) -> None:
        for name, value, values in (("method", self.method, METHODS), ("rescale", self.rescale, RESCALE)):
            if value not in values:
                raise CheckpointError(f"{name}={value!r} is not supported; choose one of: {', '.join(values)}.")
        bits, size = self.bits, self.size
        given = [name for name, value in (("bits", bits), ("size", size)) if value is not None]
        if given and not self.is_coded:
            raise CheckpointError(f"Only the method {CODED!r} takes {' and '.join(given)}. Choose it, or leave them out.")
        if self.is_coded and self.rescale != RESCALE[0]:
            raise CheckpointError(f"Only the method {ELECTED!r} takes rescale. Choose it, or leave rescale out.")
        if len(given) > 1:
            raise CheckpointError("bits and size are given; give one of them.")
        if bits is not None and not (isinstance(bits, Real) and not isinstance(bits, bool) and LEAST_BITS <= bits <= 64):
            raise CheckpointError(f"bits={bits!r} is out of range; give a number from {LEAST_BITS} to 64.")
        limit = None if size is None else bytes_of(size)
        if size is not None and (limit is None or limit == math.inf):
            raise CheckpointError(f"size={size!r} is not a size; give a number of bytes, such as '50MB'.")
        if limit is not None:
            object.__setattr__(self, "size", int(limit))
        elif self.is_coded:
            object.__setattr__(self, "bits", float(bits or BITS))

    @property
    def is_coded(self) -> bool:
        return self.method == CODED
