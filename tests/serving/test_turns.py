"""Requests to several models of one server wait for their turns, and each is answered by its own model."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import tiny_checkpoints
import torch
from tiny_merges import write_tasks

from hf_ext import CheckpointError, emr, fm_delta
from hf_ext.serving.stored_models import StoredModel
from hf_ext.serving.vllm import turns
from hf_ext.serving.vllm.models import changed, read_models


class Engine:
    """It records its model at the begin and at the end of each request."""

    def __init__(self) -> None:
        self.turns = turns.Turns(self.check, self.switch, "a")
        self.held = "a"
        self.switches: list[str] = []
        self.broken: set[str] = set()
        self.unfit: set[str] = set()

    async def check(self, name: str) -> None:
        await asyncio.sleep(0)
        if name in self.unfit:
            raise CheckpointError(f"{name} is another model")

    async def switch(self, name: str) -> None:
        self.held = "nothing"
        await asyncio.sleep(0.001)
        if name in self.broken:
            self.held = str(self.turns.current)
            raise CheckpointError(f"{name} is damaged")
        self.held = self.turns.current = name
        self.switches.append(name)

    async def answer(self, name: str, seconds: float = 0.002) -> tuple[str, str]:
        await self.turns.enter(name)
        try:
            before = self.held
            await asyncio.sleep(seconds)
            return before, self.held
        finally:
            self.turns.leave(name)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine."""
    return functools.wraps(test)(lambda *args, **kwargs: asyncio.run(test(*args, **kwargs)))


@in_a_loop
async def test_requests_are_grouped_and_answered_by_their_models():
    engine, draw = Engine(), random.Random(0)
    names = [draw.choice("abcd") for _ in range(200)]
    answers = await asyncio.gather(*(engine.answer(name, draw.random() / 100) for name in names))
    assert answers == [(name, name) for name in names]
    assert sorted(engine.switches) == ["b", "c", "d"]


