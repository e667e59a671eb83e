"""Measure FM-Delta and EMR-Merging on a larger model: a section of benchmarks/fm_delta.py.

No such fine-tunes are available offline, so the benchmark draws two random ones with the shapes of a real model. Their base is
random. Their changes resemble those of the real fine-tune, matrix by matrix: the same size relative to the base, a low-rank
part with the same share and decay of the energy on top of white noise, and the same share of unchanged rows of the embedding.
The benchmark measures time and memory. The compressed size need not be that of a real fine-tune.

It writes more than three times the model's size to the folder for temporary files (TMPDIR).
"""

import argparse
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread

import torch
from measuring import fresh, load_and_read, print_table, size_of, timed
from safetensors.torch import save_file
from sections.pairs import load_tensors
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from hf_ext import emr
from hf_ext.fm_delta import compress_checkpoint, switch, verify

Tensors = dict[str, torch.Tensor]

BASE_SCALE = 0.02  # of the random base's values
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
SHAPES: dict[str, PretrainedConfig] = {
    "llama-3.2-1b": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True, **LLAMA
    ),
    "llama-3-8b": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, tie_word_embeddings=False, **LLAMA
    ),
}


@dataclass(frozen=True)
class Spectrum:
    """The change of a matrix by training: its size beside the base's (of root mean squares), the low-rank part's share of its
    energy, and that part's singular values (of unit energy), the largest first."""

    change: float
    share: float
    profile: tuple[float, ...]


def spectrum(tensor: torch.Tensor, base: torch.Tensor) -> Spectrum:
    """Splits a change into white noise and what stands out of it: singular values above those that noise has, σ(√m + √n)."""
    delta = tensor.double() - base.double()
    rows, columns = delta.shape
    energies = torch.linalg.svdvals(delta) ** 2
    rank, noise = -1, 0.0
    for _ in range(50):
        previous, rank = rank, max(rank, 0)
        noise = energies[rank:].sum().item() / ((rows - rank) * (columns - rank))
        rank = int((energies > noise * (math.sqrt(rows) + math.sqrt(columns)) ** 2).sum())
        if rank == previous:
            break
    # Noise is in the directions that stand out, too.
    signal = (energies[:rank] - noise * (rows + columns)).clamp(min=0)
    share = signal.sum().item() / energies.sum().item()
    profile = (signal / signal.sum()).sqrt().tolist() if share else []
    return Spectrum(delta.norm().item() / base.double().norm().item(), share, tuple(profile))


def measure_spectra(folder: Path) -> tuple[list[Spectrum], float]:
    """Returns the spectra of a fine-tune's dense matrices in the order of the file, and the share of changed rows of its
    embedding."""
    tensors = load_tensors(folder)
    spectra = [spectrum(tensor, base) for name, tensor, base in tensors if tensor.ndim == 2 and ".layer." in name]
    changed = [(tensor != base).any(-1).double().mean().item() for name, tensor, base in tensors if "word_embeddings" in name]
    return spectra, changed[0]


def config_of(args: argparse.Namespace) -> PretrainedConfig:
    """Returns the configuration of the model whose shapes are drawn."""
    config = SHAPES[args.shape]
    config.update({"dtype": "bfloat16"})
    return config


def trained(base: torch.Tensor, like: Spectrum, generator: torch.Generator) -> torch.Tensor:
    """Returns a matrix in float32 after a change like a measured one."""
    rows, columns = base.shape
    size = like.change * base.norm()
    delta = torch.randn(base.shape, generator=generator).mul_(size * math.sqrt(1 - like.share) / math.sqrt(rows * columns))
    if like.profile:
        # Random directions in so many dimensions are orthogonal but for little.
        left = torch.randn(rows, len(like.profile), generator=generator) / math.sqrt(rows)
        right = torch.randn(len(like.profile), columns, generator=generator) / math.sqrt(columns)
        delta.addmm_(left * torch.tensor(like.profile) * size * math.sqrt(like.share), right)
    return delta.add_(base)


def drawn(shape: torch.Size, like: Spectrum, changed: float, generator: torch.Generator) -> list[torch.Tensor]:
    """Returns two fine-tunes of a tensor and their base, in bfloat16. A fine-tune changes this share of the rows."""
    if len(shape) == 1:
        base = torch.ones(shape)
        return [(base + torch.randn(shape, generator=generator) * 1e-3).bfloat16() for _ in range(2)] + [base.bfloat16()]
    base = torch.randn(shape, generator=generator).mul_(BASE_SCALE)
    tuned = [trained(base, like, generator) for _ in range(2)]
    for tensor in tuned:
        if changed < 1:
            kept = torch.rand(shape[0], generator=generator) >= changed
            tensor[kept] = base[kept]
    return [tensor.bfloat16() for tensor in (*tuned, base)]


