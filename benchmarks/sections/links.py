"""Measure how long a fine-tune takes to another machine over links of any speed: a section of benchmarks/fm_delta.py."""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import print_table, timed
from sections.pairs import compress_checked, load_pairs, ours
from sections.peers import all_peers

from hf_ext.display import new_figure, save_figure

LINKS = [100, 300, 1000, 2500, 10_000, 25_000]  # Mbit/s
SENT = ["fm-delta", "zstd-3 XOR planes", "zipnn", "zstd-3 raw"]  # the peers that are compared
WITH_BASE = {"ours", "ours, level 1", "fm-delta", "zstd-3 XOR planes"}
CORES = os.cpu_count() or 1


@dataclass
class Codec:
    """The costs of a way of sending. Speeds in MB of original per second on all cores, `disk` in MB of file per second."""

    name: str
    share: float  # of the original's size
    compress: float
    decompress: float
    with_base: bool
    disk: tuple[float, float]  # reading, writing

    def stages(self, way: str, link: float, files: bool) -> list[float]:
        """Seconds that each step takes for a megabyte of original over a link of so many Mbit/s, between the disk of the sender
        and the memory of the receiver, both of whom have the base. `files`: what is sent stands in files on both sides."""
        read, write = self.disk
        transfer, base = self.share * 8 / link, 1 / read if self.with_base else 0
        in_file = [self.share / write, self.share / read] if files else []
        if way == "upload":
            return [1 / read + base, 1 / self.compress, *([] if self.share == 1 else in_file), transfer]
        return [transfer, *in_file, base, 1 / self.decompress]

    def one_after_another(self, way: str, link: float) -> float:
        """Returns the time if each step waits for the end of the one before: compressing or saving, then uploading, or
        `from_pretrained`, which downloads, then loads."""
        return sum(self.stages(way, link, files=True))

    def overlapping(self, way: str, link: float) -> float:
        """Returns the time if all steps run at once, each on another part of the data. The slowest step counts. This is the
        best that streaming could reach."""
        return max(self.stages(way, link, files=False))


MODES: dict[str, Callable[[Codec, str, float], float]] = {
    "one after another": Codec.one_after_another,
    "overlapping": Codec.overlapping,
}


def break_even(codec: Codec, plain: Codec, way: str, mode: Callable[[Codec, str, float], float]) -> float:
    """Returns the speed in Mbit/s from which on the plain file is no slower: 0 if it never is slower, infinity if it always
    is."""
    low, high = 1.0, 1e6
    if mode(codec, way, low) >= mode(plain, way, low):
        return 0.0
    if mode(codec, way, high) < mode(plain, way, high):
        return float("inf")
    while high / low > 1.001:  # the gap in time only closes as links grow faster
        middle = (low * high) ** 0.5
        low, high = (middle, high) if mode(codec, way, middle) < mode(plain, way, middle) else (low, middle)
    return low


def links(args: argparse.Namespace, dtype: str) -> dict:
    """Seconds of 1 GB of fine-tune, computed from speeds that are measured here, and break-even speeds."""
    pairs = load_pairs(args.pairs / args.tasks[0], dtype)
    megabytes = sum(pair.x.nbytes for pair in pairs) / 1e6
    disk = (args.disk, args.disk) if args.disk else disk_speed(args.pairs / args.tasks[0] / "model.safetensors")
    codecs = [Codec("plain file", 1, float("inf"), float("inf"), False, disk)]
    # As whole checkpoints are worked on: a tensor a thread, PyTorch's own threads left out.
    with ThreadPoolExecutor(CORES, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def compress(peer):
            list(pool.map(lambda pair: peer.compress(pair.x, pair.base, dtype), pairs))

        def decompress(peer, blobs):
            list(pool.map(lambda pair, blob: peer.decompress(blob, pair.base, dtype, pair.x.shape), pairs, blobs))

        for peer in [ours(), ours(level=1), *(peer for peer in all_peers() if peer.name in SENT)]:
            blobs = compress_checked(peer, pairs, dtype)
            speeds = [
                megabytes / statistics.median(timed(*call) for _ in range(args.runs))
                for call in ((compress, peer), (decompress, peer, blobs))
            ]
            share = sum(map(len, blobs)) / 1e6 / megabytes
            codecs.append(Codec(peer.name, share, *speeds, peer.name in WITH_BASE, disk))

    rows = [[c.name, f"{100 * c.share:.1f} %", f"{c.compress:.0f}", f"{c.decompress:.0f}"] for c in codecs]
    title = f"{dtype}, whole model of {args.tasks[0]}: MB of original per second on {CORES} cores"
    print_table(title, ["codec", "of the original", "compress", "decompress"], rows)
    print(f"\ndisk: reads {disk[0]:.0f} and writes {disk[1]:.0f} MB/s" + (" (given)" if args.disk else " (measured)"))
    results = {"disk": disk, "codecs": {c.name: [c.share, c.compress, c.decompress] for c in codecs}}
    for way in ("upload", "download"):
        for mode, seconds in MODES.items():
            rows = []
            for c in codecs:
                plain = c is codecs[0]
                times = [1000 * seconds(c, way, link) for link in LINKS]
                even = 0.0 if plain else break_even(c, codecs[0], way, seconds)
                results[f"{way}, {mode}, {c.name}"] = {"seconds": times, "break_even": even}
                rows.append([c.name, *(f"{time:.1f}" for time in times), "" if plain else speed_name(even)])
            title = f"{dtype}, {way}, steps {mode}: seconds for 1 GB of original"
            print_table(title, ["codec", *map(speed_name, LINKS), "faster than plain below"], rows)
    if args.plot:
        plot(codecs, dtype, args.plot.with_stem(f"{args.plot.stem}-{dtype}"))
    return results


def speed_name(mbit: float) -> str:
    if mbit in (0, float("inf")):
        return "any speed" if mbit else "no speed"
    return f"{mbit:.0f} Mbit/s" if mbit < 1000 else f"{mbit / 1000:.3g} Gbit/s"


def disk_speed(original: Path, rounds: int = 3) -> tuple[float, float]:
    """Returns medians of MB per second: reading a file that is not in the page cache, and writing it to the disk."""
    data = original.read_bytes()
    reading, writing = [], []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "file"

        def write():
            with open(path, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        def read():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while file.read(1 << 20):
                    pass

        for _ in range(rounds):
            writing.append(len(data) / 1e6 / timed(write))
            reading.append(len(data) / 1e6 / timed(read))
    return statistics.median(reading), statistics.median(writing)


def plot(codecs: list[Codec], dtype: str, path: Path) -> None:
    """Draws both ways: seconds for 1 GB by the speed of the link."""
    speeds = [10 ** (2 + i / 50 * 2.4) for i in range(51)]
    figure = new_figure(11, 4.5)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, way in zip(axes, ("upload", "download")):
        for i, c in enumerate(codecs):
            for (mode, seconds), style in zip(MODES.items(), ("-", "--")):
                label = f"{c.name}, {mode}" if i < 2 else c.name if style == "-" else None
                axis.loglog(speeds, [1000 * seconds(c, way, speed) for speed in speeds], style, color=f"C{i}", label=label)
        axis.set(title=f"{way}, {dtype}", xlabel="link, Mbit/s")
        axis.grid(True, which="both", alpha=0.2)
    axes[0].set_ylabel("seconds for 1 GB of original")
    axes[1].legend(fontsize=8)
    save_figure(figure, path)
