"""A running vLLM server follows a training: its weights are those of each published step, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
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
from hf_ext.weight_sync.servers import VLLMServer

MODELS = ["base", "one", "two", "half", "base"]  # what the training has reached after each step


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[VllmServer]:
    options = ("--weight-transfer-config", '{"backend": "hf_ext"}')
    server = VllmServer(folder / "two", folder / "transfer.log", *options)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


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
    with pytest.raises(ServerError, match="refused /update_weights"):
        remote.update(1)
    assert server.digests() == expected["one"]["digests"]
    assert server.answer(None) == ("first", expected["one"]["text"])
    assert "No other files at" in server.log.read_text()
    delta.write_bytes(content)
    remote.update(1)
    assert server.digests() == expected["two"]["digests"]


@pytest.mark.parametrize("error", [ServerError("not there"), OSError("no disk"), RuntimeError("of a library")])
def test_a_worker_with_any_error_joins_the_others(monkeypatch, error: Exception):
    def update(step: int) -> None:
        raise error

    joined = []
    monkeypatch.setattr(weight_transfer, "_all", lambda succeeded: joined.append(succeeded))
    engine = weight_transfer.PlaceEngine.__new__(weight_transfer.PlaceEngine)
    engine._subscriber = SimpleNamespace(update=update, step=None)
    with pytest.raises(type(error)):
        engine.receive_weights(weight_transfer.PlaceUpdateInfo(step=1))
    assert joined == [False]


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
    assert f"{server.url} is at step 1" in messages
    assert server.digests() == expected["one"]["digests"]
