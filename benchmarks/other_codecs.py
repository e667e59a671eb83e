"""Measure how slime, SkyRL and NeMo-RL encode a training step, by their own code, beside this package, and over which links a
step as a delta arrives sooner than all weights.

    pip install zstandard
    git clone https://HOST/THUDM/slime others/slime
    git clone https://HOST/NovaSky-AI/SkyRL others/SkyRL
    git clone https://HOST/NVIDIA-NeMo/RL others/RL
    python benchmarks/other_codecs.py --lm lm --others others

``lm`` is the folder that benchmarks/language_model.py makes. The steps are real ones of SmolLM2-135M in bf16. Only the files of
the encoders are loaded: their packages import Megatron, Ray or vLLM. Around these files, the benchmark repeats what their
trainers do: XOR, zstd -1 (slime, SkyRL: a frame for each tensor; NeMo-RL: one), a checksum of the new tensor (slime, SkyRL).
verl has no encoder for deltas (January 2026).

Every method must restore the same bits. Times are CPU seconds on one thread, with checksums where the project has them. The
seconds over links add what the bytes take at a speed in Gbit/s, without latency. Above the border, all weights arrive sooner.
It grows with the number of threads.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import zstandard
from measuring import one_thread, print_table, run_sections
from safetensors.torch import load_file
from sections.steps import RATES, Tensors, bits, changed

from hf_ext import storage

GBITS = (0.1, 1, 10, 100)
Way = tuple[Callable[[Tensors, Tensors], list[bytes]], Callable[[list[bytes], Tensors], None]]


def module(path: Path, **parents: object) -> ModuleType:
    """Loads one file of a checkout. `parents` are stand-ins for modules that it imports."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: clone the repositories as the beginning of this file shows")
    for name, content in parents.items():
        stand_in = sys.modules[name.replace("__", ".")] = ModuleType(name)
        vars(stand_in).update(content)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def ours() -> Way:
    def apply(blobs: list[bytes], live: Tensors) -> None:
        for blob, tensor in zip(blobs, live.values()):
            storage.apply(blob, tensor)

    return lambda new, old: [storage.encode(tensor, old[name], level=1) for name, tensor in new.items()], apply


def raw(tensor: torch.Tensor) -> np.ndarray:
    return bits(tensor).view(np.uint8)


def full() -> Way:
    def apply(blobs: list[bytes], live: Tensors) -> None:
        for blob, tensor in zip(blobs, live.values()):
            bits(tensor)[:] = np.frombuffer(blob, np.uint16)

    return lambda new, old: [raw(tensor).tobytes() for tensor in new.values()], apply


def slime(others: Path, encoding: str) -> Way:
    """Its trainer's `diff_and_compress`, and what SGLang's `disk_delta` does with it."""
    own = module(others / "slime/slime/utils/disk_delta.py")

    def encode(new: Tensors, old: Tensors) -> list[bytes]:
        blobs = []
        for name, tensor in new.items():
            after, before = raw(tensor), raw(old[name])
            diff = after ^ before if encoding == "xor" else own.overwrite_encode(after, after != before)
            blob = zstandard.ZstdCompressor(level=1).compress(diff)
            blobs.append(own.checksum("xxh3-128", after).encode() + blob)
        return blobs

    def apply(blobs: list[bytes], live: Tensors) -> None:
        for blob, tensor in zip(blobs, live.values()):
            data, diff = raw(tensor), np.frombuffer(zstandard.ZstdDecompressor().decompress(blob[32:]), np.uint8)
            if encoding == "xor":
                data ^= diff
            else:
                count = int(diff[:4].view("<u4")[0])
                data[diff[4 : 4 + 4 * count].view("<u4")] = diff[4 + 4 * count :]
            if own.checksum("xxh3-128", data).encode() != blob[:32]:
                raise SystemExit("slime: checksum mismatch")

    return encode, apply


def skyrl(others: Path) -> Way:
    """`_process_tensor_delta` of its publisher and `apply_one` of its receiver."""
    own = module(others / "SkyRL/skyrl/backends/skyrl_train/weight_sync/delta_payload.py")
    checksum = module(others / "slime/slime/utils/disk_delta.py").checksum  # both use XXH3-128

    def encode(new: Tensors, old: Tensors) -> list[bytes]:
        return [
            checksum("xxh3-128", raw(tensor)).encode() + own.compress_bytes(memoryview(raw(tensor) ^ raw(old[name])), level=1)
            for name, tensor in new.items()
        ]

    def apply(blobs: list[bytes], live: Tensors) -> None:
        for blob, tensor in zip(blobs, live.values()):
            data = raw(tensor)
            data ^= np.frombuffer(own.decompress_bytes(blob[32:], data.size), np.uint8)
            if checksum("xxh3-128", data).encode() != blob[:32]:
                raise SystemExit("SkyRL: checksum mismatch")

    return encode, apply


