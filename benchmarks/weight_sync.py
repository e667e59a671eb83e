"""Measure the cost of sending the weights of each training step to inference servers, with this package and as others do.

    pip install trl zstandard
    python benchmarks/weight_sync.py --lm lm

``lm`` is the folder that benchmarks/language_model.py makes; only ``lm/base`` is needed. SmolLM2-135M is trained on docstrings
of Python's standard library, with weights in float32 and AdamW: with TRL's GRPOTrainer at a learning rate of 1e-6 (section
``grpo``: 4 prompts a step, 4 completions each, rewarded for the share of the letter "e"), and with its SFTTrainer at 1e-5
(section ``sft``). After each optimizer step the weights, rounded to bf16, go to receivers that hold those of the step before,
with each of these methods. Each receiver must end up with the same bits.

- ours: one payload of FM-Delta for each tensor, at level 1.
- XOR, zstd -1: the bits of a tensor XOR those of the step before, in one frame for each tensor. The default of slime
  (update_weight_from_disk_delta.py) and the way of SkyRL (delta_checkpoint.py).
- int32 + value: the flat indices of the values that changed, and these values. vLLM's backend ``sparse_nccl``, and an
  experiment of prime-rl.
- gaps + value, zstd -1: the differences between indices, in 16 bits where they fit, and the values, in one frame. grail, which
  implements PULSE (arXiv 2602.03839, sparse_codec.py), but with flat indices, which take fewer bytes than its rows and columns.
- gaps + XOR, zstd -1: the same, with old values XOR new ones. The default of NeMo RL (weight_transfer_sparse_codec.py).
- full: all weights, as prime-rl, AReaL, TRL and vLLM's other backends send them.

The sources are of August 2026. Their formats are written here with NumPy; other_codecs.py runs their own code. Times are CPU
seconds on one thread, so that other processes hardly matter. Ours includes checksums of the payload and of the weights. slime,
SkyRL and grail compute checksums too; their times here are without.

The section ``folder`` sends the first steps of both trainings, as many as ``--runs`` says, through a folder: with a `Publisher`
and a `Subscriber`, and as a file of all weights.
"""

import argparse
import builtins
import importlib
import inspect
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import zstandard
from datasets import Dataset
from measuring import one_thread, print_table, ratio, run_sections
from safetensors.torch import load_file, save_file
from sections.steps import Tensors, bits, changed, values
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from hf_ext import storage
from hf_ext.weight_sync import Publisher, Subscriber

MODULES = ("argparse", "collections", "datetime", "decimal", "functools", "heapq", "inspect", "itertools", "json", "logging")
MODULES += ("math", "os", "pathlib", "random", "re", "shutil", "socket", "statistics", "string", "subprocess", "threading")
GBITS = (1, 10, 100)  # per second
OPTIONS = {"lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
OPTIONS |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}


def of_each(encode: Callable, apply: Callable) -> tuple[Callable, Callable]:
    """Returns a way that stores each tensor by itself."""

    def apply_all(blobs: list[bytes], live: Tensors) -> None:
        for blob, tensor in zip(blobs, live.values()):
            apply(blob, tensor)

    return lambda weights, base: [encode(weight, base[name]) for name, weight in weights.items()], apply_all


def zstd_encode(tensor: torch.Tensor, base: torch.Tensor) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bits(tensor) ^ bits(base))


def zstd_apply(blob: bytes, live: torch.Tensor) -> None:
    live_bits = bits(live)
    live_bits ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint16)


def sparse(gaps: bool = False, xor: bool = False, zipped: bool = False) -> tuple[Callable, Callable]:
    """Returns a way that lists the changed values: for each tensor their number and the width of an index in bytes, then all
    indices, then all values."""

    def encode(weights: Tensors, base: Tensors) -> list[bytes]:
        counts, indices, listed = [], [], []
        for name, weight in weights.items():
            new, old = bits(weight), bits(base[name])
            places = np.flatnonzero(new != old)
            steps = np.diff(places, prepend=-1) - 1 if gaps else places
            indices.append(steps.astype(np.uint16 if gaps and steps.max(initial=0) < 1 << 16 else np.uint32))
            listed.append(new[places] ^ old[places] if xor else new[places])
            counts.append((places.size, indices[-1].itemsize))
        blob = b"".join(part.tobytes() for part in (np.array(counts, np.uint32), *indices, *listed))
        return [zstandard.ZstdCompressor(level=1).compress(blob) if zipped else blob]

    def apply(blobs: list[bytes], live: Tensors) -> None:
        blob = zstandard.ZstdDecompressor().decompress(blobs[0]) if zipped else blobs[0]
        counts = np.frombuffer(blob, np.uint32, 2 * len(live)).reshape(-1, 2).tolist()
        index_at = 8 * len(live)
        value_at = index_at + sum(count * width for count, width in counts)
        for (count, width), tensor in zip(counts, live.values()):
            places = np.frombuffer(blob, f"u{width}", count, index_at)
            listed = np.frombuffer(blob, np.uint16, count, value_at)
            index_at, value_at = index_at + count * width, value_at + 2 * count
            if gaps:
                places = np.cumsum(places.astype(np.int64) + 1) - 1
            live_bits = bits(tensor)
            live_bits[places] = live_bits[places] ^ listed if xor else listed

    return encode, apply