@in_a_loop
async def test_a_model_in_demand_gives_way_when_its_turn_is_over(monkeypatch):
    monkeypatch.setattr(turns, "TURN", 0.05)
    engine, done = Engine(), asyncio.Event()

    async def insist() -> int:
        count = 0
        while not done.is_set():
            assert await engine.answer("a") == ("a", "a")
            count += 1
        return count

    clients = [asyncio.create_task(insist()) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert await asyncio.wait_for(engine.answer("b"), 5) == ("b", "b")
    done.set()
    assert min(await asyncio.gather(*clients)) > 3
    assert engine.switches[:2] == ["b", "a"]


@in_a_loop
async def test_a_broken_model_fails_its_own_requests_alone():
    engine = Engine()
    engine.broken, engine.unfit = {"b"}, {"c"}
    answers = await asyncio.gather(*(engine.answer(name) for name in "abacbab"), return_exceptions=True)
    kinds = [answer if isinstance(answer, tuple) else str(answer) for answer in answers]
    damaged, other = "b is damaged", "c is another model"
    assert kinds == [("a", "a"), damaged, ("a", "a"), other, damaged, ("a", "a"), damaged]
    engine.broken = set()
    assert await engine.answer("b") == ("b", "b")


@in_a_loop
async def test_a_client_that_left_causes_no_switch():
    engine = Engine()
    running = asyncio.create_task(engine.answer("a", 0.05))
    await asyncio.sleep(0.005)
    waiting = [asyncio.create_task(engine.answer(name)) for name in "bcb"]
    await asyncio.sleep(0.005)
    waiting[0].cancel()
    waiting[2].cancel()
    await asyncio.gather(running, *waiting, return_exceptions=True)
    assert engine.switches == ["c"]
    assert await engine.answer("a") == ("a", "a")


@pytest.mark.parametrize("how", ["cancelled", "left"])
@pytest.mark.parametrize("moment", range(12))
@in_a_loop
async def test_a_request_that_ends_at_any_moment_gives_its_turn_back(moment, how):
    engine, left = Engine(), asyncio.get_running_loop().create_future()
    request = asyncio.create_task(engine.turns.enter_unless(left, "b"))
    for _ in range(moment):
        await asyncio.sleep(0.001 if engine.held == "nothing" else 0)
    request.cancel() if how == "cancelled" else left.set_result(None)
    if (await asyncio.gather(request, return_exceptions=True))[0] is True:
        engine.turns.leave("b")
    for name in "cad":  # none could switch while a request to "b" held its turn
        assert await asyncio.wait_for(engine.answer(name), 5) == (name, name)


def test_models_are_named_by_folders_tasks_or_a_file(tmp_path):
    (tmp_path / "odd#name").mkdir()
    (tmp_path / "small").mkdir()
    file = tmp_path / "models.json"
    file.write_text('{"a": "small", "b": "org/name", "c": "merge#one", "d": {"path": "org/name", "revision": "v1"}}')
    assert read_models(str(file)) == {
        "a": StoredModel(str(tmp_path / "small")),
        "b": StoredModel("org/name"),
        "c": StoredModel("merge", task="one"),
        "d": StoredModel("org/name", "v1"),
    }
    assert read_models({"a": str(tmp_path / "odd#name")}) == {"a": StoredModel(str(tmp_path / "odd#name"))}


@pytest.mark.parametrize("models", ["nowhere.json", ["a"], {"a": 1}, {"a": {"folder": "x"}}, {"a": {"path": "x", "size": 1}}])
def test_other_settings_of_models_are_one_clear_error(models):
    with pytest.raises(CheckpointError, match="models|Model|JSON"):
        read_models(models)


def test_only_layers_that_differ_are_loaded(tmp_path):
    tensors = tiny_checkpoints.weights()
    tiny_checkpoints.write_folder(tmp_path / "base", tensors)
    layer = {name for name in tensors if name.startswith("model.layers.1.")}
    tuned = tensors | {"model.layers.1.mlp.up_proj.weight": tensors["model.layers.1.mlp.up_proj.weight"] + 1}
    tiny_checkpoints.write_folder(tmp_path / "tuned", tuned)
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small")
    plain, small = (StoredModel(str(tmp_path / name)).open() for name in ("base", "small"))
    assert set(changed(plain, small)) == set(changed(small, plain)) == layer
    assert not list(changed(small, small)) and not list(changed(plain, plain))


def test_modules_outside_the_layers_are_loaded_whole(tmp_path):
    head = {"model.norm.weight": torch.ones(8), "model.norm.bias": torch.zeros(8), "lm_head.weight": torch.ones(8, 8)}
    tiny_checkpoints.write_folder(tmp_path / "one", head)
    tiny_checkpoints.write_folder(tmp_path / "two", head | {"model.norm.weight": torch.zeros(8)})
    one, two = (StoredModel(str(tmp_path / name)).open() for name in ("one", "two"))
    assert set(changed(one, two)) == {"model.norm.weight", "model.norm.bias"}


def test_tasks_of_a_merge_are_models(tmp_path):
    base, tasks = write_tasks(tmp_path, {"one": 2, "two": 2})
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    one, two = (StoredModel(str(tmp_path / "merged"), task=task).open() for task in ("one", "two"))
    assert set(changed(one, two)) and not list(changed(one, one))
    emr.add_task(tmp_path / "merged", {"new": tasks["one"]}, tmp_path / "a")
    emr.add_task(tmp_path / "merged", {"new": tasks["two"]}, tmp_path / "b")  # the same elected weights, another task "new"
    first, second = (StoredModel(str(tmp_path / folder), task="new").open() for folder in "ab")
    assert "bert.embeddings.word_embeddings.weight" in set(changed(first, second))
    assert {tmp_path / "merged" / "model.safetensors", base / "model.safetensors"} < set(one.paths)
    assert StoredModel(str(tmp_path / "merged")).open().name == one.name
    with pytest.raises(CheckpointError, match="no task 'three'"):
        StoredModel(str(tmp_path / "merged"), task="three").open()
    with pytest.raises(CheckpointError, match="is no merge"):
        StoredModel(str(base), task="one").open()
