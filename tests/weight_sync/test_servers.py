"""Servers are told of steps over HTTP. tests/with_vllm and tests/with_sglang do so with vLLM and SGLang themselves."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_runs import publish, same, weights

from hf_ext.cli.main import main
from hf_ext.errors import CheckpointError, ServerError
from hf_ext.weight_sync import LocalCheckpoint, Publisher, SGLangPullServer, SGLangServer, VLLMServer, servers
from hf_ext.weight_sync.servers import follow

READY, READING = {"is_ready": True, "error": None}, {"is_ready": False, "error": None}


class Handler(BaseHTTPRequestHandler):
    """Answers each request with the status that `answers` has for its path, and notes it, but for questions of its version.

    Two workers prepare each step: the answers in `workers` come first, then both are ready.
    """

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"weight_version": self.server.version}).encode())

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.requests.append((self.path, content, self.headers["Authorization"]))
        if self.path in self.server.hanging:
            self.server.hanging[self.path].wait(60)
        self.server.version = json.loads(content).get("weight_version", self.server.version)
        status = self.server.answers.pop(self.path, 200)
        self.send_response(status)
        self.end_headers()
        workers = self.server.workers.pop(0) if self.path == "/collective_rpc" and self.server.workers else [READY, READY]
        self.wfile.write(b"what went wrong" if status != 200 else json.dumps({"results": workers}).encode())

    def log_message(self, *args: object) -> None: ...


@contextmanager
def serving() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.answers, server.workers, server.hanging, server.version = [], {}, [], {}, "default"
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


@pytest.fixture
def http() -> Iterator[ThreadingHTTPServer]:
    with serving() as server:
        yield server


def paths(http: ThreadingHTTPServer) -> list[str]:
    return [path for path, _, _ in http.requests]


UPDATE = ["/pause?mode=wait", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"]
UPDATE += ["/finish_weight_update", "/resume"]


def test_a_server_pauses_only_when_its_workers_are_ready(http: ThreadingHTTPServer, tmp_path: Path):
    http.workers = [[READING, READING], [READY, READING], [READY, READY]]
    VLLMServer(http.url, tmp_path).update(3)
    assert paths(http) == ["/collective_rpc"] * 3 + UPDATE
    content = {"method": "prepare_weights", "kwargs": {"place": str(tmp_path), "step": 3}}
    assert json.loads(http.requests[0][1]) == content


def test_a_server_that_cannot_read_a_step_does_not_pause(http: ThreadingHTTPServer, tmp_path: Path):
    http.workers = [[READY, {"is_ready": False, "error": "CorruptFileError: damaged"}]]
    with pytest.raises(ServerError, match=r"cannot read step 3: CorruptFileError: damaged"):
        VLLMServer(http.url, tmp_path).update(3)
    http.answers["/collective_rpc"] = 401
    with pytest.raises(ServerError, match="refused /collective_rpc: 401"):
        VLLMServer(http.url, tmp_path).update(3)
    assert paths(http) == ["/collective_rpc"] * 2


def test_a_server_that_does_not_end_to_read_is_given_up(http: ThreadingHTTPServer, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(servers, "LONGEST", 0.2)
    http.workers = [[READING]] * 100
    with pytest.raises(ServerError, match=r"has not read step 3 in 0.2 seconds"):
        VLLMServer(http.url, tmp_path).prepare(3)


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_cannot_prepare_is_updated_all_the_same(http: ThreadingHTTPServer, tmp_path: Path, status: int):
    http.answers["/collective_rpc"] = status
    VLLMServer(http.url, tmp_path).update(3)
    http.workers = ["something else"]
    VLLMServer(http.url, tmp_path).update(4)
    assert paths(http) == ["/collective_rpc", *UPDATE] * 2


def test_a_server_that_hangs_delays_no_other(http: ThreadingHTTPServer, tmp_path: Path):
    messages, released = [], threading.Event()

    def tell(text: str) -> None:
        messages.append(text)
        if len(messages) < 3:
            publish(tmp_path, range(len(messages), len(messages) + 1), resume=True)
        else:
            released.set()

    publish(tmp_path, range(1))
    with serving() as hung:
        hung.hanging["/start_weight_update"] = released
        followers = [VLLMServer(server.url, tmp_path) for server in (hung, http)]
        assert follow(tmp_path, followers, stop_at_step=2, poll_interval=0.01, tell=tell) == 2
    assert [text.split(" (")[0] for text in messages[:3]] == [f"{http.url} is at step {step}" for step in range(3)]
    assert re.fullmatch(r".* is at step 0 \(prepared in \d+\.\d\d s, paused for \d+\.\d\d s\)\.", messages[0])
    steps = [content for path, content, _ in hung.requests if path == "/update_weights"]
    assert steps == ['{"update_info": {"step": 0}}', '{"update_info": {"step": 2}}']


def test_a_server_that_refuses_goes_on(http: ThreadingHTTPServer, tmp_path: Path):
    http.answers["/update_weights"] = 500
    with pytest.raises(ServerError, match="refused /update_weights: 500 what went wrong"):
        VLLMServer(http.url + "/", tmp_path, "keep", api_key="secret").update(3)
    assert paths(http) == ["/collective_rpc", "/pause?mode=keep", *UPDATE[1:4], "/resume"]
    assert f'"place": "{tmp_path}"' in http.requests[2][1] and '"step": 3' in http.requests[4][1]
    assert {key for _, _, key in http.requests} == {"Bearer secret"}


def test_unsuitable_and_missing_servers_are_named(http: ThreadingHTTPServer, tmp_path: Path):
    http.answers["/pause?mode=wait"] = 404
    with pytest.raises(ServerError, match="takes no weights. Start it with VLLM_SERVER_DEV_MODE=1"):
        VLLMServer(http.url, tmp_path).update(0)
    with pytest.raises(ServerError, match="http://127.0.0.1:9 does not answer"):
        VLLMServer("http://127.0.0.1:9", tmp_path).update(0)


def test_the_command_tries_again_until_the_last_step(http: ThreadingHTTPServer, tmp_path: Path, capsys):
    with Publisher(tmp_path) as run:
        for step in range(3):
            run.publish(weights(step), step)
    http.answers["/start_weight_update"] = 503
    assert main(["follow", str(tmp_path), "--server", http.url, "--stop-at-step", "2", "--poll-interval", "0.01"]) == 0
    printed, messages = capsys.readouterr()
    assert printed == "All servers are at step 2.\n"
    assert "Step 2 is tried again" in messages and f"{http.url} is at step 2" in messages
    assert [content for path, content, _ in http.requests if path == "/finish_weight_update"] == ['{"weight_version": "2"}']


def test_following_goes_on_while_the_place_cannot_be_read(http: ThreadingHTTPServer, tmp_path: Path):
    place, messages = tmp_path / "place", []

    def tell(text: str) -> None:
        messages.append(text)
        index = place / "index-00000.json"
        if "is at step 0" in text:
            index.rename(tmp_path / "away")  # nothing is there
            threading.Timer(0.1, index.mkdir).start()  # then something that is no file
        elif index.is_dir():
            index.rmdir()
            (tmp_path / "away").rename(index)
            with Publisher(place, resume=True) as run:
                run.publish(weights(1), 1)

    with Publisher(place) as run:
        run.publish(weights(0), 0)
    assert follow(place, [VLLMServer(http.url, place)], stop_at_step=1, poll_interval=0.01, tell=tell) == 1
    assert "Is a directory" in messages[1] and messages[1].endswith(" The place is read again.") and len(messages) == 3
    assert [content for path, content, _ in http.requests if path == "/update_weights"] == [
        '{"update_info": {"step": 0}}',
        '{"update_info": {"step": 1}}',
    ]


def test_following_waits_for_the_first_step_and_says_so(http: ThreadingHTTPServer, tmp_path: Path):
    messages = []

    def tell(text: str) -> None:
        if not messages:
            publish(tmp_path, range(1))
        messages.append(text)

    assert follow(tmp_path, [VLLMServer(http.url, tmp_path)], stop_at_step=0, poll_interval=0.01, tell=tell) == 0
    assert messages[0] == f"{tmp_path} has no steps yet, or does not exist. Waiting for the first."
    assert len(messages) == 2 and messages[1].startswith(f"{http.url} is at step 0 (")


def test_a_restarted_server_is_updated_again(http: ThreadingHTTPServer, tmp_path: Path):
    messages = []

    def tell(text: str) -> None:
        messages.append(text)
        if len(messages) == 1:
            http.version = "default"
        else:
            publish(tmp_path, range(1, 2), resume=True)

    publish(tmp_path, range(1))
    assert follow(tmp_path, [VLLMServer(http.url, tmp_path)], stop_at_step=1, poll_interval=0.01, tell=tell) == 1
    assert [text.split(" (")[0] for text in messages] == [f"{http.url} is at step {step}" for step in (0, 0, 1)]


def test_pauses_between_failures_grow_until_the_command_gives_up(tmp_path: Path, capsys):
    publish(tmp_path, range(1))
    command = ["follow", str(tmp_path), "--server", "http://127.0.0.1:9", "--poll-interval", "0.01", "--give-up-after", "0.5"]
    assert main(command) == 1
    lines = capsys.readouterr().err.splitlines()
    assert 2 < len(lines) < 12 and "http://127.0.0.1:9 does not answer" in lines[-1]
    (tmp_path / "index-00000.json").write_text("damaged")
    assert main(command) == 1
    lines = capsys.readouterr().err.splitlines()
    assert 2 < len(lines) < 12 and "index-00000.json" in lines[-1]


def test_several_sglang_servers_load_one_folder(http: ThreadingHTTPServer, tmp_path: Path):
    publish(tmp_path / "run", range(3))
    save_file(weights(0), write_config(tmp_path / "model") / "model.safetensors")
    command = ["follow", str(tmp_path / "run"), "--checkpoint", str(tmp_path / "model"), "--server", http.url, http.url + "/"]
    assert main([*command, "--stop-at-step", "2", "--poll-interval", "0.01", "--requests", "abort", "--api-key", "key"]) == 0
    assert same(load_file(tmp_path / "model" / "model.safetensors"), weights(2))
    content = {"model_path": str(tmp_path / "model"), "weight_version": "2", "abort_all_requests": True}
    assert [(path, json.loads(text), key) for path, text, key in http.requests][0] == (
        "/update_weights_from_disk",
        content,
        "Bearer key",
    )
    assert {path for path, _, _ in http.requests} == {"/update_weights_from_disk"}


def test_a_folder_does_not_change_while_a_server_loads_it(http: ThreadingHTTPServer, tmp_path: Path):
    publish(tmp_path / "run", range(1))
    save_file(weights(0), write_config(tmp_path / "model") / "model.safetensors")
    local, released, steps = LocalCheckpoint(tmp_path / "model", tmp_path / "run"), threading.Event(), []

    def release() -> None:
        steps.append(local.has(0))
        released.set()

    def tell(text: str) -> None:
        if not steps and text.startswith(f"{http.url} is at step 0"):
            publish(tmp_path / "run", range(1, 2), resume=True)
            threading.Timer(0.3, release).start()

    with serving() as slow:
        slow.hanging["/update_weights_from_disk"] = released
        followers = [SGLangServer(server.url, local) for server in (slow, http)]
        assert follow(tmp_path / "run", followers, stop_at_step=1, poll_interval=0.01, tell=tell) == 1
        versions = [json.loads(content)["weight_version"] for _, content, _ in slow.requests]
    assert steps == [True] and versions == ["0", "1"] and local.has(1)


def test_an_sglang_server_loads_no_step_that_the_folder_lacks(http: ThreadingHTTPServer, tmp_path: Path):
    publish(tmp_path / "run", range(1))
    save_file(weights(0), write_config(tmp_path / "model") / "model.safetensors")
    server = SGLangServer(http.url, LocalCheckpoint(tmp_path / "model", tmp_path / "run"))
    with pytest.raises(CheckpointError, match="Step 5 is not"):
        server.update(5)
    assert http.requests == [] and not server.has(0)
    server.update(0)
    assert server.has(0)
    http.answers["/update_weights_from_disk"] = 400
    with pytest.raises(ServerError, match="refused /update_weights_from_disk: 400 what went wrong"):
        server.update(0)
    with pytest.raises(ValueError, match="wait or abort"):
        SGLangServer(http.url, server.checkpoint, "keep")


def write_config(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_a_server_pulls_a_step_before_it_pauses(http: ThreadingHTTPServer, tmp_path: Path):
    save_file(weights(0), write_config(tmp_path / "model") / "model.safetensors")
    publish(tmp_path / "run", range(2), layout="sglang", base=tmp_path / "model")
    server = SGLangPullServer(http.url, tmp_path / "run", "/shm/model", api_key="key")
    assert follow(tmp_path / "run", [server], stop_at_step=1, poll_interval=0.01) == 1 and server.has(1)
    pull = {"local_checkpoint_dir": "/shm/model", "source_dir": str(tmp_path / "run"), "target_version": 2}
    assert [(path, json.loads(text)) for path, text, _ in http.requests] == [
        ("/pull_weights", pull),
        ("/pull_weights", pull),
        ("/pause_generation", {"mode": "retract"}),
        ("/flush_cache", {}),
        ("/update_weights_from_disk", {"model_path": "/shm/model", "weight_version": "1"}),
        ("/continue_generation", {}),
    ]
    http.requests.clear()
    http.answers["/update_weights_from_disk"] = 400
    with pytest.raises(ServerError, match="refused /update_weights_from_disk: 400 what went wrong"):
        server.update(0)
    assert http.requests[-1][0] == "/continue_generation"
    http.requests.clear()
    http.answers["/pull_weights"] = 404
    with pytest.raises(ServerError, match="cannot pull weights. Use LocalCheckpoint with SGLangServer"):
        server.update(1)
    with pytest.raises(CheckpointError, match="Step 7 is not"):
        server.update(7)
    assert [path for path, *_ in http.requests] == ["/pull_weights"]
