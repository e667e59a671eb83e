"""Encodes one tensor to a payload and back: the C++ codec behind a header with the tensor's identity and checksums.

docs/fm_delta_format.md describes the header. A payload needs nothing but the base's tensor: wherever it is stored (in a
safetensors file, in a state dict), it can be recognized, checked and decoded.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError, MissingDependencyError
from hf_ext.storage.delta import DEFAULT_LEVEL, LEVELS
from hf_ext.storage.delta.narrow import NARROWER, decode_mixed, encode_mixed, narrow_rows
from hf_ext.storage.mapped import fresh_memory
from hf_ext.storage.native import FLOATS, WIDTHS, _native, aligned, cast
from hf_ext.storage.prefetch import check_awaited
from hf_ext.storage.safetensors_file import ITEMSIZE, RawTensor

if TYPE_CHECKING:
    import torch

    from hf_ext.storage.delta.low_rank import Factors

VERSION = 1
MAGIC = b"FMD" + bytes([VERSION])
STORED, CODED, DEFLATED, MIXED = 0, 1, 2, 3
SHORT_ROW, FLAT_ROW = 64, 1024  # rows shorter than SHORT_ROW are joined to rows of up to FLAT_ROW values
MAX_EXPANSION = 64  # limit of values without a base per byte of a body; valid bodies have at most 4/3, as low bits are verbatim
MAX_INFLATION = 1032  # limit of bytes that one byte of a Deflate stream stands for
DEFLATE_AT_ONCE = 1 << 22  # bytes that are deflated between two checks whether the result is awaited

_FIXED = struct.Struct("<4sBBBBHHQQQ")  # magic, mode, ndim, lengths of 2 dtypes and 2 names, base values, 2 checksums


@dataclass(frozen=True)
class Header:
    """The header of a payload.

    Attributes:
        name: the tensor's name in the checkpoint.
        dtype, shape: the tensor's, as safetensors names them.
        mode: STORED for the tensor's own bytes, CODED for the C++ codec's, DEFLATED, or MIXED if rows are CODED in two types.
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
        """Raises BaseModelError unless a tensor of this type and shape can be the one of the base that predicts this tensor."""
        same = tuple(shape) == self.shape if self.mode == DEFLATED else tuple(shape[1:]) == self.shape[1:]
        if dtype != self.base_dtype or not same or math.prod(shape) < self.base_values:
            raise BaseModelError(
                f"Tensor '{self.name}' {list(self.shape)} was compressed against a {self.base_dtype} tensor that predicts "
                f"{self.base_values} of its values; '{self.base_name}' of the base is {dtype} {list(shape)}. This is another "
                "base model."
            )


def payload_shape(ndim: int, size: int) -> tuple[int, ...]:
    """Returns the shape of a payload's tensor in a file. It never has as many dimensions as the encoded tensor, so a loader
    without this codec cannot mistake the payload for that tensor."""
    return (1, size) if ndim == 1 else (size,)


def is_payload(data: np.ndarray | torch.Tensor) -> bool:
    """Checks whether an array of bytes begins as a payload of this format version does."""
    if str(data.dtype).removeprefix("torch.") != "uint8":
        return False
    flat = data.reshape(-1)
    return len(flat) >= _FIXED.size and bytes(flat[:4].tolist()) == MAGIC


def row_length(shape: tuple[int, ...]) -> int:
    """Returns the number of values that share a row scale: those of one first index, or of several if they are few."""
    trailing = max(math.prod(shape[1:]), 1)
    return trailing if trailing >= SHORT_ROW else FLAT_ROW // trailing * trailing


def _has_long_rows(shape: tuple[int, ...]) -> bool:
    """Returns whether a row is that of one first index, so that all rows have the same length."""
    return row_length(shape) == math.prod(shape[1:])


