"""One tensor to a payload and back: the C++ codec behind a header that says what the payload is and how to check it.

The header's layout is in docs/fm_delta_format.md. A payload is complete in itself but for the base's tensor: wherever it
turns up (a safetensors file, a state dict) it can be recognised, checked and decoded.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.delta import DEFAULT_LEVEL, LEVELS, low_rank
from hf_ext.storage.native import FLOATS, WIDTHS, _native, aligned, as_numbers, cast
from hf_ext.storage.safetensors_file import ITEMSIZE, RawTensor, torch_dtype

VERSION = 2
VERSIONS = range(1, VERSION + 1)
MAGIC = b"FMD" + bytes([VERSION])
STORED, CODED, DEFLATED = 0, 1, 2
SHORT_ROW, FLAT_ROW = 64, 1024  # rows shorter than the first share a scale, up to the second together
GRID_SAMPLE = 4096  # values of a tensor that tell how finely its type resolves them
MAX_EXPANSION = 64  # values without a base that a byte of a body may stand for; at most 4/3 do, as their low bits are verbatim
MAX_INFLATION = 1032  # bytes that one of Deflate stands for at most

_FIXED = struct.Struct("<4sBBBBHHQQQ")  # magic, mode, ndim, lengths of 2 dtypes, of 2 names, base values, 2 checksums


@dataclass(frozen=True)
class Header:
    """What a payload says of itself.

    Attributes:
        name: the tensor's name in the checkpoint.
        dtype, shape: of the tensor, in safetensors' terms.
        mode: STORED if the tensor's bytes follow as they are, CODED by the C++ codec, or DEFLATED.
        base_name, base_dtype: the tensor of the base that predicts it; empty if none does.
        base_values: how many leading values that tensor predicts.
        checksum: XXH3-64 of the tensor's bytes.
        body: where the body starts in the payload.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    mode: int
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
        """Bytes of the tensor, if it is of a known type."""
        return self.values * ITEMSIZE[self.dtype]


def payload_shape(ndim: int, size: int) -> tuple[int, ...]:
    """The shape under which a payload of `size` bytes stands in a file: never of as many dimensions as its tensor, so
    that a loader without this codec cannot take it for the tensor."""
    return (1, size) if ndim == 1 else (size,)


def is_payload(data: np.ndarray | torch.Tensor) -> bool:
    """Whether an array of bytes starts as a payload does."""
    if str(data.dtype).removeprefix("torch.") != "uint8":
        return False
    flat = data.reshape(-1)
    return len(flat) >= _FIXED.size and bytes(flat[:3].tolist()) == MAGIC[:3] and int(flat[3]) in VERSIONS


def row_length(shape: tuple[int, ...]) -> int:
    """Values that share a row scale: all of one first index, or of several where that is fewer than SHORT_ROW."""
    trailing = max(math.prod(shape[1:]), 1)
    return trailing if trailing >= SHORT_ROW else FLAT_ROW // trailing * trailing


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
        tensor: of any type; floats of 16, 32 and 64 bits are coded, all others deflated.
        base: its counterpart in the base model: a float tensor of the same shape, or one whose rows are the tensor's first
            rows or begin with all of the tensor's (a resized embedding); for what is deflated, a tensor of the same type and
            shape. Otherwise it is left aside.
        name, base_name: what the two are called in their checkpoints.
        threads: for tensors of more than 262,144 values.
        level: 1 takes values one by one; 2 looks for a low-rank part of a matrix's change first, and 3 longer.

    Raises:
        CheckpointError: the tensor has more than 255 dimensions or a name of more than 65,535 bytes.
        ValueError: there is no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {LEVELS}, not {level!r}")
    checksum = xxhash.xxh3_64_intdigest(tensor.data)
    mode, base_values, body = STORED, 0, memoryview(tensor.data)
    if tensor.dtype in FLOATS and tensor.data.size:
        data = aligned(tensor.data, tensor.dtype)
        base_values = _predicted_values(tensor, base)
        attempts = [base_values, 0] if base_values else [0]
        for predicted in attempts:
            prediction = _prediction(base, tensor.dtype, predicted)
            changes = _changes(tensor, prediction, predicted, level)
            candidate = _native.encode(
                data, prediction, FLOATS[tensor.dtype], row_length(tensor.shape), predicted, threads, changes
            )
            if len(candidate) < len(body):
                mode, base_values, body = CODED, predicted, candidate
            # A base that saves a quarter is this tensor's base; one that does not may be a stranger of the same shape.
            if len(candidate) < 0.75 * tensor.data.size:
                break
        if mode == STORED:
            base_values = 0
    elif tensor.dtype in ITEMSIZE and tensor.data.size:
        alike = base is not None and (base.dtype, base.shape) == (tensor.dtype, tensor.shape)
        for predicted in [math.prod(tensor.shape), 0] if alike else [0]:
            candidate = _deflate(tensor.data - base.data if predicted else tensor.data)
            if len(candidate) < len(body):
                mode, base_values, body = DEFLATED, predicted, candidate
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
        raise CheckpointError(f"Tensor '{name[:100]}' has too many dimensions or too long a name to be compressed.") from error
    integrity.update(body)
    return b"".join((header(integrity.intdigest()), variable, body))


