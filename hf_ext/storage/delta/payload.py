"""A payload: the body of one encoded tensor, behind a header with the tensor's identity and checksums.

docs/fm_delta_format.md describes the header. A payload needs only the base's tensor. Wherever it is stored (in a safetensors
file or a state dict), it can be recognized, checked and decoded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import xxhash

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.delta.narrow import NARROWER
from hf_ext.storage.native import FLOATS
from hf_ext.storage.safetensors_file import ITEMSIZE, RawTensor

if TYPE_CHECKING:
    import torch

VERSION = 1
MAGIC = b"FMD" + bytes([VERSION])
STORED, CODED, DEFLATED, MIXED, STACKED, BYTES, CODES, SIGNED_CODES = range(8)
BYTEWISE = (BYTES, CODES, SIGNED_CODES)  # modes of types that are no floats of 16 and more bits, always with a base
SHORT_ROW, FLAT_ROW = 64, 1024  # rows shorter than SHORT_ROW are joined to rows of up to FLAT_ROW values
LEAST_MATRIX = 1 << 16  # values of a matrix that is encoded separately
MAX_EXPANSION = 64  # limit of values without a base per byte of a body; valid bodies have at most 4/3, as low bits are verbatim
MAX_INFLATION = 1032  # limit of decoded bytes per byte of a Deflate stream

Body: TypeAlias = bytes | memoryview

_FIXED = struct.Struct("<4sBBBBHHQQQ")  # magic, mode, ndim, lengths of 2 dtypes and 2 names, base values, 2 checksums
_MATRIX = struct.Struct("<BBQQ")  # mode, whether the base predicts it, checksum, size of the body


@dataclass(frozen=True)
class Header:
    """The header of a payload.

    Attributes:
        name: the tensor's name in the checkpoint.
        dtype, shape: the tensor's, as safetensors names them.
        mode: STORED for the tensor's own bytes, CODED for the C++ codec's, DEFLATED, MIXED if rows are CODED in two types,
            STACKED if each matrix of the last two dimensions is encoded separately, or one of BYTEWISE if the C++ codec encodes
            each byte, or each code of quantized weights, as a 16-bit number.
        narrow: the narrower type in which the values, or some rows of a MIXED tensor, are coded; empty for none.
        base_name, base_dtype: the tensor of the base that predicts this one; empty without one.
        base_values: the number of leading values that the base's tensor predicts.
        checksum: XXH3-64 of the tensor's bytes.
        body: offset of the body in the payload.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    mode: int
    narrow: str
    base_name: str
    base_dtype: str
    base_values: int
    checksum: int
    body: int

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of the tensor, whose type must be known."""
        return self.values * ITEMSIZE[self.dtype]

    def require_base(self, dtype: str, shape: Sequence[int]) -> None:
        """Raises BaseModelError unless a base tensor of this type and shape can predict this tensor."""
        same = tuple(shape) == self.shape if self.mode in (DEFLATED, *BYTEWISE) else tuple(shape[1:]) == self.shape[1:]
        if dtype != self.base_dtype or not same or math.prod(shape) < self.base_values:
            raise BaseModelError(
                f"Tensor '{self.name}' {list(self.shape)} was compressed against a {self.base_dtype} tensor that predicts "
                f"{self.base_values} of its values; '{self.base_name}' of the base is {dtype} {list(shape)}. This is another "
                "base model."
            )

    def missing_base(self) -> BaseModelError:
        """Returns the error for a payload that needs a base, but got none."""
        return BaseModelError(f"Tensor '{self.name}' needs the tensor '{self.base_name}' of the base model.")

    def another_base(self) -> BaseModelError:
        """Returns the error for a base that does not give the tensor."""
        return BaseModelError(
            f"Tensor '{self.name}' cannot be restored: checksum mismatch. '{self.base_name}' of the base model has changed "
            "since it was compressed, or this is another base model."
        )


class Factors(NamedTuple):
    """The change rows · columns · 2^-exponent, in the form that the C++ extension takes."""

    rows: np.ndarray  # int32, rows × rank
    columns: np.ndarray  # int32, rank × columns
    exponent: int


def payload_shape(ndim: int, size: int) -> tuple[int, ...]:
    """Returns the shape of a payload's tensor in a file. It never has as many dimensions as the encoded tensor, so a loader
    without this codec cannot mistake the payload for that tensor."""
    return (1, size) if ndim == 1 else (size,)


def is_payload(data: np.ndarray | torch.Tensor) -> bool:
    """Checks whether an array of bytes begins like a payload of this format version."""
    if str(data.dtype).removeprefix("torch.") != "uint8":
        return False
    flat = data.reshape(-1)
    return len(flat) >= _FIXED.size and bytes(flat[:4].tolist()) == MAGIC


def row_length(shape: tuple[int, ...]) -> int:
    """Returns the number of values that share a row scale: those of one first index, or of several indices if they are few."""
    trailing = max(math.prod(shape[1:]), 1)
    return trailing if trailing >= SHORT_ROW else FLAT_ROW // trailing * trailing


def has_long_rows(shape: tuple[int, ...]) -> bool:
    """Checks whether each row has one first index, so that all rows have the same length."""
    return row_length(shape) == math.prod(shape[1:])


def is_stack(dtype: str, shape: tuple[int, ...]) -> bool:
    """Checks whether each matrix of a tensor's last two dimensions is encoded separately, such as each expert's. Small ones,
    such as those of convolutions, are not worth it."""
    if dtype not in FLOATS or len(shape) < 3 or 0 in shape:
        return False
    return min(shape[-2:]) >= SHORT_ROW and math.prod(shape[-2:]) >= LEAST_MATRIX


def matrix_of(tensor: RawTensor, shape: tuple[int, ...], index: int) -> RawTensor:
    """Returns one of the matrices of this shape that a tensor consists of."""
    size = math.prod(shape) * ITEMSIZE[tensor.dtype]
    return RawTensor(tensor.dtype, shape, tensor.data[index * size : (index + 1) * size])


def write_matrices(matrices: Sequence[tuple[int, int, int, Body]]) -> bytes:
    """Returns the body of a STACKED tensor, given the mode byte, base values, checksum and body of each of its matrices."""
    table = (_MATRIX.pack(mode, base_values > 0, checksum, len(body)) for mode, base_values, checksum, body in matrices)
    return b"".join((*table, *(body for *_, body in matrices)))


def read_matrices(payload: np.ndarray, header: Header) -> list[tuple[Header, np.ndarray]]:
    """Returns the header and the body of each matrix of a STACKED tensor. Raises CorruptFileError if they do not fit the
    payload."""
    *stack, rows, columns = header.shape
    count, values = math.prod(stack), rows * columns
    start, matrices = header.body + count * _MATRIX.size, []
    try:
        for i, (kind, has_base, checksum, size) in enumerate(_MATRIX.iter_unpack(payload[header.body : start])):
            mode, narrow = _mode(kind)
            base_values = values if has_base and (i + 1) * values <= header.base_values else 0
            matrix = replace(
                header,
                name=f"{header.name}[{i}]",
                shape=(rows, columns),
                mode=mode,
                narrow=narrow,
                base_values=base_values,
                checksum=checksum,
                body=0,
            )
            if has_base != (base_values > 0) or mode == STACKED or not _is_possible(matrix, size):
                raise ValueError(f"the header of matrix {i} is invalid")
            matrices.append((matrix, payload[start : start + size]))
            start += size
        if len(matrices) != count or start != payload.size:
            raise ValueError("the sizes of its matrices do not add up")
    except (struct.error, ValueError) as error:
        raise CorruptFileError(f"Tensor '{header.name}' cannot be decoded: {error}.") from error
    return matrices


def write_payload(
    texts: tuple[str, str, str, str], shape: tuple[int, ...], mode: int, base_values: int, checksum: int, body: Body
) -> bytes:
    """Returns a body behind its header.

    Args:
        texts: dtype of the tensor and of the base's, name of the tensor and of the base's.
        mode: see `Header`; its high four bits hold the code of the narrower type, if any.
        shape, base_values, checksum: see `Header`.

    Raises:
        CheckpointError: the tensor has more than 255 dimensions, or a name that is no text or has more than 65,535 bytes.
    """
    try:
        coded = [text.encode() for text in texts]
    except (UnicodeEncodeError, AttributeError) as error:
        raise CheckpointError(f"A name or type among {texts} is no text that UTF-8 can hold: {error}.") from error
    variable = struct.pack(f"<{len(shape)}Q", *shape) + b"".join(coded)
    lengths = [len(text) for text in coded]

    def header(integrity: int) -> bytes:
        return _FIXED.pack(MAGIC, mode, len(shape), *lengths, base_values, checksum, integrity)

    try:
        integrity = xxhash.xxh3_64(header(0) + variable)
    except struct.error as error:
        raise CheckpointError(
            f"Tensor '{texts[2][:100]}' has too many dimensions or too long a name to be compressed: {len(shape)} "
            f"dimensions, {lengths[2]} bytes. The format allows 255 and 65,535."
        ) from error
    integrity.update(body)
    return b"".join((header(integrity.intdigest()), variable, body))


def read_header(payload: np.ndarray | bytes, name: str = "") -> Header:
    """Checks a whole payload against its checksum and returns its header. Raises CorruptFileError if it is not a payload, has
    another format version, is damaged, or belongs to a tensor of another name than `name` (if given)."""
    require_intact(payload, name)
    return unchecked_header(payload, name)


def require_intact(payload: np.ndarray | bytes, name: str = "") -> None:
    """Raises CorruptFileError if this is not a payload, has another format version, or is damaged."""
    data, label = memoryview(payload).cast("B"), _label(name)
    if len(data) < _FIXED.size or bytes(data[:3]) != MAGIC[:3]:
        raise CorruptFileError(f"{label} is not compressed by FM-Delta, or the file is damaged.")
    if data[3] != VERSION:
        raise CorruptFileError(
            f"{label} has format version {data[3]}, this hf_ext reads version {VERSION}: update hf_ext. If that does not help, "
            "the file is damaged."
        )
    recorded = int.from_bytes(data[_FIXED.size - 8 : _FIXED.size], "little")
    integrity = xxhash.xxh3_64(data[: _FIXED.size - 8])
    integrity.update(bytes(8))
    integrity.update(data[_FIXED.size :])
    if integrity.intdigest() != recorded:
        raise CorruptFileError(f"{label} is damaged: checksum mismatch. Download or save the file again.")


def unchecked_header(payload: np.ndarray | bytes, name: str = "") -> Header:
    """Returns the header of a payload that may be damaged, of which it reads nothing else. Raises CorruptFileError if the
    header is invalid, or belongs to a tensor of another name than `name` (if given)."""
    data, label = memoryview(payload).cast("B"), _label(name)
    try:
        header = peek_header(data)
    except (struct.error, ValueError) as error:
        raise CorruptFileError(f"{label} has an invalid header: {error}.") from error
    if not _is_possible(header, len(data) - header.body):
        raise CorruptFileError(f"{label} has an invalid header: its type, shape and size do not fit together.")
    if name and header.name and name != header.name:
        raise CorruptFileError(f"{label} holds the data of '{header.name}': the file's header is damaged.")
    return header


def _label(name: str) -> str:
    return f"Tensor '{name}'" if name else "The payload"


def peek_header(payload: np.ndarray | memoryview) -> Header:
    """Returns the header of a payload that `read_header` has checked before."""
    _, kind, ndim, *lengths, base_values, checksum, _ = _FIXED.unpack_from(payload)
    mode, narrow = _mode(kind)
    shape = struct.unpack_from(f"<{ndim}Q", payload, _FIXED.size)
    texts, start = [], _FIXED.size + 8 * ndim
    for length in lengths:
        texts.append(bytes(payload[start : start + length]).decode())
        start += length
    dtype, base_dtype, name, base_name = texts
    return Header(name, dtype, shape, mode, narrow, base_name, base_dtype, base_values, checksum, start)


def _mode(kind: int) -> tuple[int, str]:
    """Returns the mode and the narrower type that a mode byte stands for."""
    mode, code = kind & 15, kind >> 4
    if mode > SIGNED_CODES or code > len(FLOATS):
        raise ValueError(f"mode {kind} is unknown")
    return mode, ["", *FLOATS][code]


def _is_possible(header: Header, size: int) -> bool:
    """Checks that the fields of a header, which may be forged, fit each other and a body of `size` bytes."""
    width = ITEMSIZE.get(header.dtype)
    if header.narrow and (header.mode not in (CODED, MIXED) or header.narrow not in NARROWER.get(header.dtype, ())):
        return False
    if header.mode in (CODED, STACKED):
        with_base = header.base_values <= header.values and header.base_dtype in FLOATS or header.base_values == 0
        coded = header.dtype in FLOATS if header.mode == CODED else is_stack(header.dtype, header.shape)
        return coded and with_base and 0 < header.values <= header.base_values + MAX_EXPANSION * size
    if header.mode == MIXED:
        possible = header.narrow != "" and header.base_values == 0 and has_long_rows(header.shape)
        return possible and 0 < header.values <= MAX_EXPANSION * size
    if header.mode in BYTEWISE:
        with_base = header.base_values == header.values > 0 and header.base_dtype == header.dtype
        return with_base and width is not None and header.dtype not in FLOATS
    if header.mode == DEFLATED:
        with_base = header.base_values == header.values and header.base_dtype == header.dtype or header.base_values == 0
        return width is not None and with_base and 0 < header.values * width <= MAX_INFLATION * size
    return size >= 0 and header.base_values == 0 and (width is None or size == header.values * width)
