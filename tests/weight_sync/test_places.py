"""Steps are published to a Hub repository or bucket over HTTP. test_failures.py publishes to an object with two methods."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from local_hub import LocalHub
from processes import python
from tiny_runs import weights

from hf_ext import CheckpointError
from hf_ext.weight_sync import Publisher, Subscriber


@pytest.mark.parametrize("place", ["hf://", "hf://buckets/", "hf://a/b/c", "hf://a b/c", "s3://bucket/run", "file:///run"])
@pytest.mark.parametrize("opened", [Publisher, Subscriber])
def test_urls_of_no_place_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened, place: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"'{place}' is not a place: give a folder"):
        opened(place)


FOLLOW = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tiny_runs import same, weights, zeros
from hf_ext.weight_sync import Publisher, Subscriber
place = sys.argv[2]
tensors, subscriber, updates = zeros(), Subscriber(place), []
assert subscriber.steps() == []
with Publisher(place, anchor_every=2, keep_anchors=1) as run:
    for step in range(4):
        run.publish(weights(step), step)
        run.wait()
        updates.append([subscriber.update(tensors), same(tensors, weights(step))])
late = Subscriber(place)
late.update(step=3)
print(json.dumps({"updates": updates, "late": same(late.tensors, weights(3)), "steps": late.steps()}))
"""


def follow(hub: LocalHub, folder: Path, place: str, **extra: str) -> CompletedProcess:
    env = hub.client_env(folder, **extra)
    return python("-c", FOLLOW, Path(__file__).parent, place, env=env, cwd=folder, timeout=100, hosts=False)


def assert_followed(done: CompletedProcess) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == {"updates": [[step, True] for step in range(4)], "late": True, "steps": [2, 3]}


def test_a_repository_on_the_hub_is_a_place(tmp_path: Path):
    with LocalHub() as hub:
        assert_followed(follow(hub, tmp_path, "hf://user/run"))
        repo = hub.repos["user/run"]
        weights_there = [name for name in repo.at("main").files if name.endswith(".safetensors")]
        assert len(weights_there) == 3  # two steps and an anchor; the others are removed
        assert sum("Publish" in commit.summary for commit in repo.commits.values()) == 5  # taking the place, and each step


def test_a_bucket_on_the_hub_is_a_place(tmp_path: Path):
    pytest.importorskip("hf_xet")
    with LocalHub() as hub:
        files = hub.buckets["user/run"] = {}
        assert_followed(follow(hub, tmp_path, "hf://buckets/user/run", HF_HUB_DISABLE_XET="0"))
        assert len(files) == 4  # two steps, an anchor, the index
        missing = follow(hub, tmp_path, "hf://buckets/user/missing", HF_HUB_DISABLE_XET="0")
        assert "OSError: Access to hf://buckets/user/missing failed" in missing.stderr


UNREACHABLE = """
import json
from hf_ext.weight_sync.places import open_place
place, errors = open_place("hf://user/run"), []
for work in (lambda: place.get("index-00000.json"), lambda: place.put({"index-00000.json": b"{}"})):
    try:
        work()
    except OSError as error:
        errors.append(isinstance(error, FileNotFoundError))
print(json.dumps(errors))
"""


@pytest.mark.parametrize("env", [{"HF_ENDPOINT": "nothing://there"}, {"HF_HUB_OFFLINE": "1"}], ids=str)
def test_a_hub_that_cannot_be_reached_is_no_empty_place(tmp_path: Path, env: dict[str, str]):
    done = python("-c", UNREACHABLE, env=env, cwd=tmp_path, timeout=60, hosts=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [False, False]


def test_a_chain_may_have_more_files_than_a_process_may_open(tmp_path: Path):
    with Publisher(tmp_path, anchor_every=100) as run:
        for step in range(60):
            run.publish({"x": torch.tensor([step])}, step)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    subscriber = Subscriber(tmp_path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, limits[1]))
    try:
        assert subscriber.update() == 59 and subscriber.tensors["x"].item() == 59
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_empty_place_is_an_error_to_update_from(tmp_path: Path):
    subscriber = Subscriber(tmp_path / "missing")
    assert subscriber.steps() == []
    with pytest.raises(CheckpointError, match="Nothing is published at .*missing"):
        subscriber.update()


def test_the_receiving_side_needs_neither_transformers_nor_peft(tmp_path: Path):
    with Publisher(tmp_path) as run:
        run.publish(weights(0), 0)
    code = (
        "import sys; from hf_ext.weight_sync import Publisher, Subscriber; Subscriber(sys.argv[1]).update();"
        "sys.exit(bool({'transformers', 'peft', 'accelerate'} & set(sys.modules)))"
    )
    assert python("-c", code, tmp_path, hosts=False).returncode == 0
