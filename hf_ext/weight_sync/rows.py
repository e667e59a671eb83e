"""The rows of tensors that a publisher publishes, in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from hf_ext.errors import CheckpointError
from hf_ext.storage.safetensors_file import has_values
from hf_ext.weight_sync.step_file import PART, Part


class Rows(NamedTuple):
    """A range of rows of a tensor that is sharded over several publishers.

    Attributes:
        tensor: the rows.
        begin: index of the first row in the whole tensor.
        shape: shape of the whole tensor.
    """

    tensor: torch.Tensor
    begin: int
    shape: tuple[int, ...]


class Weights(NamedTuple):
    """The parts of all weights in this machine's memory, by key, and what they are parts of."""

    tensors: dict[str, torch.Tensor]
    parts: dict[str, Part]


NamedTensors = Mapping[str, torch.Tensor | Rows] | Iterable[tuple[str, torch.Tensor | Rows]]


def checkpoint_name(name: str) -> str:
    """Returns the name in a checkpoint of a parameter, which differs if `torch.compile` wraps the model or a layer of it."""
    return name.replace("_orig_mod.", "")


def local_rows(name: str, tensor: torch.Tensor | Rows) -> Rows:
    """Returns the rows of a tensor that this rank publishes, which are checked."""
    local = tensor.tensor if isinstance(tensor, Rows) else tensor
    if not has_values(local):
        raise CheckpointError(
            f"'{name}' cannot be published: it must be a dense tensor with values, not sparse, nested, quantized or on the "
            "device meta."
        )
    if not isinstance(tensor, Rows):
        return _shard(tensor)
    begin, shape = tensor.begin, tuple(tensor.shape)
    end = begin + len(torch.atleast_1d(local))
    if (local.dim(), local.shape[1:]) != (len(shape), shape[1:]) or not 0 <= begin <= end <= (*shape, 1)[0]:
        raise CheckpointError(f"'{name}' of shape {list(shape)} has no rows {begin} to {end} of shape {list(local.shape)}.")
    return tensor


def _shard(tensor: torch.Tensor) -> Rows:
    """Returns the rows of a tensor that this rank publishes: of a sharded one its own, unless another rank that comes first
    has the same."""
    shape = tuple(tensor.shape)
    if not torch.distributed.is_available():
        return Rows(tensor, 0, shape)
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return Rows(tensor, 0, shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    if not all(placement.is_replicate() or placement.is_shard(0) for placement in placements):
        raise CheckpointError(
            f"Tensors sharded as {placements} cannot be published; only shards of rows can. Gather them: tensor.full_tensor()."
        )
    local = tensor.to_local()
    coordinates = mesh.get_coordinate() or [1] * mesh.ndim  # None: this rank is not part of the mesh
    if any(placement.is_replicate() and place for placement, place in zip(placements, coordinates)):
        return Rows(local.new_empty(0, *shape[1:]), 0, shape)
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place_of_shard
    except ImportError as error:
        raise CheckpointError(
            f"The place of a shard cannot be found with PyTorch {torch.__version__}. Gather the tensors: tensor.full_tensor()."
        ) from error
    offset = place_of_shard(tensor.shape, mesh, placements)[1]
    return Rows(local, offset[0] if offset else 0, shape)


def split(name: str, rows: Rows) -> Iterator[tuple[str, Part, torch.Tensor]]:
    """Yields the parts of a tensor with their keys."""
    tensor, begin, shape = rows
    if tuple(tensor.shape) == shape and tensor.numel() <= PART:
        yield name, Part(name, 0, shape), tensor
        return
    at_once = max(PART * len(tensor) // max(tensor.numel(), 1), 1)
    for first in range(0, len(tensor), at_once):
        part = tensor[first : first + at_once]
        yield f"{name}[{begin + first}:{begin + first + len(part)}]", Part(name, begin + first, shape), part


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Checks whether the bytes of two tensors are equal."""
    words = np.uint8 if one.size % 8 else np.uint64
    return np.array_equal(one.view(words), other.view(words))
