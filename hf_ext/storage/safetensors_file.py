"""Safetensors files and their tensors as bytes. Reads and writes headers; tensor data stay in the mapped file."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage.mapped import MappedFile
from hf_ext.storage.native import FLOATS

if TYPE_CHECKING:
    import torch

#: safetensors' names of the types that whole bytes hold: torch's name and the bytes of one value.
DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "U16": ("uint16", 2), "I16": ("int16", 2),
    "U32": ("uint32", 4), "I32": ("int32", 4), "U64": ("uint64", 8), "I64": ("int64", 8), "C64": ("complex64", 8),
    "F16": ("float16", 2), "BF16": ("bfloat16", 2), "F32": ("float32", 4), "F64": ("float64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}  # fmt: skip
ITEMSIZE = {name: size for name, (_, size) in DTYPES.items()}
#: Bits of one value of every type, also of those that share bytes: 4-bit floats, which torch counts in pairs, and 6-bit ones.
BITS = {name: 8 * size for name, size in ITEMSIZE.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
MAX_HEADER = 100_000_000  # bytes; the safetensors library's limit of a header


class Entry(NamedTuple):
    """A tensor's entry in the header of a safetensors file. Its data are the bytes from `begin` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class RawTensor:
    """A tensor as its bytes: `dtype` is safetensors' name of the type, `data` a flat uint8 array, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> RawTensor:
        """Returns the bytes of a tensor; on the CPU they share its memory where it is contiguous."""
        import torch

        if not has_values(tensor):
            raise CheckpointError(
                f"Only dense tensors with values have bytes, not sparse, nested or meta ones: {tensor!r:.80}."
            )
        dtype = safetensors_dtype(tensor.dtype)
        if dtype is None:
            raise CheckpointError(f"Tensors of type {tensor.dtype} cannot be written as safetensors.")
        # A single value is contiguous with any stride, which `reshape` would keep and `view` refuse.
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,))
        return cls(dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy())

    def require_bytes(self, name: str, writable: bool = False) -> None:
        """Raises CheckpointError unless `data` holds exactly the bytes that type and shape require, one after the other."""
        data = self.data
        is_flat = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous
        try:
            shape = [operator.index(length) for length in self.shape]
            size = byte_size(self.dtype, shape) if self.dtype in BITS else data.size
            fits = is_flat and data.size == size and min(shape, default=0) >= 0 and data.flags.writeable >= writable
        except (TypeError, AttributeError):
            fits = False
        if not fits:
            given = f"{data.dtype} {list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
            raise CheckpointError(
                f"Tensor '{name}' is {self.dtype} {self.shape}. Give its bytes as one contiguous{' writable' * writable} array "
                f"of uint8 of that size, not as {given}."
            )

    def to_torch(self) -> torch.Tensor:
        """Returns a tensor that shares this memory, or a copy if `data` is read-only, as a view of a mapped file is."""
        import torch

        shape, pairs = self.shape, getattr(torch, "float4_e2m1fn_x2", None) if self.dtype == "F4" else None
        if pairs is not None and shape and shape[-1] % 2 == 0:  # as the safetensors library returns them
            dtype, shape = pairs, (*shape[:-1], shape[-1] // 2)
        else:
            dtype = torch_dtype(self.dtype)
        if not self.data.size:  # torch cannot view an empty array as another type
            return torch.empty(shape, dtype=dtype)
        data = self.data if self.data.flags.writeable else self.data.copy()
        return torch.from_numpy(data).view(dtype).reshape(shape)

    def to_device(self, device: torch.device) -> torch.Tensor:
        """Returns a tensor on a device. It travels to a GPU through pinned memory, which is faster."""
        import torch

        if device.type != "cuda":
            return self.to_torch().to(device)
        pinned = torch.empty(self.data.size, dtype=torch.uint8, pin_memory=True).numpy()
        pinned[:] = self.data
        return replace(self, data=pinned).to_torch().to(device)


class TensorFile(Protocol):
    """A safetensors file whose tensors are read, decoded or computed on request."""

    path: Path
    header_bytes: bytes

    @property
    def metadata(self) -> Mapping[str, str]: ...

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def __getitem__(self, name: str) -> RawTensor: ...

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Gives back the memory that reading these bytes of a tensor took. Reading them again is possible."""


