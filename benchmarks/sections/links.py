"""Measure how long a fine-tune takes to another machine: over links of any speed, and from a Hub behind a slow link.

Sections of benchmarks/fm_delta.py.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Lock

import torch
from measuring import fresh, print_table, timed
from sections.load_from_hub import load_and_read
from sections.pairs import compress_checked, load_pairs, ours, write_models
from sections.peers import all_peers

from hf_ext.display import new_figure, save_figure

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from local_hub import Commit, File, LocalHub, Repo, Request  # noqa: E402

LINKS = [100, 300, 1000, 2500, 10_000, 25_000]  # Mbit/s
SENT = ["fm-delta", "zstd-3 XOR planes", "zipnn", "zstd-3 raw"]  # the peers that are compared
WITH_BASE = {"ours", "ours, level 1", "fm-delta", "zstd-3 XOR planes"}
CORES = os.cpu_count() or 1


# ---- links of any speed ----------------------------------------------------------------------------------------------


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


# ---- a hub behind a slow link ----------------------------------------------------------------------------------------


class Link:
    """A link of one speed that all connections share."""

    def __init__(self, mbit: float):
        self.bytes_per_second = mbit * 1e6 / 8
        self.free_at = 0.0
        self.lock = Lock()

    def pieces(self, content: bytes, size: int = 1 << 16) -> Iterable[bytes]:
        """Yields the content piece by piece, each when the link has carried it."""
        for start in range(0, len(content), size):
            piece = content[start : start + size]
            with self.lock:
                self.free_at = max(self.free_at, time.monotonic()) + len(piece) / self.bytes_per_second
                ready = self.free_at
            time.sleep(max(ready - time.monotonic(), 0))
            yield piece


class SlowHub(LocalHub):
    """A Hub on this machine whose contents come as fast as a link carries them."""

    def __init__(self, link: Link):
        super().__init__()
        self._server.server_close()

        class SlowRequest(Request):
            hub = self

            def setup(self):
                super().setup()
                self.wfile = SlowFile(self.wfile, link)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), SlowRequest)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._storage = f"http://localhost:{self._server.server_port}/storage"

    def publish(self, repo_id: str, folder: Path) -> str:
        """Makes a folder the content of a repository, in place of any before; returns the commit."""
        files = {
            path.name: File(path.read_bytes(), path.suffix == ".safetensors") for path in folder.iterdir() if path.is_file()
        }
        self._objects |= {file.sha256: file.content for file in files.values() if file.lfs}
        commit = Commit(None, "published", files)
        self.repos[repo_id] = Repo(private=False)
        self.repos[repo_id].add("main", commit)
        return commit.id


class SlowFile:
    """The file that a request writes to, at the speed of a link."""

    def __init__(self, file, link: Link):
        self.file, self.link = file, link

    def write(self, content: bytes) -> int:
        return sum(self.file.write(piece) for piece in self.link.pieces(content))

    def __getattr__(self, name: str):
        return getattr(self.file, name)


LOAD = Path(__file__).with_name("load_from_hub.py")


def cold(args: argparse.Namespace, dtype: str) -> dict:
    """Seconds of `from_pretrained` with nothing downloaded yet, from a Hub behind links of `--links` Mbit/s; of loading again
    what the first load downloaded; and of loading from this machine's disk what is not in the page cache."""
    results: dict = {"links": {}, "disk": {}}
    with tempfile.TemporaryDirectory() as scratch:
        base, plain, packed = write_models(args, dtype, Path(scratch))
        away = shutil.copytree(packed, Path(scratch, "away"))
        rows = []
        for mbit in args.links:
            with SlowHub(Link(mbit)) as hub:
                commit = hub.publish("bench/base", base)
                config = json.loads((packed / "config.json").read_text())
                config["quantization_config"] |= {"base": "bench/base", "revision": commit}
                (away / "config.json").write_text(json.dumps(config))
                ways = {"plain": plain, "compressed": packed, "compressed, and its base": away}
                loads: dict[str, list] = {name: [] for name in ways}
                for _ in range(args.runs):  # each load in a fresh process, with a cache of its own
                    for name, folder in ways.items():
                        hub.publish("bench/model", folder)
                        with tempfile.TemporaryDirectory(dir=scratch) as cache:
                            env = hub.client_env(Path(cache))
                            command = [sys.executable, LOAD, "bench/model", "--warm-up", plain]
                            output = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
                        loads[name].append(json.loads(output.splitlines()[-1]))
                results["links"][mbit] = {
                    name: dict(zip(("first", "again"), map(statistics.median, zip(*pairs)))) for name, pairs in loads.items()
                }
            times = results["links"][mbit]
            for name, seconds in times.items():
                first, again = (seconds[turn] / times["plain"][turn] for turn in ("first", "again"))
                row = [speed_name(mbit), name, f"{seconds['first']:.2f}", f"{first:.2f} ×"]
                rows.append([*row, f"{seconds['again']:.3f}", f"{again:.2f} ×"])
        for name, folder in (("plain", plain), ("compressed", packed)):
            results["disk"][name] = fresh(load_evicted, folder, base, args.runs)
    title = f"{dtype}, {args.tasks[0]}: from_pretrained from a Hub behind a link, in seconds"
    print_table(title, ["link", "model", "first load", "of plain", "loaded again", "of plain"], rows)
    rows = [
        [name, f"{seconds:.3f}", f"{seconds / results['disk']['plain']:.2f} ×"] for name, seconds in results["disk"].items()
    ]
    title = f"{dtype}, {args.tasks[0]}: from_pretrained from disk, page cache empty"
    print_table(title, ["model", "seconds", "of plain"], rows)
    return results


def load_evicted(folder: Path, base: Path, runs: int) -> float:
    """Returns the median time of some loads of a folder when neither it nor the base is in the page cache."""
    seconds = []
    for _ in range(runs + 1):  # the first warms up all but the files
        gc.collect()  # a file that a model still maps would stay
        for path in (*folder.glob("*.safetensors"), *base.glob("*.safetensors")):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        seconds.append(timed(load_and_read, str(folder)))
    return statistics.median(seconds[1:])