def full_apply(blob: bytes, live: torch.Tensor) -> None:
    bits(live)[:] = np.frombuffer(blob, np.uint16)


WAYS: dict[str, tuple[Callable, Callable]] = {
    "ours": of_each(lambda tensor, base: storage.encode(tensor, base, level=1), storage.apply),
    "XOR, zstd -1": of_each(zstd_encode, zstd_apply),
    "int32 + value": sparse(),
    "gaps + value, zstd -1": sparse(gaps=True, zipped=True),
    "gaps + XOR, zstd -1": sparse(gaps=True, xor=True, zipped=True),
    "full": of_each(lambda tensor, base: bits(tensor).tobytes(), full_apply),
}


class Measure(TrainerCallback):
    """Sends the weights of each step in every way, and keeps those of the first steps as files."""

    def __init__(self, model: PreTrainedModel, folder: Path, kept: int) -> None:
        self.model, self.folder, self.kept = model, folder, kept
        self.weights = self.rounded()
        self.live = {way: {name: weight.clone() for name, weight in self.weights.items()} for way in WAYS}
        self.results: dict = {"changed": [], **{way: {"bytes": [], "encode": [], "apply": []} for way in WAYS}}
        self.keep(0)

    def rounded(self) -> Tensors:
        """Returns the weights in bf16 under their names in the checkpoint, tied ones once."""
        return {name: weight.detach().bfloat16() for name, weight in self.model.named_parameters()}

    def keep(self, step: int) -> None:
        if step <= self.kept:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(self.weights, self.folder / f"{step}.safetensors")

    def on_step_end(self, args, state, control, **others) -> None:
        base, self.weights = self.weights, self.rounded()
        self.results["changed"].append(changed(base, self.weights))
        with one_thread():
            for way, (encode, apply) in WAYS.items():
                figures, live = self.results[way], self.live[way]
                start = time.process_time()
                blobs = encode(self.weights, base)
                encoded = time.process_time()
                apply(blobs, live)
                figures["apply"].append(time.process_time() - encoded)
                figures["encode"].append(encoded - start)
                figures["bytes"].append(sum(map(len, blobs)))
                if any(not np.array_equal(bits(live[name]), bits(weight)) for name, weight in self.weights.items()):
                    raise SystemExit(f"{way} does not give back the weights of step {state.global_step}")
        self.keep(state.global_step)


def docstrings() -> list[str]:
    """Docstrings of the standard library, each as one line."""
    members = [member for name in MODULES for member in vars(importlib.import_module(name)).values()]
    members += [method for kind in (str, bytes, dict, list, set, int) for method in vars(kind).values()]
    texts = {" ".join((inspect.getdoc(member) or "").split()) for member in [*members, *vars(builtins).values()]}
    return sorted(text for text in texts if len(text) > 100)


def share_of_e(completions: list[str], **others) -> list[float]:
    """Returns the reward."""
    return [text.count("e") / max(len(text), 1) for text in completions]


def grpo(model: PreTrainedModel, options: dict) -> Trainer:
    prompts = Dataset.from_dict({"prompt": [" ".join(text.split()[:8]) for text in docstrings()]})
    config = GRPOConfig(
        learning_rate=1e-6, per_device_train_batch_size=16, num_generations=4, max_completion_length=24, **options
    )
    return GRPOTrainer(model, share_of_e, args=config, train_dataset=prompts)


def sft(model: PreTrainedModel, options: dict) -> Trainer:
    texts = Dataset.from_dict({"text": docstrings()})
    config = SFTConfig(learning_rate=1e-5, per_device_train_batch_size=8, max_length=64, **options)
    return SFTTrainer(model, args=config, train_dataset=texts)


def train(start: Callable[[PreTrainedModel, dict], Trainer], args: argparse.Namespace) -> dict:
    """Figures of each step of one training run."""
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.lm / "base", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = start(model, OPTIONS | {"output_dir": folder, "max_steps": args.steps})
        measure = Measure(model, kept_steps(args, start.__name__), args.runs)
        trainer.add_callback(measure)
        trainer.train()
    report(start.__name__, measure.results, values(measure.weights))
    return measure.results


