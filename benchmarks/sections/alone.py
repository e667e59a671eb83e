"""Measure sizes and speeds of weights that are compressed without a base: those of all-MiniLM-L6-v2 in each type."""

import argparse

from fine_tunes import minilm
from measuring import TORCH, one_thread, print_table
from safetensors.torch import load_file
from sections.pairs import Pair, bits, is_dense, measure, ours, speed_row
from sections.peers import zip_nn, zstd_raw


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
        results = {peer.name: measure(peer, pairs, dtype, args.runs) for peer in (ours(), zip_nn(), zstd_raw())}
    rows = [speed_row(name, figures) for name, figures in results.items()]
    kind = dtype if values == dtype else f"{dtype} that holds {values}"
    title = f"{kind}, all-MiniLM-L6-v2 without a base: size, and MB of original per second, median of {args.runs} rounds"
    print_table(title, ["codec", "of the original", "compress", "decompress"], rows)
    return results
