"""Measure vLLM with compressed fine-tunes: time to start, time of a switch, and many fine-tunes on one server.

Requires the folder of benchmarks/language_model.py, and an environment with vLLM, such as `make test-vllm` makes:

    python benchmarks/vllm_serving.py --lm lm

Requests are greedy completions of 16 tokens. "Reload" is vLLM's own `reload_weights` of the plain checkpoint.
"""

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from measuring import print_table, run_sections, timed

from hf_ext.fm_delta import compress_checkpoint

FINE_TUNES = {"full": "full", "lora": "lora", "light": "light"} | {
    f"step {rate} {at}": f"step-{rate}/{at}" for rate, at in [("1e-5", 0), ("1e-5", 1), ("3e-6", 0), ("3e-6", 1), ("1e-6", 1)]
}
ENVIRONMENT = {"VLLM_PLUGINS": "hf_ext", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


class Server:
    """A vLLM server, with the seconds that it took to start."""

    def __init__(self, model: Path, log: Path, *options: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(self.port)]
        command += "--host 127.0.0.1 --enforce-eager --max-model-len 512 --served-model-name first".split()
        command += options
        self.log, start = log, time.perf_counter()
        self.process = subprocess.Popen(
            command, cwd=log.parent, env=os.environ | ENVIRONMENT, stdout=log.open("w"), stderr=subprocess.STDOUT
        )
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health").close()
                break
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(log.read_text()[-2000:]) from None
                time.sleep(0.1)
        self.seconds = time.perf_counter() - start

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        processes = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.terminate()
        self.process.wait(60)
        for process in processes[1:]:
            if process.is_running():
                process.kill()

    def post(self, path: str, body: dict) -> dict:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def ask(self, model: str = "first", tokens: int = 16) -> None:
        options = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
        self.post("/v1/completions", {"model": model, "prompt": "The capital of France is", **options})

    def reload(self, path: Path) -> None:
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})

    def switches(self) -> list[float]:
        return [float(seconds) for seconds in re.findall(r"Switched from .* in ([\d.]+) s", self.log.read_text())]


def compressed(args: argparse.Namespace, scratch: Path) -> dict[str, Path]:
    results = {}
    for name, folder in FINE_TUNES.items():
        results[name] = scratch / name.replace(" ", "-")
        compress_checkpoint(args.lm / folder, args.lm / "base", results[name], level=1 if name.startswith("step") else 2)
    return results


def starting(args: argparse.Namespace) -> dict:
    """Seconds until a server answers, from the plain checkpoint and from the compressed one."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small")
        compress_checkpoint(args.lm / "full", args.lm / "base", small)
        results: dict[str, list[float]] = {"plain": [], "compressed": []}
        for _ in range(args.runs):
            for name, model in (("plain", args.lm / "full"), ("compressed", small)):
                with Server(model.absolute(), Path(folder, f"{name}.log")) as server:
                    server.ask()
                    results[name].append(server.seconds)
    rows = [[name, f"{statistics.median(seconds):.1f}"] for name, seconds in results.items()]
    print_table(f"Start of a server, medians of {args.runs}", ["checkpoint", "s"], rows)
    return results


def switching(args: argparse.Namespace) -> dict:
    """Seconds of a switch from the base to a fine-tune, beside other ways to get its weights into a server."""
    names = ("full", "lora")
    with tempfile.TemporaryDirectory() as folder:
        small = compressed(args, Path(folder))
        extra = json.dumps({"models": {name: str(small[name]) for name in names}})
        options = ("--load-format", "hf_ext", "--model-loader-extra-config", extra)
        results: dict[str, dict[str, list[float]]] = {}
        with Server((args.lm / "base").absolute(), Path(folder, "switch.log"), *options) as server:
            restart = server.seconds
            for name in names:
                for _ in range(args.runs):
                    server.ask(name, 1)
                    server.ask("first", 1)
                results[name] = {"switch": server.switches()[-2 * args.runs :: 2], "reload": []}
        with Server((args.lm / "base").absolute(), Path(folder, "plain.log")) as server:
            for name in names:
                for _ in range(args.runs):
                    results[name]["reload"].append(timed(server.reload, (args.lm / name).absolute()))
                    server.reload((args.lm / "base").absolute())
    medians = {name: [f"{statistics.median(seconds):.2f}" for seconds in ways.values()] for name, ways in results.items()}
    rows = [[name, *ways, f"{restart:.0f}"] for name, ways in medians.items()]
    title = f"Seconds to another fine-tune of SmolLM2, medians of {args.runs}, and one start of the server"
    print_table(title, ["fine-tune", "switch", "reload", "restart"], rows)
    return results | {"restart": restart}


def many(args: argparse.Namespace) -> dict:
    """Requests to eight fine-tunes in random order on one server, beside requests to one model."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        small = compressed(args, Path(folder))
        extra = json.dumps({"models": {name: str(path) for name, path in small.items()}})
        options = ("--load-format", "hf_ext", "--model-loader-extra-config", extra)
        requests = [draw.choice(list(FINE_TUNES)) for _ in range(args.requests)]
        with Server((args.lm / "base").absolute(), Path(folder, "many.log"), *options) as server:

            def serve(models: list[str], clients: int) -> float:
                with ThreadPoolExecutor(clients) as pool:
                    return timed(lambda: list(pool.map(server.ask, models)))

            serve(["first"] * len(requests), args.clients)
            alone = serve(["first"] * len(requests), args.clients)
            before = len(server.switches())
            mixed = serve(requests, args.clients)
            switches = len(server.switches()) - before
    rows = [
        ["one model, which needs no switch", f"{alone:.1f}", "0"],
        ["all models, one server", f"{mixed:.1f}", f"{switches}"],
    ]
    title = f"{len(requests)} requests of {args.clients} clients to {len(FINE_TUNES)} fine-tunes in random order"
    print_table(title, ["", "s", "changes of the model"], rows)
    return {"alone": alone, "mixed": mixed, "switches": switches}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, required=True, help="folder that benchmarks/language_model.py wrote")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=16, help="requests that are sent at the same time")
    run_sections(parser, {"starting": starting, "switching": switching, "many": many}, has_runs=True)
