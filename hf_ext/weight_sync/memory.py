"""The memory in which a receiver keeps the parts of published tensors: its own tensors, or copies of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from hf_ext.errors import CheckpointError
from hf_ext.storage.delta.codec import decode_raw
from hf_ext.storage.delta.in_place import apply_raw
from hf_ext.storage.delta.payload import Header
from hf_ext.storage.safetensors_file import RawTensor, has_values, torch_dtype
from hf_ext.weight_sync.plan import Parts

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Home(NamedTuple):
    """The place of a part in memory."""

    part: torch.Tensor  # its rows in this machine's memory, contiguous
    elsewhere: torch.Tensor | None = None  # the rows that the caller keeps, if they are not the part itself
    is_new: bool = False  # the caller's rows are not those before the update

    def apply(self, chain: Iterable[tuple[np.ndarray, Header]]) -> np.ndarray | None:
        """Changes the part by payloads, one after the other. Returns the rows that changed, None for all."""
        memory = RawTensor.from_torch(self.part).data
        changed: list[np.ndarray] | None = []
        for payload, header in chain:
            if header.base_values:
                rows = apply_raw(payload, RawTensor(header.dtype, header.shape, memory), header)
                if changed is not None:
                    changed.append(rows)
            else:
                data = decode_raw(payload, header=header, out=memory).data
                if data is not memory:
                    memory[:] = data
                changed = None
        return None if changed is None else np.unique(np.concatenate([np.empty(0, np.int64), *changed]))

    def copy(self, changed: np.ndarray | None) -> None:
        """Copies the rows that changed to where the caller keeps them."""
        if self.elsewhere is None:
            return
        with torch.inference_mode():  # in which inference tensors may change, too
            if changed is None or self.is_new or 2 * len(changed) > len(self.part):
                self.elsewhere.copy_(self.part)
                return
            rows, device = torch.from_numpy(changed), self.elsewhere.device
            word = WORDS[self.part.element_size()]  # PyTorch cannot assign rows of every type
            self.elsewhere.view(word)[rows.to(device)] = self.part.view(word)[rows].to(device)


class KeptTensor(NamedTuple):
    """A tensor of the caller, as the last `update` left it."""

    tensor: weakref.ref[torch.Tensor]
    address: int
    version: int  # PyTorch counts what changes a tensor, except for inference tensors

    @classmethod
    def of(cls, tensor: torch.Tensor) -> KeptTensor:
        return cls(weakref.ref(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else getattr(tensor, "_version", 0))

    def is_still(self, tensor: torch.Tensor) -> bool:
        return self.tensor() is tensor and self[1:] == self.of(tensor)[1:]


def rows_of(name: str, tensor: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Returns the rows of a caller's tensor, a scalar as one row. Checks that it can hold the published tensor."""
    is_lazy = not has_values(tensor) or tensor.is_conj() or tensor.is_neg()
    if is_lazy or any(length > 1 and step == 0 for length, step in zip(tensor.shape, tensor.stride())):
        raise CheckpointError(
            f"'{name}' has no memory for each of its values: it must not be sparse, nested, on the device meta, or an "
            "expanded, conjugate or negative view."
        )
    _, part, header = parts[0]
    dtype = torch_dtype(header.dtype)
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, part.shape):
        raise CheckpointError(
            f"'{name}', which is published as {dtype} {list(part.shape)}, is {tensor.dtype} {list(tensor.shape)} here. Load "
            "the model in the published type, or publish in this one: dtype=…, where the training publishes."
        )
    return torch.atleast_1d(tensor.detach())
