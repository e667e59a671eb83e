"""Measure the fine-tune codec and its peers on real pairs of base and fine-tune: size, speed, loading with Transformers,
sending over links, models of a billion parameters, fused experts, and one-byte types.

    python benchmarks/fm_delta.py --pairs pairs

``pairs`` is the folder that benchmarks/fine_tunes.py makes. bf16 and fp16 pairs are the float32 ones, both cast with torch.
Every codec must restore the same bits of every measured tensor; otherwise the run stops.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from fine_tunes import FILES, minilm
from measuring import TORCH, fresh, in_turns, one_thread, peak_of, print_table, run_sections
from peft import PeftModel
from safetensors.torch import load_file, save_file
from sections.alone import alone
from sections.diffusion import diffusion
from sections.experts import experts
from sections.links import cold, links
from sections.load_from_hub import empty_model, load_and_read
from sections.pairs import QUANTIZED, Pair, all_ours, compress_checked, load_pairs, measure, ours, speed_row, write_models
from sections.peers import Peer, all_peers, zstd_xor_planes
from sections.scale import SHAPES, scale
from sections.switching import switching
from sections.xet import xet
from transformers import AutoModel
from transformers import AutoModelForSequenceClassification as Classifier
from transformers.utils import logging

from hf_ext.display import new_figure, save_figure
from hf_ext.fm_delta import compress_checkpoint, find_base, inspect

YARDSTICK = "fm-delta"

logging.disable_progress_bar()


def size(args: argparse.Namespace, dtype: str) -> dict:
    """Returns bits per parameter as {"dense" or "whole": {peer: {task: bits}}}, printed with the share of fm-delta's size."""
    return sizes({task: load_pairs(args.pairs / task, dtype) for task in args.tasks}, dtype)


def widened(args: argparse.Namespace) -> dict:
    """Returns the same for the first task in fp32, with values (and those of its base) rounded to bf16 or fp16."""
    task, results = args.tasks[0], {}
    for values in ("bf16", "fp16"):
        print(f"\nThe values are those of {values}:")
        results[values] = sizes({task: load_pairs(args.pairs / task, "fp32", values=values)}, "fp32")
    return results


def merged(args: argparse.Namespace, dtype: str) -> dict:
    """Returns the same for the LoRA of the first task, merged by PEFT into the base in its type."""
    task = f"{args.tasks[0]}-lora"
    adapter = args.pairs / task
    labels = len(load_file(adapter / "adapter_model.safetensors")["base_model.model.classifier.bias"])
    model = Classifier.from_pretrained(minilm(), num_labels=labels, dtype=TORCH[dtype])
    with tempfile.TemporaryDirectory() as folder:
        PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)
        return sizes({task: load_pairs(Path(folder), dtype)}, dtype)


def sizes(tasks: dict[str, list[Pair]], dtype: str) -> dict:
    """Returns the sizes for each task's tensors."""
    results = {"dense": {}, "whole": {}}
    for task, pairs in tasks.items():
        for peer in [ours(), *all_peers()]:
            blobs = compress_checked(peer, pairs, dtype)
            for part, per_peer in results.items():
                chosen = [i for i, pair in enumerate(pairs) if pair.dense or part == "whole"]
                bits = 8 * sum(len(blobs[i]) for i in chosen) / sum(pairs[i].x.size for i in chosen)
                per_peer.setdefault(peer.name, {})[task] = bits

    for part, per_peer in results.items():

        def mean(name, tasks, per_peer=per_peer):
            return statistics.mean(per_peer[name][task] for task in tasks)

        rows = []
        for name in per_peer:
            row = [name]
            for chosen in [tasks, *([task] for task in tasks)]:
                bits = mean(name, chosen)
                share = f" ({100 * bits / mean(YARDSTICK, chosen):.1f} %)" if YARDSTICK in per_peer else ""
                row.append(f"{bits:.3f}{share}")
            rows.append(row)
        print_table(f"{dtype}, {part}: bits per parameter (% of fm-delta)", ["codec", "mean", *tasks], rows)
    return results


def speed(args: argparse.Namespace, dtype: str) -> dict:
    """Returns results for the dense matrices of the first task: percent of the original, and MB/s on one thread."""
    pairs = [pair for pair in load_pairs(args.pairs / args.tasks[0], dtype) if pair.dense]
    return speeds(f"{dtype}, dense of {args.tasks[0]}", pairs, dtype, [*all_ours(), *all_peers()], args.runs)