def nemo_rl(others: Path) -> Way:
    """Its `DeltaCompressionTracker`; zstd -1 on indices and values, as its stream sends them."""
    config = {"nemo_rl__models__generation__vllm__config": {"VllmSparseRefitConfig": object}}
    own = module(others / "RL/nemo_rl/utils/weight_transfer_sparse_codec.py", **config)
    settings = SimpleNamespace(sparse_bucket_size_bytes=1 << 30, encoding="xor")
    baseline = SimpleNamespace(in_memory=True, mmap_dir=None)
    tracker = own.DeltaCompressionTracker(
        SimpleNamespace(delta_compression=settings, verify_samples_per_payload=0, baseline=baseline)
    )

    def encode(new: Tensors, old: Tensors) -> list[bytes]:
        tracker.baseline = old
        (indices, values, items), *_ = tracker.prepare_sparse_delta_payload(list(new.items()))
        parts = [json.dumps(items).encode(), indices.numpy().tobytes(), *(part.numpy().tobytes() for part in values)]
        sizes = np.array([len(part) for part in parts], "<u8").tobytes()
        return [sizes, zstandard.ZstdCompressor(level=1).compress(b"".join(parts))]

    def apply(blobs: list[bytes], live: Tensors) -> None:
        data, sizes = zstandard.ZstdDecompressor().decompress(blobs[1]), np.frombuffer(blobs[0], "<u8").tolist()
        items, ends = json.loads(data[: sizes[0]]), np.cumsum(sizes).tolist()
        indices = torch.frombuffer(bytearray(data[ends[0] : ends[1]]), dtype=torch.uint8)
        values = torch.frombuffer(bytearray(data[ends[1] : ends[2]]), dtype=torch.int16)
        for item in items:
            places = own.sparse_locations_for_item(item, indices, device="cpu")
            target = own.integer_view(live[item["name"]]).view(-1)
            target[places] ^= values[item["value_start"] : item["value_end"]]

    return encode, apply


def steps(args: argparse.Namespace) -> dict:
    ways = {
        "hf_ext": ours(),
        "slime, xor": slime(args.others, "xor"),
        "slime, overwrite": slime(args.others, "overwrite"),
        "SkyRL": skyrl(args.others),
        "NeMo-RL": nemo_rl(args.others),
        "all weights": full(),
    }
    results: dict = {}
    rows = []
    for rate in RATES:
        old, new = (load_file(args.lm / f"step-{rate}" / end / "model.safetensors") for end in ("0", "1"))
        for way, (encode, apply) in ways.items():
            figures: dict = {"encode": [], "apply": []}
            for _ in range(args.runs):
                live = {name: tensor.clone() for name, tensor in old.items()}
                with one_thread():
                    start = time.process_time()
                    blobs = encode(new, old)
                    encoded = time.process_time()
                    apply(blobs, live)
                    figures["apply"].append(time.process_time() - encoded)
                figures["encode"].append(encoded - start)
                if any(not np.array_equal(bits(live[name]), bits(tensor)) for name, tensor in new.items()):
                    raise SystemExit(f"{way} does not give back the step")
            size = sum(map(len, blobs))
            results[f"{rate} {way}"] = figures | {"bytes": size}
        medians = {way: [statistics.median(results[f"{rate} {way}"][what]) for what in ("encode", "apply")] for way in ways}
        whole = results[f"{rate} all weights"]["bytes"]
        for way in ways:
            size, cpu = results[f"{rate} {way}"]["bytes"], sum(medians[way])
            more = cpu - sum(medians["all weights"])
            row = [f"{rate}, {100 * changed(old, new):.2f} %", way, f"{size / 1e6:.3f}", *(f"{s:.3f}" for s in medians[way])]
            row += [f"{cpu + size * 8e-9 / gbits:.2f}" for gbits in GBITS]
            rows.append(row + [f"{(whole - size) * 8e-9 / more:.0f}" if more > 0 else "–"])
    header = ["rate, changed", "way", "MB", "encode, s", "apply, s", *(f"s at {gbits} Gbit/s" for gbits in GBITS)]
    print_table("One step of SmolLM2-135M in bf16", [*header, "border, Gbit/s"], rows)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, required=True, help="folder that benchmarks/language_model.py makes")
    parser.add_argument("--others", type=Path, required=True, help="folder with checkouts of the other projects")
    run_sections(parser, {"steps": steps}, has_runs=True)
