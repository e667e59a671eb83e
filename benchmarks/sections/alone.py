"""Measure sizes and speeds of weights that are compressed without a base: those of all-MiniLM-L6-v2 in each type."""

import argparse

from fine_tunes import minilm
from measuring import one_thread, print_table
from safetensors.torch import load_file
from sections.pairs import Pair, bits, measure, ours, speed_row
from sections.peers import zip_nn, zstd_raw


def alone(args: argparse.Namespace, dtype: str) -> dict:
    """Returns percent of the original and MB of original per second on one thread, as {peer: {"share", "compress",
    "decompress"}}."""
    weights = load_file(minilm() / "model.safetensors")
    pairs = [Pair(name, bits(tensor, dtype), None) for name, tensor in weights.items() if tensor.is_floating_point()]
    with one_thread():
        results = {peer.name: measure(peer, pairs, dtype, args.runs) for peer in (ours(), zip_nn(), zstd_raw())}
    rows = [speed_row(name, figures) for name, figures in results.items()]
    title = f"{dtype}, all-MiniLM-L6-v2 without a base: size, and MB of original per second, median of {args.runs} rounds"
    print_table(title, ["codec", "of the original", "compress", "decompress"], rows)
    return results
