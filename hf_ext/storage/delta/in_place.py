"""Applies a payload in place: turns the base's tensor into the encoded one, and back on an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import xxhash

from hf_ext.errors import BaseModelError
from hf_ext.storage.delta.byte_values import changed_bytes
from hf_ext.storage.delta.codec import decode_body
from hf_ext.storage.delta.payload import BYTEWISE, CODED, STACKED, Header, matrix_of, read_header, read_matrices, row_length
from hf_ext.storage.native import FLOATS, WIDTHS, _native
from hf_ext.storage.safetensors_file import ITEMSIZE, RawTensor


def apply_raw(payload: np.ndarray | bytes, tensor: RawTensor, header: Header | None = None, threads: int = 1) -> np.ndarray:
    """Turns the base's tensor into the one that was compressed against it, in place. On an error, the tensor is unchanged.

    Where few values changed, writes only these, which takes 6 bytes of memory for each. Otherwise decodes the new tensor beside
    the old one.

    Args:
        payload, header, threads: as for `decode_raw`.
        tensor: the base's tensor, of the same type and shape as the compressed one. Its data must be writable.

    Returns:
        The rows that changed: indices of the first dimension (int64), in increasing order.

    Raises:
        CorruptFileError, BaseModelError: as `decode_raw`; also if the two tensors differ in type or shape.
        CheckpointError: the tensor's bytes do not fit its type and shape, or cannot be written.
    """
    header = header or read_header(payload)
    tensor.require_bytes(header.base_name, writable=True)
    if (header.dtype, header.shape) != (tensor.dtype, tensor.shape) or header.base_values not in (0, header.values):
        raise BaseModelError(
            f"Tensor '{header.name}' is {header.dtype} {list(header.shape)} and cannot take the place of one that is "
            f"{tensor.dtype} {list(tensor.shape)}."
        )
    if header.base_values:
        header.require_base(tensor.dtype, tensor.shape)
    body = np.frombuffer(payload, np.uint8)
    if header.mode != STACKED:
        return _apply(body[header.body :], header, tensor, threads)[0]
    changed, undo = [], []
    try:
        for i, (matrix, part) in enumerate(read_matrices(body, header)):
            rows, restore = _apply(part, matrix, matrix_of(tensor, matrix.shape, i), threads)
            undo.append(restore)
            changed += [i] if len(rows) else []
    except BaseException:  # Ctrl-C included
        for restore in undo:
            restore()
        raise
    return np.unique(np.array(changed, np.int64) // math.prod(header.shape[1:-2]))


def _apply(body: np.ndarray, header: Header, tensor: RawTensor, threads: int) -> tuple[np.ndarray, Callable[[], object]]:
    """Turns the base's tensor into one that is not STACKED, in place. Returns the rows that changed, and a function that turns
    it back."""
    row_values = max(math.prod(header.shape[1:]), 1)
    if header.mode in BYTEWISE:
        return _apply_bytes(body, header, tensor, row_values * ITEMSIZE[header.dtype], threads)
    listed = None
    has_own_type = header.mode == CODED and not header.narrow
    if has_own_type and header.base_values and tensor.data.ctypes.data % WIDTHS[header.dtype] == 0:
        try:
            listed = _native.list_changes(body, tensor.data, FLOATS[header.dtype], row_length(header.shape), threads)
        except ValueError as error:
            raise header.another_base() from error
    if listed is None:
        new = decode_body(body, tensor, header, threads, None).data.reshape(-1, row_values * ITEMSIZE[header.dtype])
        old = tensor.data.reshape(new.shape)
        rows = np.flatnonzero((new != old).any(axis=1))
        kept = old[rows]
        old[:] = new
        return rows, partial(old.__setitem__, rows, kept)
    places, values = np.frombuffer(listed[0], np.uint32), bytearray(listed[1])
    changed = np.zeros(header.values // row_values, bool)
    exchange = partial(_native.exchange, tensor.data, places, values, row_values, changed)
    try:
        exchange()
        if xxhash.xxh3_64_intdigest(tensor.data) != header.checksum:
            raise header.another_base()
    except BaseException:  # Ctrl-C included
        if values != listed[1]:  # they are the tensor's old values
            exchange()
        raise
    return np.flatnonzero(changed), exchange


def _apply_bytes(
    body: np.ndarray, header: Header, tensor: RawTensor, row_bytes: int, threads: int
) -> tuple[np.ndarray, Callable[[], object]]:
    """Applies a body of a mode in BYTEWISE. Returns as `_apply`."""
    try:
        places, values = changed_bytes(body, tensor, header.mode, threads)
    except ValueError as error:
        raise header.another_base() from error
    restore = partial(tensor.data.__setitem__, places, tensor.data[places])
    try:
        tensor.data[places] = values
        if xxhash.xxh3_64_intdigest(tensor.data) != header.checksum:
            raise header.another_base()
    except BaseException:  # Ctrl-C included
        restore()
        raise
    return np.unique(places.astype(np.int64) // row_bytes), restore