def load(args: argparse.Namespace, dtype: str) -> dict:
    """Returns the seconds to load the plain and the compressed first task, warm, and the peak memory of fresh processes in
    MB."""
    with tempfile.TemporaryDirectory() as scratch:
        base, plain, packed = map(str, write_models(args, dtype, Path(scratch)))
        expected, loaded = (Classifier.from_pretrained(folder).state_dict() for folder in (plain, packed))
        if expected.keys() != loaded.keys() or not all(torch.equal(expected[key], loaded[key]) for key in expected):
            raise SystemExit(f"the compressed folder does not load the same weights in {dtype}")
        ways = {"plain": lambda: load_and_read(plain), "compressed": lambda: load_and_read(packed)}
        seconds = in_turns(ways, args.runs)
        actions = {
            "model without weights": (empty_model, plain),
            "from_pretrained, plain": (load_and_read, plain),
            "from_pretrained, compressed": (load_and_read, packed),
            "compress_checkpoint": (compress_checkpoint, plain, base, str(Path(scratch, "again"))),
        }
        peaks = {what: fresh(peak_of, *action) for what, action in actions.items()}
    rows = [[what, f"{statistics.median(times):.3f}"] for what, times in seconds.items()]
    print_table(f"{dtype}, {args.tasks[0]}: warm from_pretrained, median of {args.runs}", ["folder", "seconds"], rows)
    rows = [[what, f"{peak:.0f}"] for what, peak in peaks.items()]
    print_table(f"{dtype}, {args.tasks[0]}: peak memory of a fresh process", ["what", "MB"], rows)
    return {"seconds": seconds, "peak_mb": peaks}


def search(args: argparse.Namespace, dtype: str) -> dict:
    """Returns the verdicts of `find_base` on the first task's fine-tune: for its base, the other fine-tunes, and unrelated
    models."""
    generator = torch.Generator().manual_seed(0)
    origin = {name: tensor for name, tensor in load_file(minilm() / "model.safetensors").items() if tensor.is_floating_point()}

    def noisy(tensor: torch.Tensor, size: float) -> torch.Tensor:
        return tensor + size * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)

    def shuffled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)

    models = {f"base, {name}": cast_to(origin, TORCH[name]) for name in TORCH}
    models |= {f"fine-tune on {task}": load_file(args.pairs / task / "model.safetensors") for task in args.tasks[1:]}
    models |= {
        f"base, noise of {size} of its spread": {name: noisy(x, size) for name, x in origin.items()} for size in (0.1, 0.3, 1)
    }
    models["base, values shuffled"] = {name: shuffled(x) for name, x in origin.items()}
    with tempfile.TemporaryDirectory() as folder:
        tuned = Path(folder, "tuned")
        for place, tensors in {"tuned": load_file(args.pairs / args.tasks[0] / "model.safetensors"), **models}.items():
            Path(folder, place).mkdir()
            tensors = cast_to(tensors, TORCH[dtype]) if place == "tuned" else tensors
            save_file(tensors, Path(folder, place, "model.safetensors"))
        results = {place: find_base(tuned, [Path(folder, place)]).candidates[0] for place in models}
    rows = [[place, f"{c.agreement:.2f}", f"{c.bits:.2f}", c.verdict] for place, c in results.items()]
    print_table(f"{dtype}, {args.tasks[0]}: find_base", ["candidate", "agreement", "estimated bits/parameter", "base?"], rows)
    return {place: asdict(candidate) for place, candidate in results.items()}


