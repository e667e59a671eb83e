"""A running vLLM server follows a training: its weights are those of each published step, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from servers import TASKS
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm_server import VllmServer

from hf_ext.errors import ServerError
from hf_ext.serving.vllm import weight_transfer
from hf_ext.serving.vllm.weight_transfer import PlaceTrainerInitInfo
from hf_ext.weight_sync import Publisher
from hf_ext.weight_sync.servers import VLLMServer, follow

OPTIONS = ("--weight-transfer-config", '{"backend": "hf_ext"}')
MODELS = ["base", "one", "two", "half", "base"]  # what the training has reached after each step


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[VllmServer]:
    with VllmServer(folder / "two", folder / "transfer.log", *OPTIONS) as server:
        yield server


def weights(folder: Path, model: str) -> dict[str, torch.Tensor]:
    return load_file(folder / model / "model.safetensors")


def version(server: VllmServer) -> str:
    return server.call("/weight_info")[1]["weight_version"]


def test_a_server_takes_each_step(server: VllmServer, folder: Path, expected: dict):
    place = folder / "place"
    remote = VLLMServer(server.url, place, api_key="secret")
    with Publisher(place, anchor_every=3) as run:
        for step, model in enumerate(MODELS):
            run.publish(weights(folder, model), step)
            run.wait()
            remote.update(step)
            assert server.digests() == expected[model]["digests"]
            assert server.answer(None) == ("first", expected[model]["text"])
            assert version(server) == str(step)
    loaded = [line.split("place: ")[1] for line in server.log.read_text().splitlines() if "tensors loaded" in line]
    count = len(weights(folder, "base"))
    assert loaded[0].startswith(f"{count} of {count}") and loaded[3].startswith(f"{count} of")
    remote.update(1)  # back to an older one
    assert server.digests() == expected["one"]["digests"]


def test_steps_in_sglangs_layout_begin_with_the_servers_model(server: VllmServer, folder: Path, expected: dict):
    place = folder / "versions"
    remote = VLLMServer(server.url, place, api_key="secret")
    with Publisher(place, layout="sglang", base=folder / "two", anchor_every=3) as run:
        for step, model in enumerate(("two", "one", "base", "half")):
            run.publish(weights(folder, model), 10 * step)
            run.wait()
            remote.update(10 * step)
            assert server.digests() == expected[model]["digests"]
            assert version(server) == str(10 * step)
        (place / "weight_v000004").rename(folder / "away")
        remote.update(20)  # back to an older one
        assert server.digests() == expected["base"]["digests"]
        with pytest.raises(ServerError, match="Step 30 is not, or no longer"):
            remote.update(30)
    assert server.digests() == expected["base"]["digests"]


def test_a_step_that_cannot_be_read_changes_nothing(server: VllmServer, folder: Path, expected: dict):
    place = folder / "damaged"
    remote = VLLMServer(server.url, place, api_key="secret")
    with Publisher(place) as run:
        run.publish(weights(folder, "one"), 0)
        run.wait()
        remote.update(0)
        run.publish(weights(folder, "two"), 1)
    (delta,) = place.glob("step-00000001*")
    content = delta.read_bytes()
    delta.write_bytes(content[:-9] + bytes(9))
    pauses = server.log.read_text().count("POST /pause")
    with pytest.raises(ServerError, match="cannot read step 1: CorruptFileError"):
        remote.update(1)
    assert server.log.read_text().count("POST /pause") == pauses > 0
    assert server.digests() == expected["one"]["digests"]
    assert server.answer(None) == ("first", expected["one"]["text"])
    assert "No other files at" in server.log.read_text()
    delta.write_bytes(content)
    remote.update(1)
    assert server.digests() == expected["two"]["digests"]


def test_requests_run_while_steps_are_prepared(server: VllmServer, folder: Path, expected: dict):
    place = folder / "prepared"
    remote = VLLMServer(server.url, place, api_key="secret")
    with Publisher(place) as run, ThreadPoolExecutor(4) as pool:
        run.publish(weights(folder, "one"), 0)
        run.wait()
        remote.update(0)
        for step, model in enumerate(("half", "two", "two"), 1):
            run.publish(weights(folder, model), step)
            run.wait()
            answers = [pool.submit(server.answer, None) for _ in range(20)]
            remote.prepare(step)
            assert {answer.result() for answer in answers} == {("first", expected["one"]["text"])}
            assert server.digests() == expected["one"]["digests"] and version(server) == "0"
    remote.update(3)  # which itself changes nothing
    assert server.digests() == expected["two"]["digests"] and version(server) == "3"
    assert server.answer(None) == ("first", expected["two"]["text"])


def test_another_follower_goes_on_with_a_later_step(server: VllmServer, folder: Path, expected: dict):
    place = folder / "killed"
    with Publisher(place) as run:
        for step, model in enumerate(("one", "half")):
            run.publish(weights(folder, model), step)
    VLLMServer(server.url, place, api_key="secret").update(0)
    script = "import os, sys; from hf_ext.weight_sync import VLLMServer; VLLMServer(*sys.argv[1:]).prepare(1); os._exit(9)"
    killed = subprocess.run([sys.executable, "-c", script, server.url, place, "wait", "secret"], timeout=120)
    assert killed.returncode == 9 and version(server) == "0"
    with Publisher(place, resume=True) as run:
        run.publish(weights(folder, "base"), 2)
    follow(place, [VLLMServer(server.url, place, api_key="secret")], stop_at_step=2, poll_interval=0.01)
    assert server.digests() == expected["base"]["digests"] and version(server) == "2"


@pytest.mark.parametrize("layout", ["hf_ext", "sglang"])
def test_a_server_that_is_killed_before_the_commit_follows_again(folder: Path, expected: dict, layout: str):
    place = folder / f"restarted-{layout}"
    with Publisher(place, layout=layout, base=folder / "two" if layout == "sglang" else None) as run:
        for step, model in enumerate(("one", "half")):
            run.publish(weights(folder, model), step)
    for is_killed in (True, False):
        with VllmServer(folder / "two", folder / "restarted.log", *OPTIONS) as server:
            assert server.digests() == expected["two"]["digests"]
            remote = VLLMServer(server.url, place, api_key="secret")
            if is_killed:
                remote.update(0)
                remote.prepare(1)
                server.process.kill()
                with pytest.raises(ServerError, match="does not answer"):
                    remote.update(1)
            else:
                assert follow(place, [remote], stop_at_step=1, poll_interval=0.01) == 1
                assert server.digests() == expected["half"]["digests"] and version(server) == "1"


class Worker(weight_transfer.PlaceEngine):
    """A worker's engine without vLLM."""

    def __init__(self, update: Callable[[int], None] = lambda step: None):
        self._rank = self._first = 0
        self._place, self._shared, self._thread, self._unloaded = "place", None, ThreadPoolExecutor(1), {"x"}
        self._reader = SimpleNamespace(step=0, update=update, tensors={"x": torch.ones(1)}, changed={"x"})
        self.loads = []
        self._load = lambda tensors, names: self.loads.append(names)