def encode_raw(
    tensor: RawTensor,
    base: RawTensor | None = None,
    name: str = "",
    base_name: str = "",
    threads: int = 1,
    level: int = DEFAULT_LEVEL,
) -> bytes:
    """Compresses a tensor, without loss, to a payload of at most its own size and a header.

    Args:
        tensor: of any type. Floats of 16, 32 and 64 bits are coded, other types are deflated.
        base: its counterpart in the base model. For floats: a float tensor of the same shape, or of another number of rows (a
            resized embedding). For other types: a tensor of the same type and shape. Any other tensor is ignored.
        name, base_name: the names of the two tensors in their checkpoints.
        threads: used for tensors of more than 262,144 values.
        level: 1 encodes values one by one; 2 first looks for a low-rank part of a matrix's change; 3 looks longer.

    Raises:
        CheckpointError: the tensor has more than 255 dimensions or a name of more than 65,535 bytes.
        MissingDependencyError: levels 2 and 3 need PyTorch; floats need the C++ extension.
        ValueError: there is no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {LEVELS}, not {level!r}")
    checksum = xxhash.xxh3_64_intdigest(tensor.data)
    mode, base_values, body = STORED, 0, memoryview(tensor.data)
    if tensor.dtype in FLOATS and tensor.data.size:
        narrow, fits = narrow_rows(tensor, math.prod(tensor.shape))
        coded = RawTensor(narrow, tensor.shape, cast(tensor.data, tensor.dtype, narrow)) if fits else tensor
        base_values = _predicted_values(tensor, base)
        attempts = [base_values, 0] if base_values else [0]
        for predicted in attempts:
            candidate_mode, candidate = _encode_floats(tensor, coded, base, predicted, threads, level)
            if len(candidate) < len(body):
                mode, base_values, body = candidate_mode, predicted, memoryview(candidate)
            # A base that saves a quarter is the right one. Any other may be unrelated: the second attempt does without it.
            if len(candidate) < 0.75 * coded.data.size:
                break
        if mode == STORED:
            base_values = 0
    elif tensor.dtype in ITEMSIZE and tensor.data.size:
        twin = base if base is not None and (base.dtype, base.shape) == (tensor.dtype, tensor.shape) else None
        for prior in [twin, None] if twin else [None]:
            candidate = _deflate(tensor.data - prior.data if prior else tensor.data)
            if len(candidate) < len(body):
                mode, base_values, body = DEFLATED, math.prod(tensor.shape) if prior else 0, memoryview(candidate)
    if base_values == 0 or base is None:
        base_name, base_dtype = "", ""
    else:
        base_dtype = base.dtype
    texts = [text.encode() for text in (tensor.dtype, base_dtype, name, base_name)]
    variable = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + b"".join(texts)
    lengths = [len(text) for text in texts]

    def header(integrity: int) -> bytes:
        return _FIXED.pack(MAGIC, mode, len(tensor.shape), *lengths, base_values, checksum, integrity)

    try:
        integrity = xxhash.xxh3_64(header(0) + variable)
    except struct.error as error:
        raise CheckpointError(
            f"Tensor '{name[:100]}' has too many dimensions or too long a name to be compressed: {len(tensor.shape)} "
            f"dimensions, {lengths[2]} bytes. The format allows 255 and 65,535."
        ) from error
    integrity.update(body)
    return b"".join((header(integrity.intdigest()), variable, body))


def read_header(payload: np.ndarray | bytes, name: str = "") -> Header:
    """Checks a whole payload against its checksum and returns its header.

    Raises:
        CorruptFileError: it is not a payload, has another format version, is damaged, or belongs to a tensor of another name
            than `name` (if given).
    """
    data = memoryview(payload).cast("B")
    label = f"Tensor '{name}'" if name else "The payload"
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
    try:
        header = peek_header(data)
    except (struct.error, ValueError) as error:
        raise CorruptFileError(f"{label} has an invalid header: {error}.") from error
    if not _is_possible(header, len(data) - header.body):
        raise CorruptFileError(f"{label} has an invalid header: its type, shape and size do not fit together.")
    if name and header.name and name != header.name:
        raise CorruptFileError(f"{label} holds the data of '{header.name}': the file's header is damaged.")
    return header


def peek_header(payload: np.ndarray | memoryview) -> Header:
    """Returns the header of a payload that `read_header` has checked before."""
    _, kind, ndim, *lengths, base_values, checksum, _ = _FIXED.unpack_from(payload)
    mode, code = kind & 15, kind >> 4
    if mode > MIXED or code > len(FLOATS):
        raise ValueError(f"mode {kind} is unknown")
    shape = struct.unpack_from(f"<{ndim}Q", payload, _FIXED.size)
    texts, start = [], _FIXED.size + 8 * ndim
    for length in lengths:
        texts.append(bytes(payload[start : start + length]).decode())
        start += length
    dtype, base_dtype, name, base_name = texts
    return Header(name, dtype, shape, mode, ["", *FLOATS][code], base_name, base_dtype, base_values, checksum, start)


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
        CorruptFileError: the payload is damaged.
        BaseModelError: the base's tensor is missing, or is not the one that was used to compress.
        MissingDependencyError: the C++ extension is not built.
    """
    header = header or read_header(payload)
    body = np.frombuffer(payload, np.uint8)[header.body :]
    label = f"Tensor '{header.name}'"
    if header.mode == STORED:
        tensor = RawTensor(header.dtype, header.shape, body.copy())
    else:
        if header.base_values and base is None:
            raise BaseModelError(f"{label} needs the tensor '{header.base_name}' of the base model.")
        if header.base_values and base is not None:
            header.require_base(base.dtype, base.shape)
        try:
            if header.mode == DEFLATED:
                data = _inflate(body, header.size)
                if header.base_values and base is not None:
                    data += base.data[: data.size]
            else:
                data = fresh_memory(header.size) if out is None else out
                _decode_floats(body, header, base, data, threads)
        except ValueError as error:
            # The payload's own checksum was right, so if there is a base, it is the wrong one.
            if header.base_values:
                raise _another_base(header) from error
            raise CorruptFileError(f"{label} cannot be decoded: {error}.") from error
        except TypeError as error:
            raise CorruptFileError(f"{label} cannot be decoded: {error}.") from error
        tensor = RawTensor(header.dtype, header.shape, data)
    if xxhash.xxh3_64_intdigest(tensor.data) != header.checksum:
        if header.base_values:
            raise _another_base(header)
        raise CorruptFileError(f"{label} is damaged: checksum mismatch after decoding. Download or save the file again.")
    return tensor


