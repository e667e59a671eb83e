"""Encodes tensors that are not floats of 16 and more bits, such as quantized weights, against a base of the same type: the C++
codec gets each byte as a 16-bit number, whose changes it lists or codes as those of BF16."""

from __future__ import annotations

import numpy as np

from hf_ext.storage.delta.payload import Header, row_length
from hf_ext.storage.native import FLOATS, _native
from hf_ext.storage.safetensors_file import ITEMSIZE, RawTensor

SHIFTS = {"F8_E4M3": 4, "F8_E5M2": 5}  # that move the exponents of 8-bit floats to where BF16 has them


def encode_bytes(tensor: RawTensor, base: RawTensor, threads: int) -> bytes:
    """Returns the body of a tensor whose base has the same type and shape."""
    length = row_length((*tensor.shape, ITEMSIZE[tensor.dtype]))
    return _native.encode(_widened(tensor), _widened(base), FLOATS["BF16"], length, tensor.data.size, threads)


def decode_bytes(body: np.ndarray, header: Header, base: RawTensor | None, threads: int) -> np.ndarray:
    """Returns the bytes of a tensor.

    Raises:
        ValueError: the body is damaged, or made with another base.
    """
    prediction = None if base is None else _widened(base)
    wide = np.empty(header.size, np.uint16)
    length = row_length((*header.shape, ITEMSIZE[header.dtype]))
    _native.decode(body, (wide, prediction, FLOATS["BF16"], length, header.size, threads))
    return _narrowed(wide, header.dtype)


def changed_bytes(body: np.ndarray, header: Header, base: RawTensor, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of the bytes that differ from the base's, and their values. Raises as `decode_bytes`."""
    length = row_length((*header.shape, ITEMSIZE[header.dtype]))
    listed = _native.list_changes(body, _widened(base), FLOATS["BF16"], length, threads)
    if listed is None:
        new = decode_bytes(body, header, base, threads)
        places = np.flatnonzero(new != base.data)
        return places, new[places]
    return np.frombuffer(listed[0], np.uint32), _narrowed(np.frombuffer(listed[1], np.uint16), header.dtype)


def _widened(tensor: RawTensor) -> np.ndarray:
    """Returns the bytes of a tensor as 16-bit numbers: 8-bit floats in the order and with the exponents of BF16."""
    wide = np.empty(tensor.data.size, np.uint16)
    _native.widen(tensor.data, SHIFTS.get(tensor.dtype, 0), wide)
    return wide


def _narrowed(wide: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the bytes that `_widened` made 16-bit numbers of."""
    shift = SHIFTS.get(dtype)
    return (wide >> 8 & 0x80 | wide >> shift & 0x7F if shift else wide).astype(np.uint8)
