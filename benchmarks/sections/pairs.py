"""Real fine-tunes and their base as bit patterns, and our codec as a peer of those in peers.py."""

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fine_tunes import minilm
from measuring import TORCH
from safetensors.torch import load_file
from sections.peers import WORDS, Peer

from hf_ext import storage
from hf_ext.storage.delta import DEFAULT_LEVEL
from hf_ext.storage.native import _native


@dataclass
class Pair:
    """A tensor and its base, if it has one, as bit patterns."""

    name: str
    x: np.ndarray
    base: np.ndarray | None


def load_tensors(folder: Path, base: Path | None = None) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Returns all float tensors of a fine-tune that have a twin of the same shape in the base, or in another folder: names,
    tensors and twins."""
    bases = load_file((base or minilm()) / "model.safetensors")
    tensors = []
    for name, tensor in load_file(folder / "model.safetensors").items():
        twin = bases.get(name if name in bases else name.removeprefix("bert."))
        if twin is not None and twin.shape == tensor.shape and tensor.is_floating_point():
            tensors.append((name, tensor, twin))
    return tensors


def load_pairs(folder: Path, dtype: str, base: Path | None = None) -> list[Pair]:
    """Returns the tensors of a fine-tune in a type."""
    return [Pair(name, bits(tensor, dtype), bits(twin, dtype)) for name, tensor, twin in load_tensors(folder, base)]


def bits(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """Returns a tensor's bit patterns in a type."""
    return tensor.to(TORCH[dtype]).contiguous().view(torch.uint8).numpy().view(WORDS[dtype])


BEST = _native.instruction_sets()[-1]


def ours(level: int = DEFAULT_LEVEL, instructions: str = BEST) -> Peer:
    """Returns our codec as a peer."""
    names = ["ours", f"level {level}" if level != DEFAULT_LEVEL else "", instructions if instructions != BEST else ""]

    def tensor(bits, dtype):
        return torch.from_numpy(bits).view(TORCH[dtype])

    def compress(x, base, dtype):
        _native.use(instructions)
        return storage.encode(tensor(x, dtype), None if base is None else tensor(base, dtype), level=level)

    def decompress(blob, base, dtype, shape):
        _native.use(instructions)
        decoded = storage.decode(blob, None if base is None else tensor(base, dtype))
        return decoded.reshape(-1).view(torch.uint8).numpy().view(WORDS[dtype]).reshape(shape)

    return Peer(", ".join(filter(None, names)), compress, decompress)


def all_ours() -> list[Peer]:
    """Returns our codec at its default level and at level 1, with each instruction set of processors with vectors."""
    sets = _native.instruction_sets()[:0:-1]
    return [ours(level, instructions) for instructions in sets for level in (DEFAULT_LEVEL, 1)]


def compress_checked(peer: Peer, pairs: list[Pair], dtype: str) -> list[bytes]:
    """Compresses every tensor and stops the run unless each comes back bit for bit."""
    blobs = [peer.compress(pair.x, pair.base, dtype) for pair in pairs]
    decoded = (peer.decompress(blob, pair.base, dtype, pair.x.shape) for pair, blob in zip(pairs, blobs))
    require_same(peer, decoded, pairs, dtype)
    return blobs


def require_same(peer: Peer, decoded: Iterable[np.ndarray], pairs: list[Pair], dtype: str) -> None:
    for x, pair in zip(decoded, pairs):
        if not np.array_equal(x, pair.x):
            raise SystemExit(f"{peer.name} does not give back {pair.name} in {dtype}")


def measure(peer: Peer, pairs: list[Pair], dtype: str, runs: int = 1) -> dict[str, float]:
    """Returns a codec's share of the original size, and MB of original per second on the calling thread, the medians of some
    rounds. Stops the run unless every tensor comes back bit for bit."""
    size, times, share = sum(pair.x.nbytes for pair in pairs), [], 0.0
    for _ in range(runs):
        start = time.perf_counter()
        blobs = [peer.compress(pair.x, pair.base, dtype) for pair in pairs]
        middle = time.perf_counter()
        decoded = [peer.decompress(blob, pair.base, dtype, pair.x.shape) for pair, blob in zip(pairs, blobs)]
        times.append((middle - start, time.perf_counter() - middle))
        require_same(peer, decoded, pairs, dtype)
        share = sum(map(len, blobs)) / size
    compress, decompress = (size / 1e6 / statistics.median(seconds) for seconds in zip(*times))
    return {"share": share, "compress": compress, "decompress": decompress}


def speed_row(name: str, figures: dict[str, float]) -> list[str]:
    """Returns the row of a table for the result of `measure`."""
    return [name, f"{100 * figures['share']:.2f} %", f"{figures['compress']:.0f}", f"{figures['decompress']:.0f}"]