STEP = weight_transfer.PlaceUpdateInfo(step=1)


@pytest.mark.parametrize("error", [ServerError("not there"), OSError("no disk"), RuntimeError("of a library")])
def test_a_worker_with_any_error_joins_the_others(monkeypatch, error: Exception):
    def update(step: int) -> None:
        raise error

    joined = []
    monkeypatch.setattr(weight_transfer, "_gather", lambda value: joined.append(value) or [value])
    engine = Worker(update)
    with pytest.raises(type(error)):
        engine.receive_weights(STEP)
    assert joined == [(False, None)] and engine.loads == [] and engine._unloaded == {"x"}


def test_no_worker_loads_what_another_cannot(monkeypatch):
    monkeypatch.setattr(weight_transfer, "_gather", lambda value: [value, (False, None)])
    engine = Worker()
    with pytest.raises(RuntimeError, match="Another worker cannot take step 1"):
        engine.receive_weights(STEP)
    assert engine.loads == [] and engine._unloaded == {"x"}


def test_all_is_loaded_again_when_another_worker_failed_to_load(monkeypatch):
    engine = Worker()
    monkeypatch.setattr(weight_transfer, "_gather", lambda value: [value, (not engine.loads, None)])
    with pytest.raises(RuntimeError, match="Another worker"):
        engine.receive_weights(STEP)
    assert engine.loads == [["x"]] and engine._unloaded is None


def test_an_error_of_the_preparation_is_told_once():
    outcomes = [OSError("no disk"), None]

    def update(step: int) -> None:
        if error := outcomes.pop(0):
            raise error

    engine = Worker(update)
    answers = []
    while not answers or not answers[-1]["is_ready"]:
        answers.append(engine.prepare("place", 1))
    assert [answer["error"] for answer in answers if answer["error"]] == ["OSError: no disk"]
    assert engine.prepare("place", 1) == {"is_ready": True, "error": None} and outcomes == []


def test_a_trainer_of_vllms_own_interface_drives_it(server: VllmServer, folder: Path, expected: dict):
    class Client(HTTPVLLMWeightSyncClient):
        """vLLM's has no place for a key."""

        def _post(self, path: str, json: dict | None = None) -> None:
            status, answer = server.call(f"/{path}", json or {"": ""})
            assert status == 200, answer

    from hf_ext.serving.vllm import register

    register()
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    info = PlaceTrainerInitInfo(str(folder / "trainer"), {"anchor_every": 2, "resume": True}, rank=0)
    for models in (["base"], TASKS):  # the second engine continues the run
        engine = WeightTransferTrainerFactory.trainer_init(info, client=Client(server.url), source=ModuleSource(model))
        for name in models:
            model.load_state_dict(weights(folder, name))
            engine.send_weights()
            assert server.digests() == expected[name]["digests"]
            assert version(server) == str(["base", *TASKS].index(name))
        engine.shutdown()


def test_the_command_follows_a_place(server: VllmServer, folder: Path, expected: dict):
    place = folder / "followed"
    command = [sys.executable, "-m", "hf_ext.cli", "follow", str(place), "--stop-at-step", "1", "--json"]
    command += ["--server", server.url, "--api-key", "secret"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with Publisher(place) as run:
        for step, model in enumerate(("half", "one")):
            run.publish(weights(folder, model), step)
    printed, messages = follower.communicate(timeout=120)
    assert follower.returncode == 0, messages
    assert json.loads(printed) == {"place": str(place), "servers": [server.url], "checkpoint": None, "step": 1}
    assert f"{server.url} is at step 1 (prepared in " in messages
    assert server.digests() == expected["one"]["digests"]