def shards(config: PretrainedConfig, spectra: list[Spectrum], changed: float) -> Iterator[list[Tensors]]:
    """Yields two fine-tunes and their base, a layer at a time."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    shapes = {name: weight.shape for name, weight in model.named_parameters()}  # each once, also an embedding that is the head
    generator = torch.Generator().manual_seed(0)
    layers: dict[str, list[str]] = {}
    for name in shapes:
        layers.setdefault(name.split(".")[2] if ".layers." in name else name, []).append(name)
    whole = Spectrum(statistics.median(s.change for s in spectra), 0.0, ())
    for names in layers.values():
        shard: list[Tensors] = [{}, {}, {}]
        matrices = [name for name in names if len(shapes[name]) > 1]
        for name in names:
            like, share = whole, changed if "embed" in name else 1.0
            if ".layers." in name and name in matrices:
                # The same depth of the real model, and another of its matrices each time.
                depth = int(name.split(".")[2]) * (len(spectra) // 6) // config.num_hidden_layers
                like = spectra[6 * depth + matrices.index(name) * 6 // len(matrices)]
            for tensors, tensor in zip(shard, drawn(shapes[name], like, share, generator)):
                tensors[name] = tensor
        yield shard


def write_models(args: argparse.Namespace, folders: list[Path]) -> int:
    """Writes all three in shards, a layer each, so that only a layer is in memory; returns the number of parameters."""
    spectra, changed = measure_spectra(args.pairs / args.tasks[0])
    config = config_of(args)
    index: dict[str, int] = {}
    parameters = 0
    for number, shard in enumerate(shards(config, spectra, changed), start=1):
        for folder, tensors in zip(folders, shard):
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / f"{number}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(shard[0], number)
        parameters += sum(tensor.numel() for tensor in shard[0].values())
    count = max(index.values())
    names = {number: f"model-{number:05d}-of-{count:05d}.safetensors" for number in index.values()}
    written = {"metadata": {"total_size": 2 * parameters}, "weight_map": {key: names[number] for key, number in index.items()}}
    for folder in folders:
        for number, name in names.items():
            (folder / f"{number}.safetensors").rename(folder / name)
        config.save_pretrained(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps(written))
    return parameters


def anonymous_peak(action: Callable[[], object]) -> float:
    """Megabytes of memory, without what is mapped from files, that a call takes at most above what there was before."""

    def memory() -> float:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000

    before, most, done = memory(), [0.0], Event()

    def watch() -> None:
        while not done.wait(0.0005):
            most.append(memory() - before)

    watcher = Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return max(most)


def measured(action: Callable, *args) -> tuple[float, float]:
    """Returns the seconds of one call, and the MB of memory that it takes beyond mapped files."""
    seconds: list[float] = []
    peak = anonymous_peak(lambda: seconds.append(timed(action, *args)))
    return seconds[0], peak


def measured_switch(here: Path, there: Path) -> tuple[float, float]:
    model = AutoModelForCausalLM.from_pretrained(here)
    return measured(switch, model, there)


def scale(args: argparse.Namespace) -> dict:
    """Measures time and memory of each step, in a process of its own, for a model in bf16."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = ("tuned", "other", "base", "packed", "other-packed", "merged")
        tuned, other, base, packed, other_packed, merged = (Path(scratch) / name for name in folders)
        parameters = fresh(write_models, args, [tuned, other, base])
        original = size_of(tuned, "*.safetensors") / 1e6
        fresh(compress_checkpoint, other, base, other_packed)
        shutil.rmtree(other)
        actions: dict[str, tuple] = {
            "compress": (measured, compress_checkpoint, tuned, base, packed),
            "verify": (measured, verify, packed),
            "from_pretrained, compressed": (measured, load_and_read, packed, AutoModelForCausalLM),
            "from_pretrained, plain": (measured, load_and_read, tuned, AutoModelForCausalLM),
            "switch to the other fine-tune": (measured_switch, packed, other_packed),
            "merge both": (
                measured,
                partial(emr.merge, method="emr"),
                base,
                {"one": str(tuned), "other": str(other_packed)},
                merged,
            ),
        }
        results: dict = {"parameters": parameters}
        rows = []
        for what, action in actions.items():
            seconds, peak = fresh(*action)
            results[what] = {"seconds": seconds, "peak_mb": peak}
            rows.append([what, f"{seconds:.2f}", f"{original / seconds:.0f}", f"{peak:.0f}", f"{peak / original:.2f}"])
            print(*rows[-1], file=sys.stderr, flush=True)
        sizes = {folder.name: size_of(folder, "*.safetensors") / 1e6 / original for folder in (packed, merged)}
    results |= sizes
    title = f"{args.shape}, {parameters / 1e9:.2f} B parameters, {original:.0f} MB in bf16, drawn like {args.tasks[0]}; "
    title += f"compressed {100 * sizes['packed']:.1f} % of it, the merge of two {100 * sizes['merged']:.1f} %"
    print_table(title, ["step", "seconds", "MB/s", "memory beyond mapped files, MB", "of the model"], rows)
    return results