def report(name: str, results: dict, parameters: int) -> None:
    """Prints the tables of one run."""
    median, share = statistics.median, [100 * each for each in results["changed"]]
    title = f"{name}: {parameters / 1e6:.0f} million weights, {len(share)} steps; a step changes {median(share):.2f} % of them"
    title += f" (median; the first {share[0]:.2f} %, the last {share[-1]:.2f} %)"
    cpu = {way: [sum(both) for both in zip(results[way]["encode"], results[way]["apply"])] for way in WAYS}
    rows = []
    for way in WAYS:
        figures, row = results[way], [way]
        for several in ([size / 1e6 for size in figures["bytes"]], figures["encode"], figures["apply"]):
            row.append(f"{median(several):.3f} ({min(several):.3f}–{max(several):.3f})")
        row.append(f"{ratio(figures['bytes'], results['ours']['bytes']):.2f} ×")
        row.append(f"{ratio(cpu[way], cpu['XOR, zstd -1']):.2f} ×")
        for rate in GBITS:
            row.append(f"{median(seconds + size * 8e-9 / rate for seconds, size in zip(cpu[way], figures['bytes'])):.3f}")
        rows.append(row)
    header = ["way", "MB a step", "encode, s", "apply, s", "bytes, ours = 1", "CPU time, XOR, zstd -1 = 1"]
    print_table(title, header + [f"s at {rate} Gbit/s" for rate in GBITS], rows)


def folder(args: argparse.Namespace) -> dict:
    """Bytes and wall-clock seconds of sending the first steps through a folder: with a `Publisher` and a `Subscriber`, and as a
    file of all weights that a receiver reads."""
    results, rows = {}, []
    for run in ("grpo", "sft"):
        kept = kept_steps(args, run)
        if not (kept / f"{args.runs}.safetensors").exists():
            raise SystemExit(f"{kept} lacks the weights of {args.runs} steps; run the section {run} with the same --runs first")
        steps = [load_file(kept / f"{step}.safetensors") for step in range(args.runs + 1)]
        with tempfile.TemporaryDirectory(dir=kept) as place, Publisher(place, dtype=torch.bfloat16) as publisher:
            file = Path(place, "full.safetensors")
            ways: dict[str, tuple[Callable, Callable, Callable]] = {
                "Publisher, Subscriber": (publisher.publish, publisher.wait, Subscriber(place).update),
                "safetensors, all weights": (partial(save_all, file), lambda: None, partial(load_all, file)),
            }
            results[run] = {way: {what: [] for what in ("bytes", "returned", "complete", "received")} for way in ways}
            live = {way: {name: torch.empty_like(weight) for name, weight in steps[0].items()} for way in ways}
            for step, weights in enumerate(steps):
                masters = {name: weight.float() for name, weight in weights.items()}
                for way, (send, wait, receive) in ways.items():
                    before, start, figures = written(place), time.perf_counter(), results[run][way]
                    send(masters, step)
                    figures["returned"].append(time.perf_counter() - start)
                    wait()
                    figures["complete"].append(time.perf_counter() - start)
                    receive(live[way])
                    figures["received"].append(time.perf_counter() - start)
                    figures["bytes"].append(sum(file.stat().st_size for file, _ in written(place) - before))
                    if any(not np.array_equal(bits(live[way][name]), bits(weight)) for name, weight in weights.items()):
                        raise SystemExit(f"{way} does not give back the weights of step {step}")
        for way, figures in results[run].items():
            for which, chosen in (("first step", slice(1)), (f"next {args.runs}", slice(1, None))):
                size, *seconds = (statistics.median(several[chosen]) for several in figures.values())
                rows.append([f"{run}, {which}", way, f"{size / 1e6:.2f}", *(f"{each:.3f}" for each in seconds)])
    header = ["", "", "MB", "publish() returned, s", "files complete, s", "received, s"]
    print_table("Through a folder: seconds from the call of publish() on, all threads", header, rows)
    return results


def written(place: str) -> set[tuple[Path, int]]:
    """Returns the files of a folder, with the time of their last write."""
    return {(file, file.stat().st_mtime_ns) for file in Path(place).iterdir()}


def save_all(file: Path, masters: Tensors, step: int) -> None:
    """Writes all weights and flushes them to the disk, as the publisher does."""
    save_file({name: weight.bfloat16() for name, weight in masters.items()}, file)
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


def load_all(file: Path, live: Tensors) -> None:
    for name, weight in load_file(file).items():
        live[name].copy_(weight)


def kept_steps(args: argparse.Namespace, run: str) -> Path:
    """Returns the folder with the weights of the first steps of a run."""
    return (args.keep or args.lm / "steps") / run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, required=True, help="folder that benchmarks/language_model.py makes")
    parser.add_argument("--steps", type=int, default=100, help="steps of each training run")
    parser.add_argument("--keep", type=Path, help="where the weights of the first steps are kept (default: LM/steps)")
    run_sections(parser, {"grpo": partial(train, grpo), "sft": partial(train, sft), "folder": folder}, has_runs=True)
