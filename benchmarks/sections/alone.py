"""Measure sizes and speeds of weights that are compressed without a base: those of all-MiniLM-L6-v2 in each type."""

import argparse
import statistics
import tempfile
from pathlib import Path

from fine_tunes import minilm
from measuring import TORCH, one_thread, print_table, timed
from safetensors.torch import load_file, save_file
from sections.pairs import Pair, bits, is_dense, measure, ours, speed_row
from sections.peers import FilePeer, lmzip, without_base


def alone(args: argparse.Namespace, dtype: str) -> dict:
    """Returns percent of the original and MB of original per second on one thread, as {values: {peer: {"share", "compress",
    "decompress"}}}. The values are weights of a type and, for fp32, also weights with values of bf16 or fp16."""
    return {values: of_values(args, dtype, values) for values in (TORCH if dtype == "fp32" else [dtype])}


def of_values(args: argparse.Namespace, dtype: str, values: str) -> dict:
    weights = load_file(minilm() / "model.safetensors")
    floats = {name: tensor.to(TORCH[values]) for name, tensor in weights.items() if tensor.is_floating_point()}
    tensors = {name: tensor.to(TORCH[dtype]) for name, tensor in floats.items()}
    pairs = [Pair(name, bits(tensor, dtype), None, is_dense(name, tensor)) for name, tensor in tensors.items()]
    with one_thread():
        results = {peer.name: measure(peer, pairs, dtype, args.runs) for peer in (ours(), *without_base())}
    if (peer := lmzip()) is not None:
        with tempfile.TemporaryDirectory() as folder:
            save_file(tensors, Path(folder, "model.safetensors"))
            results[peer.name] = of_file(peer, Path(folder, "model.safetensors"), args.runs)
    rows = [speed_row(name, figures) for name, figures in results.items()]
    kind = dtype if values == dtype else f"{dtype} that holds {values}"
    title = f"{kind}, all-MiniLM-L6-v2 without a base: size, and MB of original per second, median of {args.runs} rounds"
    print_table(title, ["codec", "of the original", "compress", "decompress"], rows)
    return results


def of_file(peer: FilePeer, path: Path, runs: int) -> dict[str, float]:
    packed, back, size = path.with_suffix(".packed"), path.with_suffix(".back"), path.stat().st_size
    seconds = {"compress": [], "decompress": []}
    for _ in range(runs):
        for file in (packed, back):
            file.unlink(missing_ok=True)
        seconds["compress"].append(timed(peer.compress, path, packed))
        seconds["decompress"].append(timed(peer.decompress, packed, back))
    if back.read_bytes() != path.read_bytes():
        raise SystemExit(f"{peer.name} does not give back {path}")
    return {"share": packed.stat().st_size / size} | {
        way: size / 1e6 / statistics.median(times) for way, times in seconds.items()
    }