def read_header(payload: np.ndarray | bytes, name: str = "") -> Header:
    """Checks a whole payload against its checksum and reads its header.

    Raises:
        CorruptFileError: it is not a payload, not of this format version, not as it was written, or belongs to a tensor of
            another name than `name` (if given).
    """
    data = memoryview(payload).cast("B")
    where = f"Tensor '{name}'" if name else "The payload"
    if len(data) < _FIXED.size or bytes(data[:3]) != MAGIC[:3]:
        raise CorruptFileError(f"{where} is not compressed by FM-Delta, or the file is damaged.")
    if data[3] not in VERSIONS:
        raise CorruptFileError(
            f"{where} is of format version {data[3]}, this hf_ext reads up to version {VERSION}: update hf_ext, or the file is "
            "damaged."
        )
    integrity = int.from_bytes(data[_FIXED.size - 8 : _FIXED.size], "little")
    found = xxhash.xxh3_64(data[: _FIXED.size - 8])
    found.update(bytes(8))
    found.update(data[_FIXED.size :])
    if found.intdigest() != integrity:
        raise CorruptFileError(f"{where} is damaged: its bytes do not have the checksum they were written with.")
    try:
        header = peek_header(data)
    except (struct.error, ValueError) as error:
        raise CorruptFileError(f"{where} has a header that cannot be read: {error}.") from error
    if not _is_possible(header, len(data) - header.body):
        raise CorruptFileError(f"{where} claims a type or sizes that its bytes cannot have.")
    if name and header.name and name != header.name:
        raise CorruptFileError(f"{where} holds the data of '{header.name}': the file's header is damaged.")
    return header


def peek_header(payload: np.ndarray | memoryview) -> Header:
    """Reads the header of a payload that `read_header` has checked before."""
    _, mode, ndim, *lengths, base_values, checksum, _ = _FIXED.unpack_from(payload)
    if mode not in (STORED, CODED, DEFLATED):
        raise ValueError(f"mode {mode} is unknown")
    shape = struct.unpack_from(f"<{ndim}Q", payload, _FIXED.size)
    texts, start = [], _FIXED.size + 8 * ndim
    for length in lengths:
        texts.append(bytes(payload[start : start + length]).decode())
        start += length
    dtype, base_dtype, name, base_name = texts
    return Header(name, dtype, shape, mode, base_name, base_dtype, base_values, checksum, start)


def decode_raw(
    payload: np.ndarray | bytes,
    base: RawTensor | None = None,
    header: Header | None = None,
    threads: int = 1,
    out: np.ndarray | None = None,
) -> RawTensor:
    """Gives back the tensor of a payload, bit for bit.

    Args:
        payload: as `encode_raw` made it.
        base: the tensor `header.base_name` of the base model; not needed where that name is empty.
        header: what `read_header` returned, if it was called before; the payload's checksum is then not computed again.
        out: memory for a coded tensor's bytes, of its size; it is written even if an error follows.

    Raises:
        CorruptFileError: the payload is damaged.
        BaseModelError: the base's tensor is missing or is not the one that was used to compress.
    """
    header = header or read_header(payload)
    body = np.frombuffer(payload, np.uint8)[header.body :]
    label = f"Tensor '{header.name}'"
    another_base = BaseModelError(
        f"{label} does not come out as it was saved: '{header.base_name}' of the base model has changed since then, or this is "
        "another base model."
    )
    if header.mode == STORED:
        tensor = RawTensor(header.dtype, header.shape, body.copy())
    else:
        if header.base_values and base is None:
            raise BaseModelError(f"{label} needs the tensor '{header.base_name}' of the base model.")
        if header.base_values and (
            base.dtype != header.base_dtype or base.data.size // ITEMSIZE[base.dtype] < header.base_values
        ):
            raise BaseModelError(
                f"{label} was compressed against a {header.base_dtype} tensor with at least {header.base_values} values; "
                f"'{header.base_name}' of the base is {base.dtype} {list(base.shape)}. This is another base model."
            )
        try:
            if header.mode == DEFLATED:
                data = _inflate(body, header.size)
                if header.base_values:
                    data += base.data[: data.size]
            else:
                data = np.empty(header.size, np.uint8) if out is None else out
                prediction = _prediction(base, header.dtype, header.base_values)
                _native.decode(
                    body, (data, prediction, FLOATS[header.dtype], row_length(header.shape), header.base_values, threads)
                )
        except ValueError as error:
            # Its bytes are what was written, so it is the base that makes no sense of them.
            raise another_base if header.base_values else CorruptFileError(f"{label} cannot be decoded: {error}.") from error
        except TypeError as error:
            raise CorruptFileError(f"{label} cannot be decoded: {error}.") from error
        tensor = RawTensor(header.dtype, header.shape, data)
    if xxhash.xxh3_64_intdigest(tensor.data) != header.checksum:
        if header.base_values:
            raise another_base
        raise CorruptFileError(f"{label} does not come out as it was saved: the file is damaged.")
    return tensor


