"""Deflates bytes of which many are equal, and inflates them, in parts that Ctrl-C can interrupt."""

from __future__ import annotations

import zlib

import numpy as np

from hf_ext.storage.prefetch import check_awaited

AT_ONCE = 1 << 22  # bytes between two calls of `check_awaited`


def deflate(data: np.ndarray, level: int = zlib.Z_DEFAULT_COMPRESSION) -> bytes:
    """Returns a zlib stream of bytes."""
    # Z_RLE searches only for runs: matches at other distances are rare in tensors and in masks.
    packer = zlib.compressobj(level, strategy=zlib.Z_RLE)
    parts = []
    for start in range(0, data.size, AT_ONCE):
        check_awaited()
        parts.append(packer.compress(data[start : start + AT_ONCE]))
    return b"".join(parts) + packer.flush()


def inflate(body: np.ndarray, size: int) -> np.ndarray:
    """Returns the `size` bytes of a zlib stream. Raises ValueError if it does not hold as many."""
    unpacker, data = zlib.decompressobj(), np.empty(size, np.uint8)
    start = end = 0
    try:
        for start in range(0, body.size, AT_ONCE):
            rest: bytes | memoryview = memoryview(body[start : start + AT_ONCE])
            while len(rest) and not unpacker.eof and end <= size:
                check_awaited()
                part = unpacker.decompress(rest, min(size + 1 - end, AT_ONCE))
                data[end : end + len(part)] = np.frombuffer(part, np.uint8)[: size - end]
                end, rest = end + len(part), unpacker.unconsumed_tail
            if unpacker.eof or end > size:
                break
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if end != size or not unpacker.eof or unpacker.unused_data or start + AT_ONCE < body.size:
        raise ValueError(f"the zlib stream does not inflate to {size} bytes")
    return data
