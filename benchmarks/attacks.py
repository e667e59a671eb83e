"""Read models whose files were damaged, mixed up or forged: this package compared with plain safetensors and zstd.

Each attempt changes one file of weights, at random places from a fixed seed, and reads the whole model in a process of its own.
The result is one of these:

    caught      reading raised an error
    unharmed    every tensor is right, as after a change of padding
    WRONG       reading gave other tensors, without an error
    CRASH       the process died, took over 20 seconds, or took over 1 GB of memory for files of 1 MB

"Forged" changes sizes, types, names and contents. It computes lengths and the checksums of the stored bytes again, but not the
checksum of the decoded tensor. Reading other tensors is no failure there and counts as "read". "zstd" is a safetensors file
compressed with a checksum, as zstd's command line does. The model and its fine-tunes are random numbers.

    pip install zstandard
    python benchmarks/attacks.py --tries 300
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import tempfile
import zlib
from base64 import b85decode, b85encode
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
import zstandard
from measuring import one_thread, print_table, run_sections
from safetensors.numpy import load
from safetensors.torch import save_file

from hf_ext import emr
from hf_ext.emr.folder import MergeFolder
from hf_ext.fm_delta import compress_checkpoint
from hf_ext.storage.delta.file import SEAL
from hf_ext.storage.safetensors_file import ITEMSIZE, Entry, parse_header, write_header
from hf_ext.storage.stored import open_checkpoint

SECONDS, MEMORY, PAGE = 20, 1 << 30, 4096
SHAPES = {"embed": (512, 128), "up": (512, 128), "down": (128, 512), "head": (512, 128), "norm": (128,)}
RESULTS = ["caught", "unharmed", "read", "WRONG", "CRASH"]

Tensors = dict[str, bytes]
Attack = Callable[[np.random.Generator, bytes, bytes], bytes]


@dataclass(frozen=True)
class Format:
    """A way to store a model.

    Attributes:
        files: its files of weights, in two shards.
        read: returns all tensors of a folder.
        forge: changes one of these files so that lengths and checksums of the stored bytes fit; None if that is not tried.
    """

    files: list[str]
    read: Callable[[Path], Tensors]
    forge: Attack | None


# ---- models ----------------------------------------------------------------------------------------------------------


def write_models(root: Path) -> None:
    """Writes a base and fine-tunes of it, each in two shards."""
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    for model in ("base", "one", "other", "third", "another base"):
        (root / model).mkdir()
        scale = {"base": 0, "another base": 1e-2}.get(model, 1e-4)
        tensors = {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in base.items()}
        names = list(tensors)
        shards = {f"model-0000{i + 1}-of-00002.safetensors": names[2 * i : 2 * i + 2 + i] for i in range(2)}
        for shard, held in shards.items():
            save_file({name: tensors[name] for name in held}, root / model / shard, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
        (root / model / "model.safetensors.index.json").write_text(json.dumps(index))
        (root / model / "config.json").write_text('{"model_type": "bert"}')


def store(root: Path) -> dict[str, Format]:
    """Writes the fine-tunes `one` and `other` in every format, into folders NAME/one and NAME/other."""
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for model in ("one", "other"):
        shutil.copytree(root / model, root / "safetensors" / model)
        (root / "zstd" / model).mkdir(parents=True)
        for shard in shards:
            packed = zstandard.ZstdCompressor(write_checksum=True).compress((root / model / shard).read_bytes())
            (root / "zstd" / model / f"{shard}.zst").write_bytes(packed)
        compress_checkpoint(root / model, root / "base", root / "FM-Delta" / model)
    for model, one in {"one": "one", "other": "third"}.items():
        tasks = {"one": root / one, "other": root / "other"}
        emr.merge(root / "base", tasks, root / "EMR-Merging" / model, max_shard_size="700KB", method="emr")
        emr.merge(root / "base", tasks, root / "coded tasks" / model, max_shard_size="700KB", method="switch", bits=4)
    merged = sorted(path.name for path in (root / "EMR-Merging" / "one").glob("model*.safetensors"))
    return {
        "safetensors": Format(shards, read_safetensors, forge_safetensors),
        "zstd": Format([f"{shard}.zst" for shard in shards], read_zstd, forge_zstd),
        "FM-Delta": Format(shards, read_delta, forge_delta),
        "EMR-Merging": Format([*merged, "task-one/modulators.safetensors"], read_merge, None),
        "coded tasks": Format(["task-one/modulators.safetensors"], read_merge, None),
    }


def read_safetensors(folder: Path) -> Tensors:
    """Reads a folder with the safetensors library."""
    files = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
    return {name: array.tobytes() for file in files for name, array in load(file).items()}


def read_zstd(folder: Path) -> Tensors:
    """Unpacks each file, then reads it as safetensors."""
    files = [zstandard.ZstdDecompressor().decompress(path.read_bytes()) for path in sorted(folder.glob("*.zst"))]
    return {name: array.tobytes() for file in files for name, array in load(file).items()}


def read_delta(folder: Path) -> Tensors:
    """Decodes each tensor, as loading does."""
    source = open_checkpoint(folder)
    return {name: source.read(name).data.tobytes() for name in source.names()}


def read_merge(folder: Path) -> Tensors:
    """Computes each tensor of each task."""
    merged = MergeFolder(folder)
    return {f"{task}:{name}": merged.tensor(task, name).data.tobytes() for task in merged.tasks for name in SHAPES}


# ---- attacks: (random numbers, a file, the same file of another model) -> the file to read instead ----------------------


def flipped(rng: np.random.Generator, file: bytes, other: bytes) -> bytes:
    """Flips one bit."""
    data = bytearray(file)
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    return bytes(data)


def zeroed(rng: np.random.Generator, file: bytes, other: bytes) -> bytes:
    """Zeroes one page, as after a bad sector or a hole in a download."""
    start = rng.integers(len(file) // PAGE + 1) * PAGE
    end = min(start + PAGE, len(file))
    return file[:start] + bytes(end - start) + file[end:]


def exchanged(rng: np.random.Generator, file: bytes, other: bytes) -> bytes:
    """Exchanges two pages."""
    one, two = sorted(rng.choice(len(file) // PAGE, 2, replace=False) * PAGE)
    pages = file[one : one + PAGE], file[two : two + PAGE]
    return file[:one] + pages[1] + file[one + PAGE : two] + pages[0] + file[two + PAGE :]


def cut(rng: np.random.Generator, file: bytes, other: bytes) -> bytes:
    """Cuts off the end."""
    return file[: rng.integers(len(file))]


def continued(rng: np.random.Generator, file: bytes, other: bytes) -> bytes:
    """Joins the beginning of one save and the rest of another, as after an interrupted write."""
    place = rng.integers(len(file))
    return file[:place] + other[place:]


def replaced(rng: np.random.Generator, file: bytes, other: bytes) -> bytes:
    """Replaces one shard by that of another save."""
    return other


DAMAGE: dict[str, Attack] = {
    "a bit flipped": flipped,
    "a page of zeros": zeroed,
    "two pages exchanged": exchanged,
    "cut off": cut,
    "two saves, one after the other": continued,
    "a shard of another save": replaced,
}


# ---- forgeries -------------------------------------------------------------------------------------------------------


def forged_header(rng: np.random.Generator, header: bytes) -> bytes:
    """Returns a safetensors header with one changed entry."""
    metadata, entries = parse_header(header)
    name = rng.choice(list(entries))
    entry = entries[name]
    huge = int(2 ** rng.integers(8, 62))
    match rng.integers(5):
        case 0:
            changed = entry._replace(dtype=str(rng.choice(list(ITEMSIZE))))
        case 1:
            changed = entry._replace(shape=(*entry.shape[:-1], huge))
        case 2:
            changed = entry._replace(end=entry.begin + huge)
        case 3:
            changed = entry._replace(begin=huge, end=huge + entry.nbytes)
        case _:
            changed = Entry(entry.dtype, (huge, *entry.shape), entry.begin, entry.end)
    return write_header(metadata, entries | {name: changed})


def forge_safetensors(rng: np.random.Generator, file: bytes, other: bytes) -> bytes:
    """Changes the header."""
    length = int.from_bytes(file[:8], "little")
    header = forged_header(rng, file[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + file[8 + length :]


def forge_zstd(rng: np.random.Generator, file: bytes, other: bytes) -> bytes:
    """Changes the header of the packed file, or the size in the frame."""
    if rng.integers(2):
        size = int(2 ** rng.integers(20, 62))
        return file[:4] + bytes([0b11100100]) + size.to_bytes(8, "little") + file[4 + 1 + 4 :]
    plain = zstandard.ZstdDecompressor().decompress(file)
    return zstandard.ZstdCompressor(write_checksum=True).compress(forge_safetensors(rng, plain, other))


def forge_delta(rng: np.random.Generator, file: bytes, other: bytes) -> bytes:
    """Changes the header of the original file, a payload's header or its body, and the checksums of what is stored."""
    length = int.from_bytes(file[:8], "little")
    metadata, entries = parse_header(file[8 : 8 + length])
    data, record = bytearray(file[8 + length :]), json.loads(metadata[SEAL.key])
    if rng.integers(3) == 0:
        inside = forged_header(rng, zlib.decompress(b85decode(record["header"])))
        record["header"] = b85encode(zlib.compress(inside)).decode()
    else:
        entry = entries[str(rng.choice(list(entries)))]
        end = 36 + 16 if rng.integers(2) else entry.nbytes  # fields of sizes, or anywhere
        for _ in range(rng.integers(1, 4)):
            data[entry.begin + int(rng.integers(4, end))] = rng.integers(256)
        payload = data[entry.begin : entry.end]
        payload[28:36] = bytes(8)
        data[entry.begin + 28 : entry.begin + 36] = xxhash.xxh3_64_intdigest(bytes(payload)).to_bytes(8, "little")
    header = write_header(metadata | SEAL.metadata(record, entries), entries)
    return len(header).to_bytes(8, "little") + header + bytes(data)


