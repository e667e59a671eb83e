"""Compare Uni-Med's connector with a plain loop over experts, and its generation with the bare language model.

    python benchmarks/uni_med.py                            # all, at the paper's sizes; takes 15 GB and some minutes
    python benchmarks/uni_med.py --sections connector --device cuda
    python benchmarks/uni_med.py --sections trained --models uni-med-out/mlp-0 uni-med-out/moe_mlp-soft-0

The peer is the formula of the paper as its authors' code (github.com/MSIIP/Uni-Med) computes it: one expert after the other on
all tokens, and a router whose input is the task token concatenated to each visual token. The connector is tested against it.
"""

import argparse
import ctypes
import gc
import statistics
import sys

import torch
from measuring import fresh, in_turns, peak_of, print_table, ratio, run_sections
from PIL import Image
from torch import nn
from transformers import AutoModelForCausalLM, BatchFeature, LlamaConfig, ViTConfig
from transformers.utils import logging

from hf_ext import UniMedConfig, UniMedForConditionalGeneration, UniMedProcessor
from hf_ext.uni_med.connector import Connector, Experts

VISION, RATE, TEXT, EXPERTS, TOKENS, IMAGES, TASKS = 1408, 4, 4096, 5, 64, 4, 5  # of the paper
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Loop(nn.Module):
    """Experts one by one, with soft weights; sparse ones would save it nothing."""

    def __init__(self, router: bool):
        super().__init__()
        size = VISION * RATE
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, TEXT), nn.GELU(), nn.Linear(TEXT, TEXT)) for _ in range(EXPERTS)
        )
        self.task_tokens = nn.Parameter(torch.randn(TASKS, size) * 0.02)
        hidden = 4 * 2 * size
        self.router = nn.Sequential(nn.Linear(2 * size, hidden), nn.GELU(), nn.Linear(hidden, EXPERTS)) if router else None

    def forward(self, features: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        x = features.reshape(IMAGES, TOKENS, -1)
        if self.router is not None:
            tasks = self.task_tokens[torch.arange(IMAGES, device=x.device) % TASKS]
            logits = self.router(torch.cat([tasks[:, None].expand(-1, TOKENS, -1), x], dim=-1))
            weights = logits.sigmoid()
            weights = weights / weights.sum(-1, keepdim=True)
        return sum(expert(x) * weights[..., e, None] for e, expert in enumerate(self.experts))


class Ours(nn.Module):
    def __init__(self, router: bool, sparse: bool):
        super().__init__()
        self.connector = Connector(VISION, TEXT, router="sparse" if sparse else "soft") if router else None
        self.experts = None if router else Experts(EXPERTS, VISION * RATE, TEXT, linear=False)
        self.sparse = sparse

    def forward(self, features: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        if weights is None:
            tasks = torch.arange(IMAGES, device=features.device) % TASKS
            return self.connector(features, (16, 16), tasks)[0]
        x, weights = features.reshape(IMAGES * TOKENS, -1), weights.flatten(0, 1)
        if self.sparse:
            weights, chosen = weights.topk(2, dim=-1)
            return self.experts(x, weights, chosen)
        return self.experts(x, weights)


def keep_freed_memory() -> None:
    """Keeps freed memory in the process, as PyTorch does on GPUs. Otherwise half of the time goes into new pages for the
    gradients of each step."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: and it never shrinks


def build(way: str, router: bool, dtype: torch.dtype, device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor | None]:
    """Returns a module and its inputs."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    sparse = way.endswith("sparse")
    with torch.device(device):
        module = Loop(router) if way == "loop" else Ours(router, sparse)
        features = torch.randn(IMAGES, TOKENS * RATE, VISION)
        weights = None
        if not router:
            weights = torch.rand(IMAGES, TOKENS, EXPERTS)
            if sparse:
                top, chosen = weights.topk(2, dim=-1)
                weights = torch.zeros_like(weights).scatter(-1, chosen, top)
            weights = weights / weights.sum(-1, keepdim=True)
    torch.set_default_dtype(torch.float32)
    return module, features, weights


def step(module: nn.Module, features: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Runs forward and backward. It frees the gradients, as an optimizer's zero_grad does."""
    module(features, weights).square().mean().backward()
    module.zero_grad()
    if features.device.type == "cuda":
        torch.cuda.synchronize()


def memory(way: str, router: bool, dtype: torch.dtype, device: str) -> float:
    """Returns the peak of a step in MB."""
    if device != "cuda":
        return peak_of(step, *build(way, router, dtype, device))
    made = build(way, router, dtype, device)
    torch.cuda.reset_peak_memory_stats()
    step(*made)
    return torch.cuda.max_memory_allocated() / 1e6


def connector(args: argparse.Namespace) -> dict:
    """Measures a step of the connector at the paper's sizes."""
    keep_freed_memory()
    results = {}
    for part, router in (("experts and router", True), ("experts alone", False)):
        for name in args.dtypes:
            rows = []
            times, peaks = {}, {}
            for pair in (("loop", "hf_ext"), ("loop", "hf_ext sparse"), ("hf_ext", "hf_ext sparse")):
                made = {way: build(way, router, TYPES[name], args.device) for way in pair}
                times[pair] = in_turns({way: lambda made=made[way]: step(*made) for way in pair}, args.runs)
                del made
                gc.collect()
            for way in ("loop", "hf_ext", "hf_ext sparse"):
                peaks[way] = fresh(memory, way, router, TYPES[name], args.device)
            soft, sparse, both = times.values()
            loop = statistics.median(soft["loop"])
            rows.append(["loop", f"{loop:.2f}", "1.00", "", f"{peaks['loop']:,.0f}"])
            for way, seconds in (("hf_ext", soft), ("hf_ext sparse", sparse)):
                against = ratio(seconds["loop"], seconds[way])
                gain = f"{ratio(both['hf_ext'], both['hf_ext sparse']):.2f}" if way.endswith("sparse") else ""
                rows.append([way, f"{statistics.median(seconds[way]):.2f}", f"{against:.2f}", gain, f"{peaks[way]:,.0f}"])
            header = ["", "seconds", "times the loop's speed", "times the soft router's", "peak MB"]
            print_table(f"Forward and backward of {part}, {name}, {IMAGES} images of {TOKENS} tokens", header, rows)
            results[f"{part}, {name}"] = {
                "times": {" / ".join(pair): values for pair, values in times.items()},
                "peak_mb": peaks,
            }
    return results


def generate(args: argparse.Namespace) -> dict:
    """Measures greedy generation after the prompt, beside the same language model by itself."""
    logging.set_verbosity_error()
    text = LlamaConfig(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        eos_token_id=None,
    )
    vision = ViTConfig(hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=3)
    config = UniMedConfig(vision_config=vision, text_config=text, image_token_id=8000)
    torch.manual_seed(0)
    model = UniMedForConditionalGeneration(config).eval().to(args.device)
    bare = AutoModelForCausalLM.from_config(text).eval().to(args.device)
    bare.load_state_dict(model.language_model.state_dict())
    tokens = (224 // 16) ** 2 // RATE
    ids = torch.cat([torch.full((1, tokens), 8000), torch.randint(3, 8000, (1, 20))], 1).to(args.device)
    mask = torch.ones_like(ids)
    inputs = {"pixel_values": torch.randn(1, 3, 224, 224).to(args.device), "image_tasks": torch.tensor([0]).to(args.device)}
    with torch.inference_mode():
        embeds = model._embeddings(ids, model.get_image_features(**inputs))
        options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}

        def ours(count: int) -> None:
            model.generate(ids, **inputs, **options, max_new_tokens=count)

        def theirs(count: int) -> None:
            bare.generate(inputs_embeds=embeds, **options, max_new_tokens=count)

        short, long = 1, args.new_tokens + 1
        times = in_turns(
            {
                "hf_ext, prefill": lambda: ours(short),
                "hf_ext": lambda: ours(long),
                "bare, prefill": lambda: theirs(short),
                "bare": lambda: theirs(long),
            },
            args.runs,
        )
    speeds = {
        way: [args.new_tokens / (whole - first) for whole, first in zip(times[way], times[f"{way}, prefill"])]
        for way in ("bare", "hf_ext")
    }
    rows = [[way, f"{statistics.median(values):.1f}"] for way, values in speeds.items()]
    rows[1].append(f"{ratio(speeds['hf_ext'], speeds['bare']):.3f}")
    rows[0].append("1.000")
    header = ["", "tokens per second", "of the bare model's"]
    print_table(
        f"Generating {args.new_tokens} tokens after the prompt, {model.num_parameters() / 1e6:.0f} M parameters", header, rows
    )
    return {"tokens_per_second": speeds}


def load(folder: str, device: str) -> tuple[UniMedForConditionalGeneration, BatchFeature]:
    """Returns a model and its inputs for eight questions about one image."""
    model = UniMedForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    processor = UniMedProcessor.from_pretrained(folder)
    image = Image.effect_noise((640, 480), 50).convert("RGB")
    asked = {"images": [image] * 8, "text": ["where is the white blood cell"] * 8, "task": "refer"}
    return model, processor(**asked, return_tensors="pt").to(device)


@torch.inference_mode()
def answer(folder: str, device: str, count: int) -> None:
    model, inputs = load(folder, device)
    model.generate(**inputs, min_new_tokens=count, max_new_tokens=count, do_sample=False)


@torch.inference_mode()
def trained(args: argparse.Namespace) -> dict:
    """Measures trained models side by side: the forward pass of eight questions, generation, and memory."""
    if not args.models:
        print("\nTo compare trained models, give --models: folders that examples/run_uni_med.py has written.")
        return {}
    made = {folder: load(folder, args.device) for folder in args.models}
    calls = {
        "forward": lambda model, inputs: model(**inputs),
        "answers": lambda model, inputs: model.generate(**inputs, min_new_tokens=16, max_new_tokens=16, do_sample=False),
    }
    times = {
        name: in_turns({folder: lambda pair=pair, call=call: call(*pair) for folder, pair in made.items()}, args.runs)
        for name, call in calls.items()
    }
    peaks = {folder: fresh(peak_of, answer, folder, args.device, 16) for folder in args.models}
    rows = []
    for folder, (model, _) in made.items():
        row = [folder, f"{sum(parameter.numel() for parameter in model.connector.parameters()):,}"]
        for name in calls:
            seconds = times[name][folder]
            row += [f"{statistics.median(seconds):.2f}", f"{ratio(seconds, times[name][args.models[0]]):.2f}"]
        rows.append([*row, f"{peaks[folder]:,.0f}"])
    header = ["", "connector's parameters", "forward, s", "× the first's", "16 tokens each, s", "× the first's", "peak MB"]
    print_table("Eight questions about one image", header, rows)
    return {"times": times, "peak_mb": peaks}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtypes", nargs="+", default=list(TYPES), choices=list(TYPES), help="types of the connector")
    parser.add_argument("--new_tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--models", nargs="+", default=[], help="folders of trained models, to compare with the first")
    run_sections(parser, {"connector": connector, "generate": generate, "trained": trained})


if __name__ == "__main__":
    main()
