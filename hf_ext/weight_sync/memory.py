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


class Piece(NamedTuple):
    """The place where a receiver keeps rows `begin` to `end` (by default all) of a published tensor: in its tensor `tensor`,
    from row `at` on. That tensor may contain several published ones, such as a fused projection."""

    tensor: str
    at: int = 0
    begin: int = 0
    end: int | None = None


class Home(NamedTuple):
    """The place of a part in memory."""

    part: torch.Tensor  # its rows in this machine's memory, contiguous
    elsewhere: torch.Tensor | None = None  # the rows that the caller keeps, if they are not the part itself
    skipped: int = 0  # number of rows of the part before them
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
        rows = self.part[self.skipped : self.skipped + len(self.elsewhere)]
        with torch.inference_mode():  # in which inference tensors may change, too
            if changed is None or self.is_new or 2 * len(changed) > len(self.part):
                self.elsewhere.copy_(rows)
                return
            changed = changed - self.skipped
            places = torch.from_numpy(changed[(changed >= 0) & (changed < len(rows))])
            word, device = WORDS[rows.element_size()], self.elsewhere.device  # PyTorch cannot assign rows of every type
            self.elsewhere.view(word)[places.to(device)] = rows.view(word)[places].to(device)


class KeptTensor(NamedTuple):
    """A tensor of the caller that holds a published one, as the last `update` left it."""

    tensor: weakref.ref[torch.Tensor]
    piece: Piece
    address: int
    version: int  # PyTorch counts what changes a tensor, except for inference tensors

    @classmethod
    def of(cls, tensor: torch.Tensor, piece: Piece) -> KeptTensor:
        return cls(
            weakref.ref(tensor), piece, tensor.data_ptr(), 0 if tensor.is_inference() else getattr(tensor, "_version", 0)
        )

    def is_still(self, tensor: torch.Tensor, piece: Piece) -> bool:
        return self.tensor() is tensor and self[1:] == self.of(tensor, piece)[1:]


def rows_of(tensor: torch.Tensor, piece: Piece, parts: Parts, is_whole: bool) -> torch.Tensor:
    """Returns the rows of a caller's tensor that hold a piece of a published one; `is_whole`: it holds nothing else."""
    is_lazy = not has_values(tensor) or tensor.is_conj() or tensor.is_neg()
    if is_lazy or any(length > 1 and step == 0 for length, step in zip(tensor.shape, tensor.stride())):
        raise CheckpointError(
            f"'{piece.tensor}' has no memory for each of its values: it must not be sparse, nested, on the device meta, or an "
            "expanded, conjugate or negative view."
        )
    _, part, header = parts[0]
    dtype, (count, *row) = torch_dtype(header.dtype), part.shape or (1,)
    end = count if piece.end is None else piece.end
    rows = torch.atleast_1d(tensor.detach())[piece.at : piece.at + end - piece.begin]
    fits = tuple(rows.shape) == (end - piece.begin, *row) and 0 <= piece.begin <= end <= count
    if tensor.dtype != dtype or not fits or is_whole and tuple(tensor.shape) != part.shape:
        raise CheckpointError(
            f"Rows {piece.begin} to {end} of '{part.name}', which is {dtype} {list(part.shape)}, do not fit into "
            f"'{piece.tensor}' at row {piece.at}: it is {tensor.dtype} {list(tensor.shape)}."
        )
    return rows