# ---- attempts --------------------------------------------------------------------------------------------------------


def outcome(read: Callable[[Path], Tensors], folder: Path, right: dict[str, int], forged: bool) -> str:
    """Reads a folder in a process of its own, and returns the outcome."""
    pid = os.fork()
    if not pid:
        code = 3
        try:
            signal.alarm(SECONDS)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
            digests = {name: xxhash.xxh3_64_intdigest(data) for name, data in read(folder).items()}
            code = 0 if digests == right else 1
        except MemoryError:
            code = 4
        except Exception:
            code = 2
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    results = ["unharmed", "read" if forged else "WRONG", "caught"]
    return results[os.WEXITSTATUS(status)] if os.WIFEXITED(status) and os.WEXITSTATUS(status) < 3 else "CRASH"


def attempt(root: Path, kind: str, form: Format, attack: Attack, rng: np.random.Generator, right: dict[str, int]) -> str:
    """Damages one file of a copy of the model, reads the model, and restores the file."""
    file = str(rng.choice(form.files))
    path, other = (root / kind / model / file for model in ("one", "other"))
    before = path.read_bytes()
    after = attack(rng, before, other.read_bytes())
    if after == before:
        return "unharmed"
    path.write_bytes(after)
    try:
        return outcome(form.read, root / kind / "one", right, attack is form.forge)
    finally:
        path.write_bytes(before)


