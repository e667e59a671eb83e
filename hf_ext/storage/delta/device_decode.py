"""Decodes payloads on a GPU, bit for bit as the CPU does. Off unless `HF_EXT_DEVICE_DECODE=1`.

The payload's bytes and what its header says travel to the device as they are; Triton kernels decode them onto the base's tensor
there (device_kernels.py). What these do not take, or fail at, is decoded on the CPU, whose result or error then counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from hf_ext.errors import HfExtError
from hf_ext.storage.delta.codec import encode_raw
from hf_ext.storage.delta.payload import CODED, STACKED, Header, read_header, read_matrices, row_length
from hf_ext.storage.native import FLOATS, MANTISSA, WIDTHS, _native
from hf_ext.storage.prefetch import AHEAD, BatchPrefetcher, Result
from hf_ext.storage.safetensors_file import RawTensor, safetensors_dtype, torch_dtype

if TYPE_CHECKING:
    from hf_ext.storage.source import TensorSource

logger = logging.getLogger(__name__)

SWITCH = "HF_EXT_DEVICE_DECODE"
TYPES = ("BF16", "F16", "F32")
LEAST = 241  # bytes of a tensor: see device_checksum.py
LONGEST_ROW = 1 << 30  # so that places in a block have 31 bits
TABLES, SYMBOLS, SLOTS = 33, 64, 2048
ALONE, LANES = 0, 4  # of the numbers that `_native.layout` returns of a block
BAND = 16  # rows that a program moves
CPU = torch.device("cpu")

Payload: TypeAlias = tuple[np.ndarray, Header]

_faulty: set[torch.device] = set()  # the CPU decodes for these


class Request(NamedTuple):
    """A tensor to decode: what `bodies_of` returns, and the base's tensor on the device, if that predicts it."""

    header: Header
    bodies: Sequence[tuple[Header, np.ndarray]]
    base: torch.Tensor | None


class Body(NamedTuple):
    """The body of a tensor or of a matrix, and its place on the device, which holds the base's values in front."""

    request: int  # to which it belongs
    header: Header
    data: np.ndarray
    out: torch.Tensor  # flat


def decoding_device(devices: Iterable[Any]) -> torch.device:
    """Returns the device on which weights for these devices are decoded: theirs if it is one GPU and `HF_EXT_DEVICE_DECODE=1`;
    otherwise the CPU."""
    if os.environ.get(SWITCH) != "1" or len(names := {str(device) for device in devices}) != 1 or names & {"disk", "meta"}:
        return CPU
    (name,) = names
    device = torch.device(int(name) if name.isdigit() else name)
    return device if device.type == "cuda" else CPU


def reading(source: TensorSource, names: Iterable[str], device: torch.device) -> BatchPrefetcher[torch.Tensor]:
    """Returns a source's tensors on a device, read ahead in this order."""
    return ahead(lambda batch: source.read_on(batch, device), {name: source.entry(name).nbytes for name in names}, device)


def ahead(work: Callable[[list[str]], list[Result]], sizes: dict[str, int], device: torch.device) -> BatchPrefetcher[Result]:
    """Returns the results of work on a device, in batches that suit it."""
    return BatchPrefetcher(work, sizes, batch_size(device))


def batch_size(device: torch.device) -> int:
    """Returns the bytes of tensors to decode at once on a device: on a GPU some hundred blocks, which fill it."""
    return AHEAD // 2 if device.type == "cuda" else 0


def read_on(
    source: TensorSource, names: Iterable[str], coded: Callable[[str], Payload | None], base: TensorSource, device: torch.device
) -> list[torch.Tensor]:
    """Returns tensors of a source on a device. Decodes there what it can. `coded` returns the payload and the header of a
    tensor, after checking that they are intact, and None if the tensor is not coded."""
    decoded: dict[str, torch.Tensor] = {}
    if device not in _faulty and _works(device):
        decoded = _decode({name: payload for name in names if (payload := coded(name))}, base, device)
    return [decoded.pop(name) if name in decoded else source.read(name).to_device(device) for name in names]