def encode(tensor: torch.Tensor, base: torch.Tensor | None = None, threads: int = 1, level: int = DEFAULT_LEVEL) -> bytes:
    """`encode_raw` for tensors in memory."""
    twin = None if base is None else RawTensor.from_torch(base)
    return encode_raw(RawTensor.from_torch(tensor), twin, threads=threads, level=level)


def decode(payload: bytes, base: torch.Tensor | None = None, threads: int = 1) -> torch.Tensor:
    """`decode_raw` for tensors in memory."""
    return decode_raw(payload, None if base is None else RawTensor.from_torch(base), threads=threads).to_torch()


def _is_possible(header: Header, size: int) -> bool:
    """Whether the fields of a header agree with each other and with a body of `size` bytes; those of a forged one may not."""
    width = ITEMSIZE.get(header.dtype)
    if header.mode == CODED:
        with_base = header.base_values <= header.values and header.base_dtype in FLOATS or header.base_values == 0
        return header.dtype in FLOATS and with_base and 0 < header.values <= header.base_values + MAX_EXPANSION * size
    if header.mode == DEFLATED:
        with_base = header.base_values == header.values and header.base_dtype == header.dtype or header.base_values == 0
        return width is not None and with_base and 0 < header.values * width <= MAX_INFLATION * size
    return size >= 0 and header.base_values == 0 and (width is None or size == header.values * width)


def _deflate(data: np.ndarray) -> bytes:
    # Distances other than one are not looked for: numbers repeat each other in runs, and otherwise only by chance.
    packer = zlib.compressobj(strategy=zlib.Z_RLE)
    return packer.compress(data) + packer.flush()


def _inflate(body: np.ndarray, size: int) -> np.ndarray:
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(body, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(data) != size or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"its bytes do not inflate to {size}")
    return np.frombuffer(bytearray(data), np.uint8)


def _predicted_values(tensor: RawTensor, base: RawTensor | None) -> int:
    """How many leading values of the tensor have a counterpart in the base: all, whole rows, or none."""
    if base is None or base.dtype not in FLOATS or len(base.shape) != len(tensor.shape):
        return 0
    if base.shape == tensor.shape:
        return math.prod(tensor.shape)
    if len(tensor.shape) < 2 or base.shape[1:] != tensor.shape[1:]:
        return 0
    values, shared = math.prod(tensor.shape), min(base.shape[0], tensor.shape[0]) * math.prod(tensor.shape[1:])
    return values if shared == values else shared - shared % row_length(tensor.shape)


def _changes(tensor: RawTensor, prediction: np.ndarray | None, values: int, level: int) -> tuple[low_rank.Factors, ...]:
    """Low-rank changes that may bring the base's values closer to the tensor's."""
    length = row_length(tensor.shape)
    if level == LEVELS[0] or prediction is None or len(tensor.shape) < 2 or length != math.prod(tensor.shape[1:]):
        return ()
    data = aligned(tensor.data[: prediction.size], tensor.dtype)
    change = np.empty((values // length, length), np.float32)
    energies = np.empty(len(change))
    _native.subtract(data, prediction, FLOATS[tensor.dtype], length, change, energies)

    def spacing(data: np.ndarray) -> np.ndarray:
        return low_rank.spacing(as_numbers(data, tensor.dtype), torch.finfo(torch_dtype(tensor.dtype)))

    sample = data.reshape(values, -1)[:: 1 + values // GRID_SAMPLE].reshape(-1)
    with np.errstate(over="ignore"):  # float64 values may be too far apart to be squared
        grid = float(np.exp2(2.0 * spacing(sample)).mean()) / 12
    return tuple(low_rank.candidates(change, energies, grid, lambda: spacing(data).reshape(change.shape), level))


def _prediction(base: RawTensor | None, dtype: str, values: int) -> np.ndarray | None:
    """The first `values` values of the base as `dtype`."""
    if base is None or values == 0:
        return None
    return cast(base.data[: values * WIDTHS[base.dtype]], base.dtype, dtype)
