"""Encodes tensors that are not floats of 16 and more bits, such as quantized weights, against a base of the same type: the C++
codec gets each byte, or each code in it, as a 16-bit number, whose changes it lists or codes as those of BF16."""

from __future__ import annotations

import numpy as np

from hf_ext.storage.delta.payload import BYTES, CODES, SIGNED_CODES, row_length
from hf_ext.storage.native import FLOATS, _native
from hf_ext.storage.safetensors_file import ITEMSIZE, RawTensor

KINDS = {  # the codes in the bytes of a type, as csrc/delta/codes.h numbers them; "" is any other type
    BYTES: {"F8_E4M3": 6, "F8_E5M2": 7, "": 5},
    CODES: {"F8_E4M3": 0, "F8_E5M2": 1, "I8": 2, "": 3},
    SIGNED_CODES: {"": 4},
}
HALVES = (3, 4)  # two codes of four bits
PIECES, PIECE = 32, 4096  # number and size of the pieces of a tensor on which modes are compared


def best_mode(tensor: RawTensor, base: RawTensor) -> int:
    """Returns the mode that takes the least bytes. Only a comparison shows how many codes there are in a byte."""
    if tensor.dtype in KINDS[CODES]:
        return CODES
    step = max(tensor.data.size // PIECES, PIECE)

    def sample(whole: RawTensor) -> RawTensor:
        data = np.concatenate([whole.data[start : start + PIECE] for start in range(0, whole.data.size, step)])
        return RawTensor("U8", data.shape, data)

    parts = sample(tensor), sample(base)
    return min(KINDS, key=lambda mode: len(encode_bytes(*parts, mode, 1)))


def encode_bytes(tensor: RawTensor, base: RawTensor, mode: int, threads: int) -> bytes:
    """Returns the body of a tensor whose base has the same type and shape."""
    numbers, base_numbers = _numbers(tensor, base, mode), _numbers(base, base, mode)
    return _native.encode(numbers, base_numbers, FLOATS["BF16"], _row_length(tensor, numbers), numbers.size, threads)


def decode_bytes(body: np.ndarray, base: RawTensor, mode: int, threads: int) -> np.ndarray:
    """Returns the bytes of a tensor. Raises ValueError if the body is damaged, or made with another base."""
    numbers = _numbers(base, base, mode)
    _native.decode(body, (numbers, numbers, FLOATS["BF16"], _row_length(base, numbers), numbers.size, threads))
    return _bytes(numbers, base.data, base.dtype, mode)


def changed_bytes(body: np.ndarray, base: RawTensor, mode: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of the bytes that differ from the base's, and their values. Raises as `decode_bytes`."""
    numbers = _numbers(base, base, mode)
    listed = _native.list_changes(body, numbers, FLOATS["BF16"], _row_length(base, numbers), threads)
    if listed is None:
        new = decode_bytes(body, base, mode, threads)
        places = np.flatnonzero(new != base.data)
        return places, new[places]
    places, values = np.frombuffer(listed[0], np.uint32), np.frombuffer(listed[1], np.uint16)
    if numbers.size > base.data.size:
        halves, (places, pair) = places & 1, np.unique(places >> 1, return_inverse=True)
        pairs = numbers.reshape(-1, 2)[places]
        pairs[pair, halves] = values
        values = pairs
    return places, _bytes(values, base.data[places], base.dtype, mode)


def _kind(dtype: str, mode: int) -> int:
    return KINDS[mode].get(dtype, KINDS[mode][""])


def _row_length(tensor: RawTensor, numbers: np.ndarray) -> int:
    return row_length((*tensor.shape, ITEMSIZE[tensor.dtype] * numbers.size // tensor.data.size))


def _numbers(tensor: RawTensor, base: RawTensor, mode: int) -> np.ndarray:
    """Returns the numbers of a tensor's codes."""
    kind = _kind(tensor.dtype, mode)
    numbers = np.empty(tensor.data.size * (2 if kind in HALVES else 1), np.uint16)
    _native.codes_to_numbers(kind, tensor.data, base.data, numbers)
    return numbers


def _bytes(numbers: np.ndarray, base: np.ndarray, dtype: str, mode: int) -> np.ndarray:
    """Returns the bytes of which `_numbers` made numbers, given those of the base."""
    codes = np.empty(base.size, np.uint8)
    _native.numbers_to_codes(_kind(dtype, mode), numbers, base, codes)
    return codes
