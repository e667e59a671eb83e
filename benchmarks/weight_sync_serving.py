"""Measure what steps of a training cost a vLLM server that answers requests, with this package and with other ways.

Requires the steps that benchmarks/weight_sync.py keeps, and an environment with vLLM (see `make test-vllm`), in which

    pip install "fireworks-delta-compression==0.1.0" zstandard
    python benchmarks/weight_sync_serving.py --lm lm

Four clients send requests without a break while each step is encoded, prepared and loaded. vLLM pauses with the requests kept.
No request may fail. After each step, greedy tokens must be those of a server that was started with the weights of this step.

- ours: `Publisher` and `VLLMServer`.
- ours, SGLang's layout: the same with `layout="sglang"`.
- arc_v3: Fireworks' codec by its own functions. The receiver changes its checkpoint, which vLLM reloads.
- full copies: a safetensors file of all weights, which vLLM reloads.

Ours flush their files to the disk; the others do not.

"Encode" lasts until the files are complete, "prepare" until vLLM can be paused, "pause" from the pause to the resumption.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import torch
from fireworks_delta_compression import decompress_delta_into_source, delta_compress_dicts_to_file
from measuring import print_table, run_sections, size_of, timed
from safetensors.torch import load_file, save_file
from vllm_serving import Server

from hf_ext.weight_sync import Publisher, VLLMServer

PROMPTS = ("The capital of France is", "Returns the number of", "A list of all", "To open a file in Python,")
TRANSFER = ("--weight-transfer-config", json.dumps({"backend": "hf_ext"}), "--dtype", "bfloat16")
Tensors = dict[str, torch.Tensor]


class ByPlace:
    """Steps through a place. `layout` is that of `Publisher`."""

    def __init__(self, layout: str, base: Path, folder: Path, server: Server):
        options = {"layout": layout, "base": base} if layout == "sglang" else {}
        self.publisher = Publisher(folder, dtype=torch.bfloat16, **options)
        self.server = VLLMServer(f"http://127.0.0.1:{server.port}", folder, requests="keep")

    def encode(self, step: int, weights: Tensors) -> None:
        self.publisher.publish(weights, step)
        self.publisher.wait()

    def prepare(self, step: int) -> None:
        self.server.prepare(step)

    def load(self, step: int) -> None:
        self.server.update(step)

    def close(self) -> None:
        self.publisher.close()


class ByCheckpoint:
    """Steps through files, from which the receiver writes a checkpoint that vLLM reloads."""

    def __init__(self, is_delta: bool, base: Path, folder: Path, server: Server):
        self.is_delta, self.server, self.folder = is_delta, server, folder
        self.checkpoint = shutil.copytree(base, Path(f"{folder}-checkpoint"))
        self.weights = load_file(base / "model.safetensors")
        folder.mkdir()

    def encode(self, step: int, weights: Tensors) -> None:
        if self.is_delta:
            file = str(self.folder / f"{step}.arc")
            delta_compress_dicts_to_file(src=self.weights, dst=weights, diff_file=file, compression_format="arc_v3")
        else:
            save_file(weights, self.folder / f"{step}.safetensors", metadata={"format": "pt"})
        self.weights = weights

    def prepare(self, step: int) -> None:
        checkpoint = self.checkpoint / "model.safetensors"
        if self.is_delta:
            decompress_delta_into_source(str(self.folder / f"{step}.arc"), str(checkpoint), "arc_v3")
        else:
            (self.folder / f"{step}.safetensors").rename(checkpoint)

    def load(self, step: int) -> None:
        self.server.post("/pause?mode=keep", {})
        self.server.reload(self.checkpoint)
        self.server.post("/resume", {})

    def close(self) -> None:
        pass


WAYS: dict[str, Callable[[Path, Path, Server], ByPlace | ByCheckpoint]] = {
    "ours": lambda *args: ByPlace("hf_ext", *args),
    "ours, SGLang's layout": lambda *args: ByPlace("sglang", *args),
    "arc_v3": lambda *args: ByCheckpoint(True, *args),
    "full copies": lambda *args: ByCheckpoint(False, *args),
}


@contextmanager
def requests(server: Server, clients: int) -> Iterator[list[int]]:
    """Sends requests during a `with` block. Counts the answers; a request that fails ends the benchmark."""
    is_over, answers = Event(), [0] * clients

    def send(client: int) -> None:
        while not is_over.is_set():
            server.ask()
            answers[client] += 1

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(send, client) for client in range(clients)]
        try:
            yield answers
        finally:
            is_over.set()
    for client in running:
        client.result()


def tokens(server: Server) -> list[str]:
    """Returns greedy completions, one request at a time."""
    options = {"model": "first", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    answers = [server.post("/v1/completions", options | {"prompt": prompt}) for prompt in PROMPTS]
    return [answer["choices"][0]["text"] for answer in answers]


def serving(args: argparse.Namespace) -> dict:
    results: dict[str, dict] = {}
    rows = []
    for run in ("grpo", "sft"):
        kept, base = (args.keep or args.lm / "steps") / run, (args.lm / "base").absolute()
        steps = [load_file(kept / f"{step}.safetensors") for step in range(args.runs + 1)]
        with tempfile.TemporaryDirectory(dir=kept) as name:
            scratch = Path(name).absolute()
            expected = [fresh_tokens(base, weights, scratch) for weights in steps]
            results[run] = {way: through(way, steps, expected, base, scratch, args.clients) for way in WAYS}
        for way, figures in results[run].items():
            medians = [statistics.median(figures[what]) for what in ("MB", "encode", "prepare", "pause")]
            rows.append([run, way, *(f"{median:.3f}" for median in medians), str(figures["answers"])])
    title = f"A step into a vLLM server under {args.clients} clients, medians of {args.runs} steps; tokens as freshly loaded"
    print_table(title, ["", "", "MB", "encode, s", "prepare, s", "pause, s", "answers, none failed"], rows)
    return results


def fresh_tokens(base: Path, weights: Tensors, scratch: Path) -> list[str]:
    """Returns the tokens of a server that starts with some weights."""
    checkpoint = shutil.copytree(base, scratch / "fresh", dirs_exist_ok=True)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with Server(checkpoint, scratch / "fresh.log", *TRANSFER) as server:
        return tokens(server)


def through(way: str, steps: list[Tensors], expected: list[list[str]], base: Path, scratch: Path, clients: int) -> dict:
    """Returns bytes and seconds of each step that goes to a server in one way."""
    figures: dict = {"MB": [], "encode": [], "prepare": [], "pause": [], "answers": 0}
    folder = scratch / way.replace(" ", "-")
    with Server(base, scratch / "server.log", *TRANSFER) as server:
        sent = WAYS[way](base, folder, server)
        for step, weights in enumerate(steps):
            with requests(server, clients) as answers:
                before = size_of(folder)
                encode = timed(sent.encode, step, weights)
                size = size_of(folder) - before
                prepare = timed(sent.prepare, step)
                pause = timed(sent.load, step)
            if step > 0:  # the first step is all weights, in most ways
                for name, figure in {"MB": size / 1e6, "encode": encode, "prepare": prepare, "pause": pause}.items():
                    figures[name].append(figure)
                figures["answers"] += sum(answers)
            if tokens(server) != expected[step]:
                raise SystemExit(f"{way}: the tokens at step {step} are not those of its weights")
        sent.close()
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, required=True, help="folder that benchmarks/language_model.py makes")
    parser.add_argument("--keep", type=Path, help="where benchmarks/weight_sync.py kept the steps (default: LM/steps)")
    parser.add_argument("--clients", type=int, default=4, help="requests that are sent at the same time")
    run_sections(parser, {"serving": serving}, has_runs=True)
