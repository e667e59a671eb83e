"""Finds floats that a narrower type holds exactly, such as weights that were trained in bf16 and saved in fp32."""

from __future__ import annotations

import numpy as np

from hf_ext.storage.native import FLOATS, WIDTHS, _native, aligned, cast
from hf_ext.storage.safetensors_file import RawTensor

#: The narrower types of each float type, and how many low bits of a value are zero if such a type holds it.
NARROWER = {"F32": {"BF16": 16, "F16": 13}, "F64": {"BF16": 45, "F16": 42, "F32": 29}}
LEAST_SHARE = 1 / 64  # least share of rows that fit a narrower type, to code them apart
SAMPLED_ROWS, SAMPLED_VALUES = 1024, 16  # rows, and values of a row, that show whether more need to be read


def narrow_rows(tensor: RawTensor, length: int) -> tuple[str, np.ndarray]:
    """Finds the narrower type that fits most rows of a float tensor, of `length` values each. A type fits a row if it holds all
    values exactly; a NaN only if it is quiet and has no payload, as a cast makes it. Returns the type, and a flag for each row
    that is true if the type fits."""
    bits = aligned(tensor.data, tensor.dtype).view(f"<u{WIDTHS[tensor.dtype]}").reshape(-1, length)
    narrow, fits = tensor.dtype, np.zeros(len(bits), bool)
    types = NARROWER.get(tensor.dtype, {})
    sample = bits[:: -(-len(bits) // SAMPLED_ROWS), 0]
    if not types or (sample & _low_bits(min(types.values()), bits)).all():
        return narrow, fits
    for dtype, zeros in types.items():
        rows = np.arange(len(bits))
        for column in range(0, length, -(-length // SAMPLED_VALUES)):
            rows = rows[bits[rows, column] & _low_bits(zeros, bits) == 0]
        values = bits[rows]
        back = cast(cast(values.reshape(-1).view(np.uint8), tensor.dtype, dtype), dtype, tensor.dtype)
        rows = rows[(back.view(bits.dtype).reshape(-1, length) == values).all(axis=1)]
        if len(rows) > fits.sum():
            narrow, fits[:], fits[rows] = dtype, False, True
    return narrow, fits


def encode_mixed(tensor: RawTensor, length: int, threads: int) -> tuple[str, bytes] | None:
    """Codes the rows that fit a narrower type in that type, and the others in the tensor's own. Returns the narrower type and
    the body, or None if too few rows fit one."""
    narrow, fits = narrow_rows(tensor, length)
    if fits.mean() < LEAST_SHARE:
        return None
    rows = tensor.data.reshape(len(fits), -1)
    bodies = [
        _native.encode(cast(rows[where].reshape(-1), tensor.dtype, dtype), None, FLOATS[dtype], length, 0, threads)
        for dtype, where in ((narrow, fits), (tensor.dtype, ~fits))
    ]
    flags = np.packbits(fits, bitorder="little").tobytes()
    return narrow, b"".join((flags, len(bodies[0]).to_bytes(8, "little"), *bodies))


def decode_mixed(body: np.ndarray, narrow: str, dtype: str, length: int, data: np.ndarray, threads: int) -> None:
    """Fills `data`, the bytes of a tensor of type `dtype`, from the body that `encode_mixed` made. Raises ValueError or
    TypeError if the body is damaged."""
    rows = data.reshape(-1, length * WIDTHS[dtype])
    begin = (len(rows) + 7) // 8 + 8
    middle = begin + int.from_bytes(body[begin - 8 : begin].tobytes(), "little")
    if not begin <= middle <= body.size:
        raise ValueError("the compressed tensor ends too early")
    fits = np.unpackbits(body[: begin - 8], count=len(rows), bitorder="little").astype(bool)
    for kind, where, part in ((narrow, fits, body[begin:middle]), (dtype, ~fits, body[middle:])):
        values = np.empty(np.count_nonzero(where) * length * WIDTHS[kind], np.uint8)
        _native.decode(part, (values, None, FLOATS[kind], length, 0, threads))
        rows[where] = cast(values, kind, dtype).reshape(-1, rows.shape[1])


def _low_bits(count: int, like: np.ndarray) -> np.unsignedinteger:
    return like.dtype.type((1 << count) - 1)
