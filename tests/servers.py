"""Models for servers, and a server in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch
from processes import free_port
from tiny_models import perturb
from tiny_transfers import build_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ext import emr, fm_delta

PROMPT = "pick a b c"
TASKS = ("one", "two")
MERGED = (*TASKS, "coded")


def language_model(hidden_size: int = 64, layers: int = 3) -> LlamaForCausalLM:
    tokenizer = build_tokenizer(311)
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, tie_word_embeddings=False, **sizes)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():  # so that an untrained model has something to say
        for weight in model.parameters():
            weight.mul_(4) if weight.dim() > 1 else weight
    return model


def write_models(folder: Path) -> LlamaForCausalLM:
    """Writes a base, fine-tunes of it, what the package makes of them, and models that cannot be served. Returns the base."""
    base = language_model()
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(TASKS, 1):
        perturb(perturb(base, seed), seed + 10).save_pretrained(folder / task)
    half = language_model()
    half.model.layers[1] = perturb(half.model.layers[1])
    half.save_pretrained(folder / "half")
    other = language_model(hidden_size=128)
    other.save_pretrained(folder / "other-base")
    perturb(other).save_pretrained(folder / "other")
    for model in ("base", *TASKS, "half", "other-base", "other"):
        build_tokenizer(311).save_pretrained(folder / model)
    for model in (*TASKS, "half"):
        fm_delta.compress_checkpoint(folder / model, folder / "base", folder / f"small-{model}")
    fm_delta.compress_checkpoint(folder / "other", folder / "other-base", folder / "small-other")
    emr.merge(folder / "base", {task: folder / task for task in TASKS}, folder / "elected", method="emr")
    emr.add_task(folder / "elected", {"coded": folder / "two"}, folder / "merged", method="switch", bits=6)
    for task in MERGED:
        emr.extract(folder / "merged", task, folder / f"merged-{task}")
    shutil.copytree(folder / "base", folder / "overwritten")
    _spoil(folder)
    return base


def _spoil(folder: Path) -> None:
    """Makes models that cannot be served: without its base, torn, and with a base that changed between its samples."""
    shutil.copytree(folder / "small-one", folder / "baseless")
    config = json.loads((folder / "baseless" / "config.json").read_text())
    config["quantization_config"]["base"] = str(folder / "nowhere")
    (folder / "baseless" / "config.json").write_text(json.dumps(config))
    shutil.copytree(folder / "small-one", folder / "torn")
    file = folder / "torn" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] + bytes(100))
    shutil.copytree(folder / "base", folder / "changed-base")
    file = folder / "changed-base" / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin = header["model.layers.2.mlp.down_proj.weight"]["data_offsets"][0]
    data[8 + int.from_bytes(data[:8], "little") + begin + 3000] ^= 1
    file.write_bytes(data)
    shutil.copytree(folder / "small-one", folder / "mixed")
    config["quantization_config"]["base"] = str(folder / "changed-base")
    (folder / "mixed" / "config.json").write_text(json.dumps(config))


class Server:
    """A server in a process of its own, which a `with` statement waits for and stops.

    Args:
        command: starts it, with `--port` added.
        log: file to write.
        environment: variables to set.
    """

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]):
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.process = subprocess.Popen(
            [*command, "--port", port],
            env=os.environ | environment,
            cwd=log.parent,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(60)
        with suppress(ProcessLookupError):  # the processes of a server that a test killed
            os.killpg(self.process.pid, signal.SIGKILL)

    def _wait(self) -> None:
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                return urllib.request.urlopen(f"{self.url}/health").close()
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-3000:])

    def call(self, path: str, body: dict | None = None, key: str = "secret") -> tuple[int, dict]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode() if body else None, headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
