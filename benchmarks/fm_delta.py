"""Measure the fine-tune codec and its peers on real pairs of base and fine-tune: size with and without the base, speed, Xet,
sending over links, models of a billion parameters and of diffusers.

    python benchmarks/fm_delta.py --pairs pairs --lm lm

``pairs`` is the folder that benchmarks/fine_tunes.py makes (with --save_steps 34 for Xet), ``lm`` that of language_model.py.
bf16 and fp16 pairs are the float32 ones, both cast with torch. Every codec must restore the same bits of every measured tensor;
otherwise the run stops.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from fine_tunes import FILES
from measuring import TORCH, one_thread, print_table, run_sections
from sections.alone import alone
from sections.diffusion import diffusion
from sections.links import links
from sections.pairs import Pair, all_ours, compress_checked, load_pairs, measure, ours, speed_row
from sections.peers import Peer, all_peers
from sections.scale import SHAPES, scale
from sections.xet import xet
from transformers.utils import logging

YARDSTICK = "fm-delta"

logging.disable_progress_bar()


def size(args: argparse.Namespace, dtype: str) -> dict:
    """Returns bits per parameter as {peer: {task: bits}}, printed with the share of fm-delta's size."""
    results: dict[str, dict[str, float]] = {}
    for task in args.tasks:
        pairs = load_pairs(args.pairs / task, dtype)
        for peer in [ours(), *all_peers()]:
            bits = 8 * sum(map(len, compress_checked(peer, pairs, dtype))) / sum(pair.x.size for pair in pairs)
            results.setdefault(peer.name, {})[task] = bits
    means = {name: statistics.mean(bits.values()) for name, bits in results.items()}
    rows = []
    for name, bits in results.items():
        share = f" ({100 * means[name] / means[YARDSTICK]:.1f} %)" if YARDSTICK in means else ""
        rows.append([name, f"{means[name]:.2f}{share}", *(f"{value:.2f}" for value in bits.values())])
    print_table(f"{dtype}: bits per parameter (% of fm-delta)", ["codec", "mean", *args.tasks], rows)
    return results


def language_model(args: argparse.Namespace) -> dict:
    """Returns results for the fine-tunes of SmolLM2-135M in bf16: percent of the original, and MB/s on one thread, as {name:
    {peer: {…}}}."""
    if args.lm is None:
        raise SystemExit("the section language_model needs --lm, the folder that benchmarks/language_model.py makes")
    peers, results = [*all_ours(), *all_peers()], {}
    for name in ("full", "lora", "light"):
        pairs = load_pairs(args.lm / name, "bf16", args.lm / "base")
        results[name] = speeds(f"SmolLM2-135M, {name}, bf16", pairs, "bf16", peers, args.runs)
    return results


def speeds(what: str, pairs: list[Pair], dtype: str, peers: list[Peer], runs: int) -> dict:
    """Returns the size and the speeds of each peer, and prints them."""
    with one_thread():
        figures = {peer.name: measure(peer, pairs, dtype, runs) for peer in peers}
    changed = sum(int((pair.x != pair.base).sum()) for pair in pairs) / sum(pair.x.size for pair in pairs)
    title = f"{what}: {100 * changed:.1f} % of the values changed"
    header = ["codec", "of the original", "compress, MB/s", "decompress, MB/s"]
    print_table(title, header, [speed_row(name, measured) for name, measured in figures.items()])
    return figures


def in_each_type(section: Callable[[argparse.Namespace, str], dict]) -> Callable[[argparse.Namespace], dict]:
    """Returns a section that runs for each of `--dtypes`."""
    return lambda args: {dtype: section(args, dtype) for dtype in args.dtypes}


TYPED = [size, alone, links]
WHOLE = [language_model, xet, scale, diffusion]
SECTIONS = {section.__name__: in_each_type(section) for section in TYPED} | {section.__name__: section for section in WHOLE}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="folder made by benchmarks/fine_tunes.py")
    parser.add_argument("--tasks", nargs="+", default=list(FILES), help="of the section size; others use the first")
    parser.add_argument("--lm", type=Path, help="language_model, xet: folder made by benchmarks/language_model.py")
    parser.add_argument("--dtypes", nargs="+", default=list(TORCH), choices=list(TORCH))
    parser.add_argument("--disk", type=float, help="links: MB/s of the disk, if it is not to be measured")
    parser.add_argument("--plot", type=Path, help="links: also draw them, in a file for each type")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.2-1b", help="scale: the model whose shapes are drawn")
    run_sections(parser, SECTIONS, has_runs=True)


if __name__ == "__main__":
    main()
