"""Compress a safetensors file with another codec, or restore it: a script as short as one would write it, which
benchmarks/commands.py times beside `hf-ext`.

    python benchmarks/sections/whole_file.py compress zstd_xor_planes BASE FINE_TUNE OUT
    python benchmarks/sections/whole_file.py decompress zstd_xor_planes BASE OUT RESTORED

It codes a tensor on each core, and imports only NumPy and the codec, a function of peers.py.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import peers

DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def mapped(path: str) -> tuple[dict, memoryview, np.ndarray]:
    """Returns a safetensors file's entries in the order of their data, the bytes of its header, and its data."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view("<u8")[0])
    entries = json.loads(data[8:start].tobytes())
    entries.pop("__metadata__", None)
    return dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"])), data[:start].data, data[start:]


def tensor(entry: dict, data: np.ndarray) -> np.ndarray:
    begin, end = entry["data_offsets"]
    return data[begin:end].view(peers.WORDS[DTYPES[entry["dtype"]]]).reshape(entry["shape"])


def compress(peer: peers.Peer, base: str, tuned: str, out: str) -> None:
    bases, _, base_data = mapped(base)
    entries, header, data = mapped(tuned)

    def coded(name: str) -> bytes:
        entry = entries[name]
        return peer.compress(tensor(entry, data), tensor(bases[name], base_data), DTYPES[entry["dtype"]])

    with ThreadPoolExecutor(os.cpu_count()) as pool, Path(out).open("wb") as file:
        blobs = list(pool.map(coded, entries))
        file.write(header)
        file.write(np.array([len(blob) for blob in blobs], "<u8"))
        file.writelines(blobs)


def decompress(peer: peers.Peer, base: str, out: str, restored: str) -> None:
    bases, _, base_data = mapped(base)
    entries, header, data = mapped(out)
    ends = 8 * len(entries) + np.cumsum(np.frombuffer(data[: 8 * len(entries)], "<u8")).astype(int)
    places = dict(zip(entries, zip([8 * len(entries), *ends], ends)))

    def decoded(name: str) -> np.ndarray:
        entry, (begin, end) = entries[name], places[name]
        blob = data[begin:end].tobytes()
        return np.ascontiguousarray(
            peer.decompress(blob, tensor(bases[name], base_data), DTYPES[entry["dtype"]], entry["shape"])
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool, Path(restored).open("wb") as file:
        file.write(header)
        file.writelines(pool.map(decoded, entries))


if __name__ == "__main__":
    way, codec, *paths = sys.argv[1:]
    {"compress": compress, "decompress": decompress}[way](getattr(peers, codec)(), *paths)
