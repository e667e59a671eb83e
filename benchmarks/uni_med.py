"""Compare a step of Uni-Med's connector with a plain loop over experts, at the paper's sizes.

    python benchmarks/uni_med.py                            # takes 15 GB and some minutes
    python benchmarks/uni_med.py --device cuda

The peer is the formula of the paper as its authors' code (github.com/MSIIP/Uni-Med) computes it: one expert after the other on
all tokens, and a router whose input is the task token concatenated to each visual token. The connector is tested against it.
"""

import argparse
import ctypes
import statistics
import sys
from functools import partial

import torch
from measuring import in_turns, print_table, run_sections
from torch import nn

from hf_ext.uni_med.connector import Connector

VISION, RATE, TEXT, EXPERTS, TOKENS, IMAGES, TASKS = 1408, 4, 4096, 5, 64, 4, 5  # of the paper
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Loop(nn.Module):
    """Experts one by one, with soft weights; sparse ones would save it nothing."""

    def __init__(self):
        super().__init__()
        size = VISION * RATE
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, TEXT), nn.GELU(), nn.Linear(TEXT, TEXT)) for _ in range(EXPERTS)
        )
        self.task_tokens = nn.Parameter(torch.randn(TASKS, size) * 0.02)
        hidden = 4 * 2 * size
        self.router = nn.Sequential(nn.Linear(2 * size, hidden), nn.GELU(), nn.Linear(hidden, EXPERTS))

    def forward(self, features: torch.Tensor, tasks: torch.Tensor) -> torch.Tensor:
        x = features.reshape(IMAGES, TOKENS, -1)
        of_tasks = self.task_tokens[tasks][:, None].expand(-1, TOKENS, -1)
        weights = self.router(torch.cat([of_tasks, x], dim=-1)).sigmoid()
        weights = weights / weights.sum(-1, keepdim=True)
        return sum(expert(x) * weights[..., e, None] for e, expert in enumerate(self.experts))


class Ours(nn.Module):
    def __init__(self, router: str):
        super().__init__()
        self.connector = Connector(VISION, TEXT, router=router)

    def forward(self, features: torch.Tensor, tasks: torch.Tensor) -> torch.Tensor:
        return self.connector(features, (16, 16), tasks)[0]


WAYS = {
    "loop over the experts": Loop,
    "hf_ext, soft router": lambda: Ours("soft"),
    "hf_ext, sparse router, 2 of 5": lambda: Ours("sparse"),
}


def keep_freed_memory() -> None:
    """Keeps freed memory in the process, as PyTorch does on GPUs. Otherwise half of the time goes into new pages for the
    gradients of each step."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: and it never shrinks


def step(module: nn.Module, features: torch.Tensor, tasks: torch.Tensor) -> None:
    """Runs forward and backward. It frees the gradients, as an optimizer's zero_grad does."""
    module(features, tasks).square().mean().backward()
    module.zero_grad()
    if features.device.type == "cuda":
        torch.cuda.synchronize()


def connector(args: argparse.Namespace) -> dict:
    keep_freed_memory()
    results: dict[str, dict[str, list[float]]] = {}
    for name, dtype in TYPES.items():
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        with torch.device(args.device):
            inputs = torch.randn(IMAGES, TOKENS * RATE, VISION), torch.arange(IMAGES) % TASKS
            made = {way: build() for way, build in WAYS.items()}
        torch.set_default_dtype(torch.float32)
        results[name] = in_turns({way: partial(step, module, *inputs) for way, module in made.items()}, args.runs)
        del made
    rows = [[way, *(f"{statistics.median(seconds[way]):.2f}" for seconds in results.values())] for way in WAYS]
    title = f"Seconds of a step, forward and backward: {IMAGES} images of {TOKENS} tokens, medians of {args.runs}"
    print_table(title, ["", *results], rows)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    run_sections(parser, {"connector": connector}, has_runs=True)