def apply_raw(payload: np.ndarray | bytes, tensor: RawTensor, header: Header | None = None, threads: int = 1) -> np.ndarray:
    """Turns the base's tensor into the one that was compressed against it, in place. On an error it stays as it was.

    Where few values changed, only these are written, and the memory this takes is 6 bytes for each; otherwise the new tensor is
    decoded beside the old one.

    Args:
        payload, header, threads: as for `decode_raw`.
        tensor: the base's tensor, of the same type and shape as the compressed one. Its data must be writable.

    Returns:
        The rows that changed: indices of the first dimension (int64), in increasing order.

    Raises:
        CorruptFileError, BaseModelError: as `decode_raw` does; also if type or shape of the two tensors differ.
    """
    header = header or read_header(payload)
    if (header.dtype, header.shape) != (tensor.dtype, tensor.shape) or header.base_values not in (0, header.values):
        raise BaseModelError(
            f"Tensor '{header.name}' is {header.dtype} {list(header.shape)} and cannot take the place of one that is "
            f"{tensor.dtype} {list(tensor.shape)}."
        )
    if header.base_values:
        header.require_base(tensor.dtype, tensor.shape)
    row_values = max(math.prod(header.shape[1:]), 1)
    listed = None
    has_own_type = header.mode == CODED and not header.narrow
    if has_own_type and header.base_values and tensor.data.ctypes.data % WIDTHS[header.dtype] == 0:
        try:
            listed = _native.list_changes(
                np.frombuffer(payload, np.uint8)[header.body :],
                tensor.data,
                FLOATS[header.dtype],
                row_length(header.shape),
                threads,
            )
        except ValueError as error:
            raise _another_base(header) from error
    if listed is None:
        new = decode_raw(payload, tensor, header, threads).data.reshape(-1, row_values * ITEMSIZE[header.dtype])
        old = tensor.data.reshape(new.shape)
        rows = np.flatnonzero((new != old).any(axis=1))
        old[rows] = new[rows]
        return rows
    places, values = np.frombuffer(listed[0], np.uint32), bytearray(listed[1])
    changed = np.zeros(header.values // row_values, bool)
    try:
        _native.exchange(tensor.data, places, values, row_values, changed)
        if xxhash.xxh3_64_intdigest(tensor.data) != header.checksum:
            raise _another_base(header)
    except BaseException:  # Ctrl-C included
        if values != listed[1]:  # they are what the tensor held
            _native.exchange(tensor.data, places, values, row_values, changed)
        raise
    return np.flatnonzero(changed)


def encode(tensor: torch.Tensor, base: torch.Tensor | None = None, threads: int = 1, level: int = DEFAULT_LEVEL) -> bytes:
    """Compresses a tensor in memory; see `encode_raw`."""
    twin = None if base is None else RawTensor.from_torch(base)
    return encode_raw(RawTensor.from_torch(tensor), twin, threads=threads, level=level)


def decode(payload: bytes, base: torch.Tensor | None = None, threads: int = 1) -> torch.Tensor:
    """Decodes a payload to a tensor in memory; see `decode_raw`."""
    return decode_raw(payload, None if base is None else RawTensor.from_torch(base), threads=threads).to_torch()


def apply(payload: bytes, tensor: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """Changes a contiguous tensor in the CPU's memory; see `apply_raw`."""
    import torch

    # The values of a conjugate or negative view differ from what its memory holds.
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError("only a contiguous tensor in the CPU's memory can be changed in place")
    return torch.from_numpy(apply_raw(payload, RawTensor.from_torch(tensor), threads=threads))


def _another_base(header: Header) -> BaseModelError:
    return BaseModelError(
        f"Tensor '{header.name}' cannot be restored: checksum mismatch. '{header.base_name}' of the base model has changed "
        "since it was compressed, or this is another base model."
    )


def _is_possible(header: Header, size: int) -> bool:
    """Checks that the fields of a header, which may be forged, fit each other and a body of `size` bytes."""
    width = ITEMSIZE.get(header.dtype)
    if header.narrow and (header.mode not in (CODED, MIXED) or header.narrow not in NARROWER.get(header.dtype, ())):
        return False
    if header.mode == CODED:
        with_base = header.base_values <= header.values and header.base_dtype in FLOATS or header.base_values == 0
        return header.dtype in FLOATS and with_base and 0 < header.values <= header.base_values + MAX_EXPANSION * size
    if header.mode == MIXED:
        possible = header.narrow != "" and header.base_values == 0 and _has_long_rows(header.shape)
        return possible and 0 < header.values <= MAX_EXPANSION * size
    if header.mode == DEFLATED:
        with_base = header.base_values == header.values and header.base_dtype == header.dtype or header.base_values == 0
        return width is not None and with_base and 0 < header.values * width <= MAX_INFLATION * size
    return size >= 0 and header.base_values == 0 and (width is None or size == header.values * width)


def _deflate(data: np.ndarray) -> bytes:
    # Z_RLE looks for runs only: in tensors, longer matches at other distances hardly occur.
    packer = zlib.compressobj(strategy=zlib.Z_RLE)
    parts = []
    for start in range(0, data.size, DEFLATE_AT_ONCE):
        check_awaited()
        parts.append(packer.compress(data[start : start + DEFLATE_AT_ONCE]))
    return b"".join(parts) + packer.flush()


def _inflate(body: np.ndarray, size: int) -> np.ndarray:
    unpacker, data = zlib.decompressobj(), np.empty(size, np.uint8)
    start = end = 0
    try:
        for start in range(0, body.size, DEFLATE_AT_ONCE):
            rest: bytes | memoryview = memoryview(body[start : start + DEFLATE_AT_ONCE])
            while len(rest) and not unpacker.eof and end <= size:
                check_awaited()
                part = unpacker.decompress(rest, min(size + 1 - end, DEFLATE_AT_ONCE))
                data[end : end + len(part)] = np.frombuffer(part, np.uint8)[: size - end]
                end, rest = end + len(part), unpacker.unconsumed_tail
            if unpacker.eof or end > size:
                break
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if end != size or not unpacker.eof or unpacker.unused_data or start + DEFLATE_AT_ONCE < body.size:
        raise ValueError(f"the zlib stream does not inflate to {size} bytes")
    return data


def _predicted_values(tensor: RawTensor, base: RawTensor | None) -> int:
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
    """Returns the mode byte and the body of a tensor if the base predicts its first `predicted` values. `coded` is the same
    tensor in the type in which its values are coded."""
    is_own, length = coded is tensor, row_length(tensor.shape)
    if is_own and not predicted and _has_long_rows(tensor.shape) and (mixed := encode_mixed(tensor, length, threads)):
        return MIXED | FLOATS[mixed[0]] << 4, mixed[1]
    data, prediction = aligned(coded.data, coded.dtype), _prediction(base, coded.dtype, predicted)
    changes = _changes(coded, data, prediction, level)
    body = _native.encode(data, prediction, FLOATS[coded.dtype], length, predicted, threads, changes)
    return CODED | (0 if is_own else FLOATS[coded.dtype] << 4), body


def _decode_floats(body: np.ndarray, header: Header, base: RawTensor | None, data: np.ndarray, threads: int) -> None:
    """Fills `data` from the body of a float tensor."""
    length, coded_dtype = row_length(header.shape), header.narrow or header.dtype
    if header.mode == MIXED:
        return decode_mixed(body, header.narrow, header.dtype, length, data, threads)
    coded = np.empty(header.values * WIDTHS[coded_dtype], np.uint8) if header.narrow else data
    prediction = _prediction(base, coded_dtype, header.base_values)
    _native.decode(body, (coded, prediction, FLOATS[coded_dtype], length, header.base_values, threads))
    if header.narrow:
        _native.cast(coded, FLOATS[coded_dtype], data, FLOATS[header.dtype])


def _changes(tensor: RawTensor, data: np.ndarray, prediction: np.ndarray | None, level: int) -> tuple[Factors, ...]:
    """Returns low-rank changes that may bring the base's values closer to the tensor's, whose aligned bytes are `data`."""
    length = row_length(tensor.shape)
    if level == LEVELS[0] or prediction is None or len(tensor.shape) < 2 or length != math.prod(tensor.shape[1:]):
        return ()
    try:
        from hf_ext.storage.delta import low_rank
    except ImportError as error:
        raise MissingDependencyError(
            "Compressing at levels 2 and 3 needs PyTorch, which is not installed: pip install torch, or compress with level=1."
        ) from error

    return tuple(low_rank.changes(data[: prediction.size], prediction, tensor.dtype, length, level))


def _prediction(base: RawTensor | None, dtype: str, values: int) -> np.ndarray | None:
    """Returns the first `values` values of the base as `dtype`."""
    if base is None or values == 0:
        return None
    return cast(base.data[: values * WIDTHS[base.dtype]], base.dtype, dtype)
