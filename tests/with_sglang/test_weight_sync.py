"""A running SGLang server loads the steps of a training: its weights are those of a server that loads the plain models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import language_model
from sglang_server import RunningSGLang
from tiny_models import perturb
from tiny_transfers import build_tokenizer

from hf_ext.cli.main import main
from hf_ext.errors import CheckpointError
from hf_ext.weight_sync import LocalCheckpoint, Publisher, SGLangServer

STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with the plain model of each step, the published steps, and a copy of the model to serve."""
    folder = tmp_path_factory.mktemp("sync")
    model = language_model()
    with Publisher(folder / "run", anchor_every=2) as publisher:
        for step in range(STEPS):
            model.save_pretrained(folder / str(step))
            build_tokenizer(311).save_pretrained(folder / str(step))
            publisher.publish(model.state_dict(), step)
            model = perturb(model, seed=step)
    shutil.copytree(folder / "0", folder / "served")
    return folder


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[RunningSGLang]:
    """It has nothing of this package."""
    with RunningSGLang(run / "served", run / "server.log", plugins="none") as server:
        yield server


def states_of(run: Path, server: RunningSGLang) -> list:
    """The weights and the answer of each step, loaded from its plain model."""
    states = []
    for step in range(STEPS):
        assert server.switch(run / str(step))[0] == 200
        states.append(server.state())
    return states


@pytest.fixture(scope="module")
def expected(run: Path, server: RunningSGLang) -> list:
    return states_of(run, server)


def test_each_step_gives_the_weights_of_its_plain_model(run, server, expected):
    follower = SGLangServer(server.url, LocalCheckpoint(run / "served", run / "run"))
    assert not follower.has(0)
    for step in (0, 1, 2, 1):
        follower.update(step)
        assert server.state() == expected[step] and follower.has(step)


def test_a_step_that_is_not_there_leaves_the_weights(run, server, expected):
    follower = SGLangServer(server.url, LocalCheckpoint(run / "served", run / "run"))
    follower.update(1)
    with pytest.raises(CheckpointError, match="Step 9 is not"):
        follower.update(9)
    assert server.state() == expected[1] and follower.has(1)


@pytest.mark.skipif(os.cpu_count() == 1, reason="each worker needs a core")
def test_two_servers_one_of_two_workers_follow_one_folder(run, server, expected):
    with RunningSGLang(run / "served", run / "other.log", plugins="none", workers=2) as other:
        states = states_of(run, other)
        assert len(states[0][0]) == 2 and states[0][0] != states[1][0]
        servers = ["--checkpoint", str(run / "served"), "--server", server.url, other.url]
        assert main(["follow", str(run / "run"), *servers, "--stop-at-step", "2"]) == 0
        assert (server.state(), other.state()) == (expected[2], states[2])


def test_the_command_reaches_the_last_step_past_a_damaged_one(run, server, expected):
    damaged = sorted((run / "run").glob("step-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-9])
    command = ["follow", str(run / "run"), "--checkpoint", str(run / "served"), "--server", server.url, "--stop-at-step", "2"]
    assert main(command) == 0
    assert server.state() == expected[2]
