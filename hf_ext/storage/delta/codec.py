"""Encodes one tensor to a payload and back: the C++ codec, or Deflate, behind a header with checksums."""

from __future__ import annotations

import math

import numpy as np
import xxhash

from hf_ext.errors import CorruptFileError, MissingDependencyError
from hf_ext.storage.delta import DEFAULT_LEVEL, LEVELS
from hf_ext.storage.delta.byte_values import best_mode, decode_bytes, encode_bytes
from hf_ext.storage.delta.deflate import deflate, inflate
from hf_ext.storage.delta.narrow import decode_mixed, encode_mixed, narrow_rows
from hf_ext.storage.delta.payload import (
    BYTEWISE,
    CODED,
    DEFLATED,
    MIXED,
    STACKED,
    STORED,
    Body,
    Factors,
    Header,
    has_long_rows,
    is_stack,
    matrix_of,
    read_header,
    read_matrices,
    row_length,
    write_matrices,
    write_payload,
)
from hf_ext.storage.mapped import fresh_memory
from hf_ext.storage.native import FLOATS, WIDTHS, _native, aligned, cast
from hf_ext.storage.prefetch import in_threads
from hf_ext.storage.safetensors_file import ITEMSIZE, RawTensor

FEW_BYTES = 1 / 8  # share of a tensor's bytes that a list of few changed ones may take; deflating would not make less


