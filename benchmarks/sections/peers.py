"""The codecs that the benchmarks compare with, behind one small interface, each on one thread.

A `Peer` works on one tensor given as its bit patterns (uint32 for fp32, uint16 for bf16 and fp16) and on the bit patterns of
its base of the same shape, never empty, and may be called from several threads. Install the peers with
``pip install zstandard zipnn pcodec``; for fm-delta, which is optional, see `fm_delta`.

Left out: z4ai, slower than pcodec and hardly smaller; glyd, several times larger; lmzip, which uses no base; reminis, which
works on SQLite databases of whole models; bigsmall, which works on files, at 1 to 10 MB a second, and is not under an
open-source license; hexz, whose Python package (0.8.2) reads archives with a base wrongly; and deltatensors, which is lossy.
"""

import importlib
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

WORDS = {"fp32": np.uint32, "bf16": np.uint16, "fp16": np.uint16}
ZIPNN_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class OfThread(threading.local):
    """A coder for each thread, because a coder serves only one thread at a time. Imports a library with its first coder."""

    @cached_property
    def zstd(self):
        return importlib.import_module("zstandard").ZstdCompressor(level=3)

    @cached_property
    def unzstd(self):
        return importlib.import_module("zstandard").ZstdDecompressor()

    @cached_property
    def zipnn(self):
        coder = importlib.import_module("zipnn").ZipNN
        return {dtype: coder(bytearray_dtype=name, threads=1) for dtype, name in ZIPNN_NAMES.items()}


of_thread = OfThread()


@dataclass(frozen=True)
class Peer:
    """A named codec: ``compress(x, base, dtype) -> bytes`` and ``decompress(blob, base, dtype, shape) -> array``.

    The base may be None for zipnn and zstd.
    """

    name: str
    compress: Callable[[np.ndarray, np.ndarray | None, str], bytes]
    decompress: Callable[[bytes, np.ndarray | None, str, tuple], np.ndarray]


def to_ordered(x: np.ndarray) -> np.ndarray:
    """Maps bit patterns to integers in the order of the floats they stand for."""
    top = 8 * x.itemsize - 1
    negative = (x.view(f"i{x.itemsize}") >> top).view(x.dtype)
    return x ^ (negative | x.dtype.type(1 << top))


def from_ordered(x: np.ndarray) -> np.ndarray:
    """Inverts `to_ordered`."""
    top = 8 * x.itemsize - 1
    positive = (x.view(f"i{x.itemsize}") >> top).view(x.dtype)
    return x ^ (~positive | x.dtype.type(1 << top))


def zstd_raw() -> Peer:
    """Returns zstd, level 3, on the plain bytes, without the base."""

    def decompress(blob, base, dtype, shape):
        return np.frombuffer(of_thread.unzstd.decompress(blob), WORDS[dtype]).reshape(shape)

    return Peer("zstd-3 raw", lambda x, base, dtype: of_thread.zstd.compress(x.tobytes()), decompress)


def zstd_xor_planes() -> Peer:
    """Returns XOR with the base, followed by one zstd frame (level 3) for the i-th bytes of all numbers, for each i."""

    def compress(x, base, dtype):
        planes = (x ^ base).reshape(-1).view(np.uint8).reshape(-1, x.itemsize)
        frames = [of_thread.zstd.compress(plane.tobytes()) for plane in planes.T]
        return struct.pack(f"<{len(frames)}I", *map(len, frames)) + b"".join(frames)

    def decompress(blob, base, dtype, shape):
        width = base.itemsize
        xor = np.empty((base.size, width), np.uint8)
        start = 4 * width
        for i, length in enumerate(struct.unpack_from(f"<{width}I", blob)):
            xor[:, i] = np.frombuffer(of_thread.unzstd.decompress(memoryview(blob)[start : start + length]), np.uint8)
            start += length
        return xor.view(WORDS[dtype]).reshape(shape) ^ base

    return Peer("zstd-3 XOR planes", compress, decompress)


def zip_nn() -> Peer:
    """Returns ZipNN, without the base. The dtype sets its byte groups and bit order.

    Its compress reorders its input in place, so the copy made by ``tobytes`` is needed.
    """

    def decompress(blob, base, dtype, shape):
        return np.frombuffer(of_thread.zipnn[dtype].decompress(blob), WORDS[dtype]).reshape(shape)

    return Peer("zipnn", lambda x, base, dtype: bytes(of_thread.zipnn[dtype].compress(x.tobytes())), decompress)


def pcodec_delta() -> Peer:
    """Returns pcodec, at its default level, on the numbers' wrapping difference from the base, as ordered integers."""
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec
    from pcodec import standalone as pco

    config = ChunkConfig(mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())

    def compress(x, base, dtype):
        delta = to_ordered(x) - to_ordered(base)
        return pco.simple_compress(delta.reshape(-1).view(f"i{x.itemsize}"), config)

    def decompress(blob, base, dtype, shape):
        delta = pco.simple_decompress(blob).view(WORDS[dtype]).reshape(shape)
        return from_ordered(delta + to_ordered(base))

    return Peer("pcodec", compress, decompress)


def fm_delta() -> Peer | None:
    """Returns the code of the FM-Delta authors; None if it is not installed.

    It has no bf16; bf16 goes in as float16, which that code treats as plain signed-magnitude bit patterns. It raises an error
    where it would enlarge a tensor by more than 28 bytes; such a tensor is stored unchanged, behind a tag byte.
    """
    try:
        import fmd
    except ImportError:
        print("fm-delta is left out: install the authors' code from github.com/ningwanyi/FM-Delta to measure it too.")
        return None

    def floats(x):
        return np.ascontiguousarray(x).reshape(-1).view(f"f{x.itemsize}")

    def compress(x, base, dtype):
        try:
            return b"\1" + fmd.compress_param(floats(base), floats(x))
        except fmd.FmdWriteError:
            return b"\0" + x.tobytes()

    def decompress(blob, base, dtype, shape):
        coded = fmd.decompress_param(blob[1:], floats(base)) if blob[0] else np.frombuffer(blob, WORDS[dtype], offset=1)
        return coded.view(WORDS[dtype]).reshape(shape)

    return Peer("fm-delta", compress, decompress)


@cache
def all_peers() -> list[Peer]:
    """Returns every peer that can run here, fm-delta first."""
    peers = [fm_delta(), pcodec_delta(), zstd_xor_planes(), zip_nn(), zstd_raw()]
    return [peer for peer in peers if peer]
