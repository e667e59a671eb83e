"""Measures time and prints tables, for all benchmarks."""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a Markdown table with aligned columns, after its title and where it was measured."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    print(f"\n{title}\n({origin()})\n")
    for row in [header, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |", flush=True)


@cache
def origin() -> str:
    """Returns the processor, its widest vectors, the number of cores and the commit, which a page states beside a table."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if re.search(rf"\b{flag}\b", info)), "")
    version = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    parts = (model[1] if model else platform.machine(), vectors, f"{os.cpu_count()} cores", f"commit {version.stdout.strip()}")
    return ", ".join(filter(None, parts))


def timed(action: Callable, *args) -> float:
    """Returns the seconds that one call takes."""
    start = time.perf_counter()
    action(*args)
    return time.perf_counter() - start


def in_turns(ways: Mapping[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each method in each round, after an untimed round."""
    times = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(timed(way))
    return {name: seconds[1:] for name, seconds in times.items()}


def ratio(seconds: list[float], others: list[float]) -> float:
    """Returns the median over rounds of the ratio of two methods' times."""
    return statistics.median(a / b for a, b in zip(seconds, others))


def fresh(action: Callable, *args) -> Any:
    """Returns the result of one call in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(action, *args).result()


def load_and_read(folder: str | os.PathLike, kind: type, **options) -> None:
    """Loads a model and reads a byte of every page of its weights, since a plain file is only mapped, not read."""
    for weight in kind.from_pretrained(folder, **options).parameters():
        weight.detach().reshape(-1).view(torch.uint8)[::4096].sum()


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs PyTorch on one thread in a `with` block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def size_of(folder: Path, pattern: str = "*") -> int:
    """Returns the bytes of the files below a folder whose names match."""
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def run_sections(
    parser: argparse.ArgumentParser, sections: Mapping[str, Callable[[argparse.Namespace], dict]], has_runs: bool = False
) -> None:
    """Runs the sections of a benchmark that the command line names, and saves their numbers if it names a file.

    Args:
        has_runs: the sections take medians over `args.runs` rounds.
    """
    parser.set_defaults(sections=list(sections))
    if len(sections) > 1:
        parser.add_argument("--sections", nargs="+", choices=list(sections))
    if has_runs:
        parser.add_argument("--runs", type=int, default=5, help="rounds that the medians are taken over")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    args = parser.parse_args()
    results = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    results |= {section: sections[section](args) for section in args.sections}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