def _decode(payloads: dict[str, Payload], base: TensorSource, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns those tensors that the device can decode."""
    headers = {name: header for name, (_, header) in payloads.items()}
    bodies = {name: found for name, payload in payloads.items() if (found := bodies_of(*payload))}
    predicted = [name for name in bodies if headers[name].base_values and headers[name].base_name in base]
    try:
        with _own_stream(device) as results:
            before = dict(zip(predicted, base.read_on([headers[name].base_name for name in predicted], device)))
            requests = [Request(headers[name], found, before.get(name)) for name, found in bodies.items()]
            decoded = {name: tensor for name, tensor in zip(bodies, decode_onto(requests, device)) if tensor is not None}
            results += decoded.values()
        return decoded
    except (HfExtError, ValueError):  # the CPU's error names the file
        return {}
    except Exception as error:  # of the kernels' compiler, the driver or the device's memory
        _give_up(device, error)
        return {}
    finally:
        for name in predicted:
            base.release(headers[name].base_name)


def decode_onto(requests: Sequence[Request], device: torch.device) -> list[torch.Tensor | None]:
    """Returns tensors, in the base's memory if both have one shape; None for those whose checksum differs. Raises
    BaseModelError if a base is of another type or shape, ValueError if sizes in a body do not fit."""
    outs: list[torch.Tensor | None] = []
    parts: list[Body] = []
    for request in requests:
        outs.append(out := _memory(request, device))
        memory = out.view(-1).split(out.numel() // len(request.bodies))
        parts += [Body(len(outs) - 1, *body, part) for body, part in zip(request.bodies, memory)]
    for wrong in decode_bodies(parts, device):
        outs[wrong] = None
    return outs


def _memory(request: Request, device: torch.device) -> torch.Tensor:
    """Returns the memory of a tensor, which holds the base's values in front."""
    header, base = request.header, request.base
    if base is not None:
        header.require_base(safetensors_dtype(base.dtype) or "", base.shape)
        if tuple(base.shape) == header.shape:
            return base
    out = torch.empty(header.shape, dtype=torch_dtype(header.dtype), device=device)
    if base is not None:
        out.view(-1)[: header.base_values] = base.view(-1)[: header.base_values]
    return out


def bodies_of(payload: np.ndarray, header: Header) -> list[tuple[Header, np.ndarray]]:
    """Returns the header and the body of a tensor, or of each matrix of a STACKED one; [] if the kernels do not take one."""
    bodies = read_matrices(payload, header) if header.mode == STACKED else [(header, payload[header.body :])]

    def is_taken(part: Header) -> bool:
        is_plain = part.mode == CODED and not part.narrow and part.dtype in TYPES
        has_same_type = part.base_values == 0 or part.base_dtype == part.dtype
        has_checksum = part.size >= LEAST and (len(bodies) == 1 or part.size % 8 == 0)
        return is_plain and has_same_type and has_checksum and row_length(part.shape) < LONGEST_ROW

    return bodies if all(is_taken(part) for part, _ in bodies) else []


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Runs a block on a stream of the thread's own, and waits for what it started. The block fills the list with the tensors
    that the caller's stream uses later."""
    results: list[torch.Tensor] = []
    if device.type != "cuda":
        yield results
        return
    consumer, stream = torch.cuda.current_stream(device), _stream(device, threading.get_ident())
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield results
        stream.synchronize()
    for tensor in results:
        tensor.record_stream(consumer)


@cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Arena:
    """Arrays that travel to the device together. Offsets are multiples of 16 bytes."""

    def __init__(self) -> None:
        self.arrays: list[tuple[int, np.ndarray]] = []
        self.size = 0

    def add(self, array: np.ndarray | bytes) -> int:
        """Returns the offset of an array."""
        data = np.frombuffer(array, np.uint8)
        offset, self.size = self.size, self.size + -(-data.size // 16) * 16
        self.arrays.append((offset, data))
        return offset

    def on(self, device: torch.device) -> torch.Tensor:
        memory = torch.empty(self.size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        view = memory.numpy()
        for offset, data in self.arrays:
            view[offset : offset + data.size] = data
        return memory.to(device, non_blocking=True)


class Layout:
    """The description of a body for the kernels. Sizes in the header are checked before anything is allocated.

    Attributes:
        frequencies: of the symbols in each table.
        changes: of each block, if it is a list of changes; otherwise 0.
        kind: the constants of the kernels for its type.
        wide: whether sums of the low-rank change need more than 32 bits.
    """

    def __init__(self, index: int, part: Body, arena: Arena):
        self.index, self.out, header, length = index, part.out, part.header, row_length(part.header.shape)
        shape = FLOATS[header.dtype], header.values, length, header.base_values
        self.plane, step, self.exponent, wide, rows, *scales, frequencies, classes, left, right, counts, blocks = (
            _native.layout(part.data, *shape)
        )
        self.kind, self.wide = (8 * WIDTHS[header.dtype], MANTISSA[header.dtype]), bool(wide)
        self.step = int(np.float32(step).view(np.int32))
        self.frequencies = np.frombuffer(frequencies, np.uint16).reshape(TABLES, SYMBOLS)
        self.classes, self.scaled, self.rank = len(classes) // 16, len(scales[1]) // 2, len(right) // (4 * length)
        self.length, self.base_values, self.base_rows = length, header.base_values, len(left) // (4 * max(self.rank, 1))
        self.arrays = [arena.add(array) for array in (rows, *scales, classes, left, right)]
        self.described = np.frombuffer(blocks, np.int64).reshape(-1, 7)
        self.counts_at = arena.add(counts)
        counted = np.frombuffer(counts, np.int32).reshape(len(self.described), self.classes)
        self.is_list = (self.described[:, LANES] > 0) & (self.described[:, ALONE] == 0) & (self.classes > 0)
        self.changes = np.where(self.is_list, counted.sum(1), 0)
        self.data_at = arena.add(part.data)

    def fields(self, table_of: int, slots: int) -> list[int]:
        """Returns the numbers that describe the tensor."""
        rows, row_scales, column_scales, classes, left, right = self.arrays
        scales = [row_scales, column_scales, table_of, slots, self.scaled, self.plane, self.step]
        change = [left, right, self.rank, self.exponent, self.base_values]
        return [self.out.data_ptr(), self.length, rows, *scales, classes, self.classes, *change]

    def blocks(self, numbers: int) -> np.ndarray:
        """Returns the numbers that describe each block, whose changes are stored behind so many others."""
        blocks = np.empty((len(self.described), 10), np.int64)
        blocks[:, 0], blocks[:, 1:8] = self.index, self.described
        blocks[:, 6:8] += self.data_at
        blocks[:, 8] = numbers + 2 * (np.cumsum(self.changes) - self.changes)
        blocks[:, 9] = self.counts_at + 4 * self.classes * np.arange(len(blocks))
        return blocks

    def bands(self) -> np.ndarray:
        """Returns the numbers that describe each band of rows that a low-rank change moves."""
        first = np.arange(0, self.base_rows, BAND)
        return np.stack([np.full_like(first, self.index), first, np.full_like(first, self.base_rows)], 1)


def decode_bodies(parts: Sequence[Body], device: torch.device) -> list[int]:
    """Decodes bodies, all in the same few launches. Returns the requests that do not give the tensor that was encoded."""
    if not parts:
        return []
    from hf_ext.storage.delta import device_kernels as kernels
    from hf_ext.storage.delta.device_checksum import checksums

    arena, numbers = Arena(), 0
    layouts = [Layout(i, part, arena) for i, part in enumerate(parts)]
    frequencies = np.concatenate([layout.frequencies for layout in layouts])
    frequencies, table_of = np.unique(frequencies, axis=0, return_inverse=True)
    slots = arena.add(_slots(frequencies.astype(np.uint32)))
    table_at = arena.add(table_of.astype(np.int32))
    tensors = arena.add(np.array([one.fields(table_at + 4 * TABLES * one.index, slots) for one in layouts], np.int64))
    work: dict[tuple, list[np.ndarray]] = defaultdict(list)  # by kernel and its constants
    for layout in layouts:
        if layout.rank:
            work[kernels.move_base, *layout.kind, layout.wide].append(layout.bands())
    for layout in layouts:
        blocks = layout.blocks(numbers)
        numbers += 2 * int(layout.changes.sum())
        work[kernels.decode_values, *layout.kind].append(blocks[~layout.is_list])
        work[kernels.decode_numbers,].append(blocks[layout.is_list])
        work[kernels.apply_changes, *layout.kind].append(blocks[layout.is_list])
    tables = {key: np.concatenate(described) for key, described in work.items()}
    placed = {key: (arena.add(table), len(table)) for key, table in tables.items()}
    memory, errors = arena.on(device), torch.zeros(len(parts), dtype=torch.int32, device=device)
    scratch = torch.empty(numbers, dtype=torch.int32, device=device)
    for key in sorted(placed, key=lambda key: [*kernels.WARPS].index(key[0])):
        (kernel, *constants), (offset, count) = key, placed[key]
        if count:
            arguments = memory, memory[offset:].view(torch.int64), memory[tensors:].view(torch.int64), errors, scratch
            kernel[(count,)](*arguments, *constants, num_warps=kernels.WARPS[kernel], enable_fp_fusion=False)
    found = zip(parts, checksums([part.out for part in parts]), errors.tolist())
    return [part.request for part, checksum, error in found if error or checksum != part.header.checksum]


def _slots(frequencies: np.ndarray) -> np.ndarray:
    """Returns what each slot of some tables says: frequency | place among the symbol's slots << 12 | symbol << 26."""
    symbols = np.arange(SYMBOLS, dtype=np.uint32)
    first = np.cumsum(frequencies, 1, dtype=np.uint32) - frequencies
    entries = frequencies + (symbols << 26) - (first << 12)
    slots = np.repeat(entries.reshape(-1), frequencies.reshape(-1)).reshape(-1, SLOTS)
    return slots + (np.arange(SLOTS, dtype=np.uint32) << 12)


@cache
def _works(device: torch.device) -> bool:
    """Checks on small tensors whether a device decodes as the CPU does; warns if a GPU does not."""
    if device.type != "cuda":
        return False
    rng = np.random.default_rng(0)
    change = rng.normal(0, 1e-3, (128, 2)) @ rng.normal(0, 1, (2, 160)) + rng.normal(0, 1e-4, (128, 160))
    try:
        for dtype, share in product(TYPES, (0.02, 1)):
            base = torch.from_numpy(rng.normal(0, 0.02, change.shape))
            after = base + torch.from_numpy(change * (rng.random(change.shape) < share))
            base, after = (tensor.to(torch_dtype(dtype)) for tensor in (base, after))
            payload = np.frombuffer(encode_raw(RawTensor.from_torch(after), RawTensor.from_torch(base)), np.uint8)
            header = read_header(payload)
            with _own_stream(device):
                request = Request(header, bodies_of(payload, header), base.to(device, copy=True))
                (decoded,) = decode_onto([request], device)
            if decoded is None or not torch.equal(decoded.cpu(), after):
                raise ValueError(f"a tensor of type {dtype} differs")
    except Exception as error:
        _give_up(device, error)
        return False
    return True


def _give_up(device: torch.device, error: Exception) -> None:
    """Lets the CPU decode for a device from now on, with a warning."""
    if device not in _faulty:
        _faulty.add(device)
        logger.warning(f"Decoding on {device} failed ({type(error).__name__}: {error}). The CPU decodes instead.")