class SafetensorsFile:
    """A safetensors file, memory-mapped. The safetensors library checks its header before anything is read. Raises
    CorruptFileError if the file is missing or is not a safetensors file."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise CorruptFileError(f"{self.path} is not a file.")  # reading a pipe would wait forever
        try:
            with safe_open(self.path, framework="np"):
                pass
            self._mapped = MappedFile(self.path)
        except (SafetensorError, OSError) as error:
            raise CorruptFileError(
                f"{self.path} is not a readable safetensors file: {error}. Download or save it again."
            ) from error
        length = int.from_bytes(self._mapped.data[:8].tobytes(), "little")
        self.header_bytes = self._mapped.data[8 : 8 + length].tobytes()
        self.metadata, self.entries = parse_header(self.header_bytes)
        self._data = self._mapped.data[8 + length :]

    def __getitem__(self, name: str) -> RawTensor:
        """Returns a view of the mapped file; reads nothing yet."""
        entry = self.entries[name]
        return RawTensor(entry.dtype, entry.shape, self._data[entry.begin : entry.end])

    def require_whole(self) -> None:
        """Raises CorruptFileError if the file was truncated since it was opened: reading it would end the process."""
        if self.path.exists():
            now = self.path.stat()
            if now.st_ino == self._mapped.inode and now.st_size < self._mapped.data.size:
                raise CorruptFileError(f"{self.path} was cut off while it was in use. Restore it, and load the model again.")

    def read_sparsely(self, sparsely: bool = True) -> None:
        """Turns read-ahead off, for readers that need only a few parts of each tensor, or on again."""
        self._mapped.read_sparsely(sparsely)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        entry = self.entries[name]
        start = 8 + len(self.header_bytes) + entry.begin
        self._mapped.release(start + begin, start + (entry.nbytes if end is None else end))


class ComputedFile:
    """A safetensors file yet to be written, given dtype and shape of each tensor. `compute` returns a tensor by name, on
    request and from several threads."""

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        compute: Callable[[str], RawTensor],
        metadata: Mapping[str, str],
    ):
        self.path = Path(name)
        self.metadata = dict(metadata)
        self._compute = compute
        self.entries: dict[str, Entry] = {}
        end = 0
        # Large elements first, as the safetensors library does, so that all are aligned.
        for tensor, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-BITS.get(item[1][0], 0), item[0])):
            begin, end = end, end + byte_size(dtype, shape)
            self.entries[tensor] = Entry(dtype, tuple(shape), begin, end)
        self.header_bytes = write_header(self.metadata, self.entries)

    def __getitem__(self, name: str) -> RawTensor:
        return self._compute(name)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Does nothing: a computed tensor is freed with its last reference."""


def parse_header(header: bytes) -> tuple[dict[str, str], dict[str, Entry]]:
    """Returns the metadata and the entries (in the order of their data) of a safetensors header."""
    entries = json.loads(header)
    metadata = entries.pop("__metadata__", None) or {}
    return metadata, {
        name: Entry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    }


def require_valid(entries: Mapping[str, Entry], size: int) -> None:
    """Raises ValueError unless the tensors follow one another, fill `size` bytes, and have the sizes of their shapes. The
    safetensors library checks this when it opens a local file."""
    end = 0
    for name, (dtype, shape, begin, after) in entries.items():
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, after)) or not begin == end <= after:
            raise ValueError(f"the data of tensor '{name}' have no valid place")
        if dtype in BITS and after - begin != byte_size(dtype, shape):
            raise ValueError(f"the data of tensor '{name}' do not have the size of its shape")
        end = after
    if end != size:
        raise ValueError(f"the tensors take {end} bytes, the file has {size}")


def write_header(metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> bytes:
    """Returns a safetensors header, padded so that the data behind it are aligned."""
    header: dict = {"__metadata__": dict(metadata)}
    header |= {name: {"dtype": e.dtype, "shape": e.shape, "data_offsets": (e.begin, e.end)} for name, e in entries.items()}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text.ljust(-(-len(text) // 8) * 8)


def byte_size(dtype: str, shape: Iterable[int]) -> int:
    """Returns the bytes of a tensor. Raises CheckpointError if the type is unknown."""
    if dtype not in BITS:
        raise CheckpointError(f"Tensors of type {dtype} are not supported. This requires a newer version of hf_ext.")
    return -(-math.prod(shape) * BITS[dtype] // 8)


def float_name(dtypes: Iterable[str]) -> str | None:
    """Returns torch's name of the first float type among `dtypes`; None if there is none. Given the types in the order of the
    tensors' names, that is the type that Transformers loads for `dtype="auto"`."""
    return next((DTYPES[dtype][0] for dtype in dtypes if dtype in FLOATS), None)


def torch_dtype(dtype: str) -> torch.dtype:
    """Returns the torch type of this safetensors name. Raises CheckpointError if the installed PyTorch has no such type, or it
    packs several values into a byte."""
    import torch

    torch_type = getattr(torch, DTYPES[dtype][0], None) if dtype in DTYPES else None
    if torch_type is None:
        raise CheckpointError(f"Tensors of type {dtype} cannot be read with PyTorch {torch.__version__}.")
    return torch_type


def has_values(tensor: object) -> bool:
    """Checks whether a tensor is dense and holds values: it is not sparse, nested or on the device meta."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def safetensors_dtype(dtype: torch.dtype) -> str | None:
    """Returns the safetensors name of a torch type; None if safetensors files cannot hold it."""
    return _SAFETENSORS_NAMES.get(str(dtype).removeprefix("torch."))


_SAFETENSORS_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
