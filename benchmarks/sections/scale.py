"""Measure compressing and loading of a larger model: a section of benchmarks/fm_delta.py.

No such fine-tune is available offline, so the benchmark draws a random one with the shapes of Llama 3.2 1B. Its base is random.
Its change resembles that of the real fine-tune, matrix by matrix: the same size relative to the base, a low-rank part with the
same share and decay of the energy on top of white noise, and the same share of unchanged rows of the embedding. The benchmark
measures time and memory. Its compressed size need not be that of a real fine-tune.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import fresh, peak_of, print_table, size_of, timed
from safetensors.torch import save_file
from sections.load_from_hub import empty_model, load_and_read
from sections.pairs import is_dense, load_tensors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_ext.fm_delta import compress_checkpoint

Shard = dict[str, tuple[torch.Tensor, torch.Tensor]]

BASE_SCALE = 0.02  # of the random base's values


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
    spectra = [spectrum(tensor, base) for name, tensor, base in tensors if is_dense(name, tensor)]
    changed = [(tensor != base).any(-1).double().mean().item() for name, tensor, base in tensors if "word_embeddings" in name]
    return spectra, changed[0]


def config_of(args: argparse.Namespace) -> LlamaConfig:
    """Returns the configuration of Llama 3.2 1B, or a smaller one in proportion."""
    heads = args.width // 64
    return LlamaConfig(
        hidden_size=args.width, intermediate_size=4 * args.width, num_hidden_layers=args.layers, num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1), vocab_size=128256 * args.width // 2048, tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip


def trained(base: torch.Tensor, like: Spectrum, generator: torch.Generator) -> torch.Tensor:
    """Returns the base in float32 after a change like a measured one."""
    rows, columns = base.shape
    size = like.change * base.norm()
    noise = torch.randn(base.shape, generator=generator)
    delta = noise * (size * math.sqrt(1 - like.share) / math.sqrt(rows * columns))
    if like.profile:
        # Random directions in so many dimensions are orthogonal but for little.
        left = torch.randn(rows, len(like.profile), generator=generator) / math.sqrt(rows)
        right = torch.randn(len(like.profile), columns, generator=generator) / math.sqrt(columns)
        delta += (left * torch.tensor(like.profile) * size * math.sqrt(like.share)) @ right
    return base + delta


def shards(config: LlamaConfig, spectra: list[Spectrum], changed: float) -> Iterator[Shard]:
    """Yields fine-tune and base, a layer at a time, in bfloat16."""
    with torch.device("meta"):
        weights = LlamaForCausalLM(config).named_parameters()  # each once, though the embedding is the head too
        shapes = {name: tuple(weight.shape) for name, weight in weights}
    generator = torch.Generator().manual_seed(0)
    kinds = len([name for name, shape in shapes.items() if ".layers.0." in name and len(shape) == 2])
    layers: dict[str, list[str]] = {}
    for name in shapes:
        layers.setdefault(name.split(".")[2] if ".layers." in name else name, []).append(name)
    for names in layers.values():
        shard, matrix = {}, 0
        for name in names:
            shape = shapes[name]
            if len(shape) == 1:
                before = torch.ones(shape)
                after = before + torch.randn(shape, generator=generator) * 1e-3
            else:
                before = torch.randn(shape, generator=generator).mul_(BASE_SCALE)
                if "embed" in name:
                    like = Spectrum(statistics.median(s.change for s in spectra), 0.0, ())
                    kept = torch.rand(shape[0], generator=generator) >= changed
                    after = trained(before, like, generator)
                    after[kept] = before[kept]
                else:
                    # The same depth of the real model, and another of its matrices each time.
                    depth = int(name.split(".")[2]) * (len(spectra) // 6) // config.num_hidden_layers
                    after = trained(before, spectra[6 * depth + matrix * 6 // kinds], generator)
                    matrix += 1
            shard[name] = after.bfloat16(), before.bfloat16()
        yield shard


def write_models(args: argparse.Namespace, tuned: Path, base: Path) -> int:
    """Writes both in shards, a layer each, so that only a layer is in memory; returns the number of parameters."""
    spectra, changed = measure_spectra(args.pairs / args.tasks[0])
    row = [
        f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
        for values in (
            [s.change for s in spectra],
            [100 * s.share for s in spectra],
            [len(s.profile) for s in spectra],
            [100 * s.share * sum(value**2 for value in s.profile[:16]) for s in spectra],
        )
    ]
    header = ["change beside the base", "low rank, % of its energy", "rank", "rank 16, %", "embedding rows changed"]
    title = f"{args.tasks[0]}, what training did to {len(spectra)} matrices: medians (least to most)"
    print_table(title, header, [[*row, f"{100 * changed:.0f} %"]])
    config = config_of(args)
    maps: list[dict[str, str]] = [{}, {}]
    parameters = 0
    for number, shard in enumerate(shards(config, spectra, changed)):
        for folder, place, index in ((tuned, 0, maps[0]), (base, 1, maps[1])):
            file = f"model-{number + 1:05d}.safetensors"
            folder.mkdir(exist_ok=True)
            save_file({name: pair[place] for name, pair in shard.items()}, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(shard, file)
        parameters += sum(pair[0].numel() for pair in shard.values())
    for folder, index in zip((tuned, base), maps):
        count = len(set(index.values()))
        for file in set(index.values()):
            (folder / file).rename(folder / numbered(file, count))
        index |= {name: numbered(file, count) for name, file in index.items()}
        config.save_pretrained(folder)
        written = {"metadata": {"total_size": 2 * parameters}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(written))
    return parameters


def numbered(file: str, count: int) -> str:
    """Returns the name of a shard among so many, as `save_pretrained` gives it."""
    return file.replace(".safetensors", f"-of-{count:05d}.safetensors")


def timed_with_peak(action: Callable, *args) -> tuple[float, float]:
    """Returns the seconds of one call, and the peak memory of this process in MB."""
    return timed(action, *args), peak_of(int)


def scale(args: argparse.Namespace) -> dict:
    """Seconds and peak memory of compressing and loading a model of a billion parameters in bf16, files in the page cache."""
    with tempfile.TemporaryDirectory() as scratch:
        tuned, base, packed = (Path(scratch) / name for name in ("tuned", "base", "packed"))
        parameters = fresh(write_models, args, tuned, base)
        results = {"parameters": parameters}
        actions = {
            "model without weights": (empty_model, tuned, AutoModelForCausalLM),
            "compress_checkpoint": (compress_checkpoint, tuned, base, packed),
            "from_pretrained, plain": (load_and_read, tuned, AutoModelForCausalLM),
            "from_pretrained, compressed": (load_and_read, packed, AutoModelForCausalLM),
        }
        rows, original = [], 0
        for what, action in actions.items():
            seconds, peak = fresh(timed_with_peak, *action)
            original = size_of(tuned, "*.safetensors") / 1e6
            results[what] = {"seconds": seconds, "peak_mb": peak}
            rows.append([what, f"{seconds:.2f}", f"{original / seconds:.0f}", f"{peak:.0f}", f"{peak / original:.2f}"])
        results["share"] = size_of(packed, "*.safetensors") / size_of(tuned, "*.safetensors")
    rows[0][2] = ""
    model = f"bf16, {parameters / 1e9:.2f} B parameters, {original:.0f} MB, drawn like {args.tasks[0]}"
    title = f"{model}; compressed {100 * results['share']:.1f} % of it"
    print_table(title, ["what, in a fresh process", "seconds", "MB/s", "peak memory, MB", "of the model"], rows)
    return results
