"""SGLang serves compressed fine-tunes and merges: the weights of the plain models bit for bit, and their answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_hub import Commit, File, LocalHub, Repo
from servers import MERGED, TASKS, write_models
from sglang_server import RunningSGLang

PLAIN = {"small-one": "one", "small-two": "two", "small-half": "half", "base": "base"}  # the plain model of each
PLAIN |= {f"merged#{task}": f"merged-{task}" for task in MERGED} | {"merged": f"merged-{TASKS[0]}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, tuple[dict[str, str], str]]:
    """The states of plain models, by SGLang alone."""
    with RunningSGLang(folder / "one", folder / "plain.log", plugins="none") as server:
        states = {"one": server.state()}
        for model in sorted({*PLAIN.values()}):
            assert server.switch(folder / model)[0] == 200
            states[model] = server.state()
    return states


@pytest.fixture(scope="module")
def server(folder, expected) -> Iterator[RunningSGLang]:
    """It starts with a compressed model."""
    with RunningSGLang(folder / "small-one", folder / "server.log", plugins="hf_ext") as server:
        yield server


def test_it_starts_with_the_weights_of_the_plain_model(server, expected):
    assert server.state() == expected["one"]
    assert len({str(state) for state in expected.values()}) == len(expected)


@pytest.mark.parametrize("model", [*PLAIN, "small-one", "two"])
def test_after_a_switch_the_weights_are_those_of_the_plain_model(server, folder, expected, model):
    assert server.switch(folder / model)[0] == 200
    assert server.state() == expected[PLAIN.get(model, model)]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("baseless", "is needed to read this checkpoint"),
        ("torn", "is damaged"),
        ("mixed", "checksum mismatch"),
        ("small-other", "Rolling back"),
        ("merged#three", "There is no task"),
    ],
)
@pytest.mark.parametrize("before", ["small-two", "base"])
def test_the_server_survives_a_model_that_it_cannot_load(server, folder, expected, before, model, reason):
    assert server.switch(folder / before)[0] == 200
    status, message = server.switch(folder / model)
    assert status == 400 and reason in message, message
    assert server.state() == expected[PLAIN[before]]


def test_a_merge_and_a_compressed_model_are_read_from_the_hub(folder, expected):
    with LocalHub() as hub:
        for model in ("merged", "small-two"):
            paths = [path for path in (folder / model).rglob("*") if path.is_file()]
            files = {str(path.relative_to(folder / model)): File(path.read_bytes(), lfs=False) for path in paths}
            hub.repos[f"user/{model}"] = repo = Repo(private=False)
            repo.add("main", Commit(None, model, files))
        environment = hub.client_env(folder / "home") | {"HF_HUB_OFFLINE": "0"}
        with RunningSGLang("user/merged", folder / "hub.log", plugins="hf_ext", **environment) as server:
            assert server.state() == expected[f"merged-{TASKS[0]}"]
            for name, plain in [("user/small-two", "two"), (f"user/merged#{TASKS[1]}", f"merged-{TASKS[1]}")]:
                assert server.switch(name)[0] == 200
                assert server.state() == expected[plain]