def swap_base(root: Path) -> None:
    """Exchanges the base with another of the same structure."""
    (root / "base").rename(root / "first base")
    (root / "another base").rename(root / "base")


def cell(results: Counter[str]) -> str:
    return ", ".join(f"{results[result]} {result}" for result in RESULTS if results[result])


def attacks(args: argparse.Namespace) -> dict:
    """Counts the results of each attack on each format."""
    outcomes: dict[str, dict[str, Counter[str]]] = {}
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_models(root)
        formats = store(root)
        for kind, form in formats.items():
            right = {name: xxhash.xxh3_64_intdigest(data) for name, data in form.read(root / kind / "one").items()}
            changes = DAMAGE | ({"forged": form.forge} if form.forge else {})
            for number, (attack, change) in enumerate(changes.items()):
                rng = np.random.default_rng(number)
                results = Counter(attempt(root, kind, form, change, rng, right) for _ in range(args.tries))
                outcomes.setdefault(attack, {})[kind] = results
        swap_base(root)
        for kind in ("FM-Delta", "EMR-Merging", "coded tasks"):
            result = outcome(formats[kind].read, root / kind / "one", {}, False)
            outcomes.setdefault("another base in its place", {})[kind] = Counter([result])
    rows = [[attack, *(cell(by_kind.get(kind, Counter())) for kind in formats)] for attack, by_kind in outcomes.items()]
    print_table(f"{args.tries} attempts each", ["", *formats], rows)
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=300, help="attempts for each attack and format")
    run_sections(parser, {"attacks": attacks})