def encode_raw(
    tensor: RawTensor,
    base: RawTensor | None = None,
    name: str = "",
    base_name: str = "",
    threads: int = 1,
    level: int = DEFAULT_LEVEL,
) -> bytes:
    """Compresses a tensor losslessly to a payload, which is at most a header larger than the tensor.

    Args:
        tensor: of any dtype. Floats of 16, 32 and 64 bits are coded. Other dtypes are deflated, or coded if few bytes changed.
        base: its counterpart in the base model. For floats: a float tensor of the same shape, or of another number of rows (a
            resized embedding). For other types: a tensor of the same type and shape. Any other tensor is ignored.
        name, base_name: the names of the two tensors in their checkpoints.
        threads: used for tensors of more than 262,144 values.
        level: 1 encodes values one by one; 2 first looks for a low-rank part of a matrix's change; 3 looks longer.

    Raises:
        CheckpointError: the bytes of a tensor do not fit its type and shape, or it has more than 255 dimensions or a name of
            more than 65,535 bytes.
        MissingDependencyError: levels 2 and 3 need PyTorch; floats need the C++ extension.
        ValueError: there is no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {LEVELS}, not {level!r}")
    tensor.require_bytes(name)
    if base is not None:
        base.require_bytes(base_name)
    if is_stack(tensor.dtype, tensor.shape):
        mode, base_values, body = _encode_stack(tensor, base, threads, level)
    else:
        mode, base_values, body = encode_body(tensor, base, threads, level)
    if base_values == 0 or base is None:
        base_name, base_dtype = "", ""
    else:
        base_dtype = base.dtype
    checksum = xxhash.xxh3_64_intdigest(tensor.data)
    return write_payload((tensor.dtype, base_dtype, name, base_name), tensor.shape, mode, base_values, checksum, body)


def decode_raw(
    payload: np.ndarray | bytes,
    base: RawTensor | None = None,
    header: Header | None = None,
    threads: int = 1,
    out: np.ndarray | None = None,
) -> RawTensor:
    """Decodes a payload to its tensor, bit for bit.

    Args:
        payload: as `encode_raw` returned it.
        base: the tensor `header.base_name` of the base model; not needed if that name is empty.
        header: the result of `read_header`, if it was called before. The payload's checksum is then not computed again.
        out: memory of the tensor's size for a coded tensor. It is overwritten even if an error follows.

    Raises:
        CheckpointError: the bytes of the base do not fit its type and shape, or `out` is not of the tensor's size.
        CorruptFileError: the payload is damaged.
        BaseModelError: the base's tensor is missing, or is not the one that was used to compress.
        MissingDependencyError: the C++ extension is not built.
    """
    header = header or read_header(payload)
    if base is not None:
        base.require_bytes(header.base_name)
    if out is not None:
        RawTensor(header.dtype, header.shape, out).require_bytes(header.name, writable=True)
    if header.mode == STACKED:
        if header.base_values and base is not None:
            header.require_base(base.dtype, base.shape)
        return decode_rows(payload, base, header, 0, header.shape[0], threads, out)
    return decode_body(np.frombuffer(payload, np.uint8)[header.body :], base, header, threads, out)


def decode_rows(
    payload: np.ndarray | bytes,
    base: RawTensor | None,
    header: Header,
    begin: int,
    end: int,
    threads: int = 1,
    out: np.ndarray | None = None,
) -> RawTensor:
    """Decodes the matrices from `begin` to `end` of the first dimension of a STACKED tensor. `base` has the same rows of the
    base's tensor, or those that it has, and `out` is of the size of the rows. The rest is as for `decode_raw`, errors
    included."""
    if header.base_values and base is None:  # before a forged size takes memory
        raise header.missing_base()
    shape = (end - begin, *header.shape[1:])
    per_row = math.prod(shape[1:-2])
    matrices = read_matrices(np.frombuffer(payload, np.uint8), header)[begin * per_row : end * per_row]
    size = header.size // math.prod(header.shape[:-2])
    data = fresh_memory(len(matrices) * size) if out is None else out

    def decode(i: int) -> None:
        matrix, body = matrices[i]
        base_matrix = matrix_of(base, matrix.shape, i) if matrix.base_values and base is not None else None
        place = data[i * size : (i + 1) * size]
        decoded = decode_body(body, base_matrix, matrix, -(-threads // len(matrices)), place)
        if decoded.data is not place:
            place[:] = decoded.data

    in_threads(decode, len(matrices), threads)
    return RawTensor(header.dtype, shape, data)


def decode_body(body: np.ndarray, base: RawTensor | None, header: Header, threads: int, out: np.ndarray | None) -> RawTensor:
    """Decodes the body of a tensor that is not STACKED. Returns and raises as `decode_raw`."""
    label = f"Tensor '{header.name}'"
    if header.mode == STORED:
        tensor = RawTensor(header.dtype, header.shape, body.copy())
    else:
        if header.base_values and base is None:
            raise header.missing_base()
        if header.base_values and base is not None:
            header.require_base(base.dtype, base.shape)
        try:
            if header.mode == DEFLATED:
                data = inflate(body, header.size)
                if header.base_values and base is not None:
                    data += base.data[: data.size]
            elif header.mode in BYTEWISE and base is not None:
                data = decode_bytes(body, base, header.mode, threads)
            else:
                data = fresh_memory(header.size) if out is None else out
                _decode_floats(body, header, base, data, threads)
        except ValueError as error:
            # The payload's own checksum was right, so if there is a base, it is the wrong one.
            if header.base_values:
                raise header.another_base() from error
            raise CorruptFileError(f"{label} cannot be decoded: {error}.") from error
        except TypeError as error:
            raise CorruptFileError(f"{label} cannot be decoded: {error}.") from error
        tensor = RawTensor(header.dtype, header.shape, data)
    if xxhash.xxh3_64_intdigest(tensor.data) != header.checksum:
        if header.base_values:
            raise header.another_base()
        raise CorruptFileError(f"{label} is damaged: checksum mismatch after decoding. Download or save the file again.")
    return tensor


def stored_factors(payload: np.ndarray | bytes, header: Header) -> Factors | None:
    """Returns the low-rank change of a matrix that a payload with this header holds, without the base; None if it holds none.
    The base moved by this change is the codec's prediction of the tensor, except for rounding to the tensor's type. Raises
    CorruptFileError if the payload is damaged."""
    if header.mode != CODED or header.base_values != header.values or not has_long_rows(header.shape):
        return None
    body, length = np.frombuffer(payload, np.uint8)[header.body :], row_length(header.shape)
    try:
        stored = _native.factors(body, FLOATS[header.narrow or header.dtype], header.values, length, header.base_values)
    except (ValueError, TypeError) as error:
        raise CorruptFileError(f"Tensor '{header.name}' cannot be decoded: {error}.") from error
    if stored is None:
        return None
    columns = np.frombuffer(stored[1], np.int32).reshape(-1, length)
    return Factors(np.frombuffer(stored[0], np.int32).reshape(-1, len(columns)), columns, stored[2])


def _encode_stack(tensor: RawTensor, base: RawTensor | None, threads: int, level: int) -> tuple[int, int, Body]:
    """Encodes each matrix of a tensor's last two dimensions. Returns as `encode_body`."""
    shape, count = tensor.shape[-2:], math.prod(tensor.shape[:-2])
    predicted = predicted_values(tensor, base) // math.prod(shape)

    def encode(i: int) -> tuple[int, int, int, Body]:
        matrix = matrix_of(tensor, shape, i)
        base_matrix = None if base is None or i >= predicted else matrix_of(base, shape, i)
        mode, base_values, body = encode_body(matrix, base_matrix, -(-threads // count), level)
        return mode, base_values, xxhash.xxh3_64_intdigest(matrix.data), body

    matrices = in_threads(encode, count, threads)
    if all(mode == STORED for mode, *_ in matrices):
        return STORED, 0, memoryview(tensor.data)
    base_values = predicted * math.prod(shape) if any(matrix[1] for matrix in matrices) else 0
    return STACKED, base_values, write_matrices(matrices)


def encode_body(tensor: RawTensor, base: RawTensor | None, threads: int, level: int) -> tuple[int, int, Body]:
    """Returns the mode byte, the number of base values and the body of a tensor that is not STACKED."""
    mode, base_values, body = STORED, 0, memoryview(tensor.data)
    if tensor.dtype in FLOATS and tensor.data.size:
        narrow, fits = narrow_rows(tensor, math.prod(tensor.shape))
        coded = RawTensor(narrow, tensor.shape, cast(tensor.data, tensor.dtype, narrow)) if fits else tensor
        base_values = predicted_values(tensor, base)
        for predicted in [base_values, 0] if base_values else [0]:
            candidate_mode, candidate = _encode_floats(tensor, coded, base, predicted, threads, level)
            if len(candidate) < len(body):
                mode, base_values, body = candidate_mode, predicted, memoryview(candidate)
            # A base that saves a quarter is the right one. Any other base may be unrelated, so the second attempt uses none.
            if len(candidate) < 0.75 * coded.data.size:
                break
        if mode == STORED:
            base_values = 0
    elif tensor.dtype in ITEMSIZE and tensor.data.size:
        if base is not None and (base.dtype, base.shape) != (tensor.dtype, tensor.shape):
            base = None
        if base:
            candidate_mode = best_mode(tensor, base)
            candidate = encode_bytes(tensor, base, candidate_mode, threads)
            if len(candidate) < len(body):
                mode, base_values, body = candidate_mode, math.prod(tensor.shape), memoryview(candidate)
            if len(candidate) < FEW_BYTES * tensor.data.size:
                return mode, base_values, body
        for against in [base, None] if base else [None]:
            candidate = deflate(tensor.data - against.data if against else tensor.data)
            if len(candidate) < len(body):
                mode, base_values, body = DEFLATED, math.prod(tensor.shape) if against else 0, memoryview(candidate)
    return mode, base_values, body


def predicted_values(tensor: RawTensor, base: RawTensor | None) -> int:
    """Returns how many leading values of the tensor have a counterpart in the base: all, whole rows, or none."""
    if base is None or base.dtype not in FLOATS or len(base.shape) != len(tensor.shape):
        return 0
    if base.shape == tensor.shape:
        return math.prod(tensor.shape)
    if len(tensor.shape) < 2 or base.shape[1:] != tensor.shape[1:]:
        return 0
    values, shared = math.prod(tensor.shape), min(base.shape[0], tensor.shape[0]) * math.prod(tensor.shape[1:])
    return values if shared == values else shared - shared % row_length(tensor.shape)


def _encode_floats(
    tensor: RawTensor, coded: RawTensor, base: RawTensor | None, predicted: int, threads: int, level: int
) -> tuple[int, bytes]:
    """Returns the mode byte and the body of a tensor whose first `predicted` values the base predicts. `coded` is the same
    tensor in the type of its coded values."""
    is_own, length = coded is tensor, row_length(tensor.shape)
    if is_own and not predicted and has_long_rows(tensor.shape) and (mixed := encode_mixed(tensor, length, threads)):
        return MIXED | FLOATS[mixed[0]] << 4, mixed[1]
    data, base_data = aligned(coded.data, coded.dtype), cast_base(base, coded.dtype, predicted)
    changes = _changes(coded, data, base_data, threads, level)
    body = _native.encode(data, base_data, FLOATS[coded.dtype], length, predicted, threads, changes)
    return CODED | (0 if is_own else FLOATS[coded.dtype] << 4), body


def _decode_floats(body: np.ndarray, header: Header, base: RawTensor | None, data: np.ndarray, threads: int) -> None:
    """Fills `data` from the body of a float tensor."""
    length, coded_dtype = row_length(header.shape), header.narrow or header.dtype
    if header.mode == MIXED:
        return decode_mixed(body, header.narrow, header.dtype, length, data, threads)
    coded = np.empty(header.values * WIDTHS[coded_dtype], np.uint8) if header.narrow else data
    base_data = cast_base(base, coded_dtype, header.base_values)
    _native.decode(body, (coded, base_data, FLOATS[coded_dtype], length, header.base_values, threads))
    if header.narrow:
        _native.cast(coded, FLOATS[coded_dtype], data, FLOATS[header.dtype])


def _changes(
    tensor: RawTensor, data: np.ndarray, base_data: np.ndarray | None, threads: int, level: int
) -> tuple[Factors, ...]:
    """Returns low-rank changes that may bring the base's values closer to the tensor's, whose aligned bytes are `data`."""
    length = row_length(tensor.shape)
    if level == LEVELS[0] or base_data is None or len(tensor.shape) < 2 or length != math.prod(tensor.shape[1:]):
        return ()
    try:
        from hf_ext.storage.delta import low_rank
    except ImportError as error:
        raise MissingDependencyError(
            "Compressing at levels 2 and 3 needs PyTorch, which is not installed: pip install torch, or compress with level=1."
        ) from error

    return tuple(low_rank.changes(data[: base_data.size], base_data, tensor.dtype, length, level, threads))


def cast_base(base: RawTensor | None, dtype: str, values: int) -> np.ndarray | None:
    """Returns the first `values` values of the base as `dtype`."""
    if base is None or values == 0:
        return None
    return cast(base.data[: values * WIDTHS[base.dtype]], base.dtype, dtype)