def cast_to(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def series(args: argparse.Namespace, dtype: str) -> dict:
    """Returns sizes during a fine-tuning: of each checkpoint of the first task against the base, the one before and the one
    after it, as {"base", "before" or "after": {peer: {step: bits per parameter}}}; and the bytes that CompressCheckpoints
    would write."""
    folder = args.pairs / f"{args.tasks[0]}-trainer"
    run = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if len(run) < 2:
        raise SystemExit(f"{folder} has no checkpoints; make them with benchmarks/fine_tunes.py --save_steps 34")
    results = {"base": {}, "before": {}, "after": {}}
    for i, checkpoint in enumerate(run):
        step = checkpoint.name.split("-")[1]
        others = {"base": None} | ({"before": run[i - 1]} if i else {}) | ({"after": run[i + 1]} if i + 1 < len(run) else {})
        for against, other in others.items():
            pairs = load_pairs(checkpoint, dtype, other)
            for peer in (ours(), zstd_xor_planes()):
                blobs = compress_checked(peer, pairs, dtype)
                bits = 8 * sum(map(len, blobs)) / sum(pair.x.size for pair in pairs)
                results[against].setdefault(peer.name, {})[step] = bits

    columns = [(peer, against) for peer in results["base"] for against in results]
    rows = [
        [step, *(f"{results[against][peer][step]:.3f}" if step in results[against][peer] else "" for peer, against in columns)]
        for step in results["base"]["ours"]
    ]
    title = f"{dtype}, {args.tasks[0]}: bits per parameter as the fine-tuning goes on"
    print_table(title, ["step", *(f"{peer}, {against}" for peer, against in columns)], rows)

    with tempfile.TemporaryDirectory() as scratch:
        base = str(Path(scratch, "base"))
        AutoModel.from_pretrained(minilm(), dtype=TORCH[dtype]).save_pretrained(base)
        reports = []
        for checkpoint in run:
            plain, small = (Path(scratch, kind, checkpoint.name) for kind in ("plain", "small"))
            Classifier.from_pretrained(checkpoint, dtype=TORCH[dtype]).save_pretrained(plain)
            compress_checkpoint(plain, base, small)
            reports.append(inspect(small))
    original, compressed = (sum(getattr(report, key) for report in reports) for key in ("original_bytes", "compressed_bytes"))
    sizes = f"{original / 1e6:.1f} MB to {compressed / 1e6:.1f} MB ({100 * compressed / original:.1f} %)"
    print(f"\n{dtype}, {args.tasks[0]}: the {len(run)} checkpoints shrink from {sizes}")
    if args.plot:
        figure = new_figure(8, 4)
        axes = figure.subplots()
        for peer, against in columns:
            line = results[against][peer]
            axes.plot(list(map(int, line)), list(line.values()), label=f"{peer}, {against}", ls="-" if peer == "ours" else ":")
        axes.set(xlabel="step", ylabel="bits per parameter", ylim=(0, None), title=f"{dtype}, {args.tasks[0]}")
        figure.legend(loc="outside right center", fontsize="small", frameon=False)
        save_figure(figure, args.plot.with_stem(f"{args.plot.stem}-series-{dtype}"))
    return results | {"original_bytes": original, "compressed_bytes": compressed}


def quantized(args: argparse.Namespace) -> dict:
    """Returns results for the dense matrices of the first task in one-byte types: percent of the original, MB/s on one
    thread."""
    peers = [ours(), *(peer for peer in all_peers() if peer.name in ("zstd-3 raw", "zstd-3 XOR planes", "zipnn", "memcpy"))]
    pairs = {dtype: load_pairs(args.pairs / args.tasks[0], dtype) for dtype in QUANTIZED}
    return {dtype: speeds(f"{dtype}, dense of {args.tasks[0]}", pairs[dtype], dtype, peers, args.runs) for dtype in QUANTIZED}


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


TYPED = [size, merged, alone, speed, load, switching, search, series, links, cold]
WHOLE = [widened, scale, diffusion, experts, quantized, language_model, xet]
SECTIONS = {section.__name__: in_each_type(section) for section in TYPED} | {section.__name__: section for section in WHOLE}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="folder made by benchmarks/fine_tunes.py")
    parser.add_argument("--tasks", nargs="+", default=list(FILES), help="all sections but size use only the first")
    parser.add_argument("--lm", type=Path, help="language_model, xet: folder made by benchmarks/language_model.py")
    parser.add_argument("--dtypes", nargs="+", default=list(TORCH), choices=list(TORCH))
    parser.add_argument("--links", nargs="+", type=float, default=[100, 1000], help="cold: Mbit/s of the link to the Hub")
    parser.add_argument("--disk", type=float, help="links: MB/s of the disk, if it is not to be measured")
    parser.add_argument("--plot", type=Path, help="links and series: also draw them, in files for each type")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.2-1b", help="scale: the model whose shapes are drawn")
    parser.add_argument("--layers", type=int, help="scale: how many of its layers, all by default")
    run_sections(parser, SECTIONS)


if __name__ == "__main__":
    main()
