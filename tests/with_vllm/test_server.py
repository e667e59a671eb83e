"""vLLM serves compressed fine-tunes and merges: the weights of the plain models bit for bit, and their answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from servers import MERGED, PROMPT
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_server import OPTIONS, VllmServer

from hf_ext.serving.vllm import switching
from hf_ext.serving.vllm.switching import _OneModelAtATime
from hf_ext.serving.vllm.turns import Turns
from hf_ext.weight_sync import Publisher


@pytest.fixture(scope="module")
def server(folder, expected) -> Iterator[VllmServer]:
    """It starts with a compressed model, given as it is."""
    listed = {"two": "small-two", "half": "small-half", "base": "base", "overwritten": "overwritten"}
    listed |= {f"task {task}": f"merged#{task}" for task in MERGED}
    listed |= {"baseless": "baseless", "torn": "torn", "other": "small-other", "mixed": "mixed", "no task": "small-one#one"}
    (folder / "models.json").write_text(json.dumps(listed))
    with VllmServer(folder / "small-one", folder / "server.log", models=str(folder / "models.json")) as server:
        yield server


PLAIN = {"first": "one", "two": "two", "half": "half", "base": "base", **{f"task {task}": f"merged-{task}" for task in MERGED}}


def test_it_starts_with_the_weights_of_the_plain_model(server, expected):
    assert server.digests() == expected["one"]["digests"]
    assert server.answer(None) == ("first", expected["one"]["text"])


def test_models_are_listed_and_unknown_ones_are_404(server):
    names = [model["id"] for model in server.call("/v1/models")[1]["data"]]
    assert sorted(names) == sorted([*PLAIN, "overwritten", "baseless", "torn", "other", "mixed", "no task"])
    assert server.refusal("nobody")[0] == 404


@pytest.mark.parametrize("model", [*PLAIN, "half", "first"])
def test_after_a_switch_the_weights_are_those_of_the_plain_model(server, expected, model):
    assert server.answer(model) == (model, expected[PLAIN[model]]["text"])
    assert server.digests() == expected[PLAIN[model]]["digests"]


def test_a_request_without_a_model_is_for_the_first_one(server, expected):
    server.answer("two")
    assert server.answer(None) == ("first", expected["one"]["text"])


def test_concurrent_requests_are_answered_by_their_models(server, expected):
    draw = random.Random(0)
    models = [draw.choice(list(PLAIN)) for _ in range(40)]
    with ThreadPoolExecutor(len(models)) as pool:
        answers = list(pool.map(server.answer, models))
    assert answers == [(model, expected[PLAIN[model]]["text"]) for model in models]
    switches = server.log.read_text().count("Switched from")
    assert switches < 40


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("baseless", "is needed to read this checkpoint"),
        ("torn", "is damaged"),
        ("other", "has another shape"),
        ("no task", "is no merge"),
        ("mixed", "checksum mismatch"),
    ],
)
def test_the_server_survives_a_model_that_it_cannot_load(server, expected, model, reason):
    server.answer("two")
    status, message = server.refusal(model)
    assert status == 503 and reason in message, message
    assert server.digests() == expected["two"]["digests"]
    assert server.answer("two") == ("two", expected["two"]["text"])
    assert server.answer("first") == ("first", expected["one"]["text"])


def test_overwritten_files_are_not_compared_with_memory(server, folder, expected):
    assert server.answer("overwritten") == ("overwritten", expected["base"]["text"])
    (folder / "overwritten" / "model.safetensors").write_bytes((folder / "one" / "model.safetensors").read_bytes())
    assert server.answer("first") == ("first", expected["one"]["text"])
    assert server.digests() == expected["one"]["digests"]


def test_a_request_without_the_key_switches_nothing(server):
    before = server.log.read_text().count("Switched from")
    server.answer("two")
    switches = server.log.read_text().count("Switched from")
    assert server.call("/v1/completions", {"model": "base", "prompt": PROMPT}, key="wrong")[0] == 401
    assert server.log.read_text().count("Switched from") == switches >= before


@pytest.mark.skipif(os.cpu_count() == 1, reason="vLLM gives each worker a core of its own")
def test_tensor_parallel_workers_hold_the_plain_models_parts(folder):
    with Publisher(folder / "steps") as run:
        for step, model in enumerate(("two", "one")):
            run.publish(load_file(folder / model / "model.safetensors"), step)
    digests = []
    for model, plugins, place in (
        ("one", "", []),
        ("small-one", "hf_ext", []),
        ("two", "hf_ext", [folder / "steps", 0, "prepare", 1]),
    ):
        out, script = folder / f"digests-{model}.json", Path(__file__).with_name("digests.py")
        environment = os.environ | OPTIONS | {"VLLM_PLUGINS": plugins, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        command = [sys.executable, script, folder / model, out, *place]
        subprocess.run([str(word) for word in command], env=environment, timeout=600, check=True)
        digests.append(json.loads(out.read_text()))
    assert digests[0] == digests[1] == digests[2] and len(digests[0]) == 2 and digests[0][0] != digests[0][1]


FORM = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ntwo\r\n--x--\r\n'


@pytest.mark.parametrize(
    ("path", "kind", "body", "model"),
    [
        ("/v1/completions", "application/json", b'{"model": "two"}', "two"),
        ("/v1/completions", "application/json", b"{}", "one"),
        ("/v1/completions", "application/json", b'{"model": "adapter"}', "one"),
        ("/v1/completions", "application/json", b"[" * 100_000, "one"),
        ("/prefix/v1/completions", "application/json", b'{"model": "two"}', "two"),
        ("/cohere/v2/chat", "application/json", b'{"model": "two"}', "two"),
        ("/generative_scoring", "application/json", b'{"model": "two"}', "two"),
        ("/v1/audio/transcriptions", "multipart/form-data; boundary=x", FORM, "two"),
        ("/v1/audio/transcriptions", "multipart/form-data", FORM, "one"),
        ("/tokenize", "application/json", b'{"model": "two"}', None),
    ],
)
def test_a_request_takes_the_turn_of_its_model(path, kind, body, model):
    taken, bodies = [], []

    async def enter_unless(left: asyncio.Future, name: str) -> bool:
        taken.append(name)
        return True

    async def app(scope, receive, send) -> None:
        bodies.append((await receive())["body"])

    async def run() -> None:
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> dict:
            return next(messages, None) or await asyncio.Event().wait()

        def leave(name: str) -> None:
            taken.remove(name)
            taken.append(f"{name} left")

        turns = SimpleNamespace(enter_unless=enter_unless, leave=leave)
        models = SimpleNamespace(models={"one", "two"}, default="one", has_adapters=True, turns=turns)
        scope = {"type": "http", "method": "POST", "path": path, "root_path": "/prefix"}
        headers = [(b"content-type", kind.encode())]
        await _OneModelAtATime(app, SimpleNamespace(models=models))(scope | {"headers": headers}, receive, None)

    asyncio.run(run())
    assert taken == ([f"{model} left"] if model else []) and bodies == [body]


def test_a_request_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(switching, "LARGEST_BODY", 10)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    parts, sent = [b"12345678"] * 3, []

    async def receive() -> dict:
        return {"type": "http.request", "body": parts.pop(), "more_body": True}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(_OneModelAtATime(None, SimpleNamespace(models=object()))(scope, receive, send))
    assert sent[0]["status"] == 413 and b"more than 10 bytes" in sent[1]["body"] and len(parts) == 1


def test_a_request_that_the_server_ends_leaves_its_place():
    async def run() -> None:
        async def check(name: str) -> None: ...

        turns = Turns(check, check, "one")
        models = SimpleNamespace(models={"one", "two"}, default="one", has_adapters=False, turns=turns)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        messages = iter([{"type": "http.request", "body": b'{"model": "two"}'}])

        async def receive() -> dict:
            return next(messages, None) or await asyncio.Event().wait()

        await turns.enter("one")
        request = asyncio.create_task(_OneModelAtATime(None, SimpleNamespace(models=models))(scope, receive, None))
        await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.wait({request})
        turns.leave("one")
        await asyncio.wait_for(turns.enter("one"), 1)

    asyncio.run(run())


@pytest.mark.parametrize("adapter", ["pissa", "extracted"])
def test_vllm_takes_an_adapter_as_it_is_saved(folder, expected, adapter):
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    model, tokenizer = PeftModel.from_pretrained(base, folder / adapter), AutoTokenizer.from_pretrained(folder / "base")
    tokens = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        written = model.generate(**tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert expected[adapter] == tokenizer.decode(written[0, tokens["input_ids"].shape[1] :])
