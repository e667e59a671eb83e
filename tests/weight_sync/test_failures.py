"""Whatever goes wrong at a place, a subscriber holds the weights of one step, or says that it does not."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from kills import killed_at
from tiny_runs import files, publish, same, weights, zeros

from hf_ext import CheckpointError, CorruptFileError
from hf_ext.storage import encode
from hf_ext.storage.delta.file import digest_of
from hf_ext.storage.delta.payload import read_header, write_payload
from hf_ext.weight_sync import Publisher, Rows, Subscriber
from hf_ext.weight_sync.plan import MOST_DAMAGED
from hf_ext.weight_sync.step_file import Index, Part, Step, file_name, write_file


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm", [damage, Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"x" * 99)]
)
@pytest.mark.parametrize("kind", ["step", "anchor"])
def test_a_damaged_file_is_replaced_by_the_newest_anchor(tmp_path: Path, caplog, harm, kind: str):
    tensors, subscriber = zeros(), Subscriber(tmp_path)
    with Publisher(tmp_path, anchor_every=3) as run:
        for step in range(6):
            run.publish(weights(step), step)
            run.wait()
            if step == (0 if kind == "anchor" else 3):
                subscriber.update(tensors)
    victim = {"step": "step-00000005-00000-00000.safetensors", "anchor": "anchor-00000003-00000-00000.safetensors"}[kind]
    harm(tmp_path / victim)
    with caplog.at_level(logging.WARNING):
        reached = (subscriber if kind == "step" else Subscriber(tmp_path)).update(tensors)
    assert victim in caplog.text
    # The deltas since the anchor before lead to the newest step; without the last delta, no files do.
    assert reached == (5 if kind == "anchor" else 4)
    assert same(tensors, weights(reached))
    with pytest.raises(CorruptFileError, match=victim) if kind == "step" else pytest.raises(CheckpointError):
        subscriber.update(tensors, step=5 if kind == "step" else 99)
    assert same(tensors, weights(reached))


def test_any_damage_is_noticed(tmp_path: Path):
    publish(tmp_path, range(2))
    path = tmp_path / files(tmp_path, "step")[0]
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        place, bit = (int(torch.randint(limit, (), generator=generator)) for limit in (len(content), 8))
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        tensors = zeros()
        assert Subscriber(tmp_path).update(tensors) == 0 and same(tensors, weights(0))


def test_a_damaged_index_is_an_error(tmp_path: Path):
    publish(tmp_path, range(1))
    index = tmp_path / "index-00000.json"
    content = json.loads(index.read_text())
    step = content["steps"][0]
    strange = [content | {"version": 2}, content | {"steps": [{"step": "1"}]}, content | {"steps": [step | {"step": "1"}]}]
    strange += [content | {"steps": [step | {"delta": {"../../other-file": 1}}]}, content | {"rank": 1}]
    strange += [content | {"world_size": size} for size in (1.5, 0, -1)] + [content | {"steps": [step, step]}]
    for harmed in ("", "[]", "{", *map(json.dumps, strange)):
        index.write_text(harmed)
        reason = "version 2, not 1" if '"version": 2' in harmed else "damaged: "
        with pytest.raises(CorruptFileError, match=f"index-00000.json .*{reason}"):
            Subscriber(tmp_path).steps()


def forge(place: Path, payload: bytes, part: Sequence[object], digest: str = "") -> None:
    """Writes a run of one anchor, of a name that does not tell what part it holds, with right checksums."""
    name, header = file_name("anchor", 0, 0, 0), read_header(payload)
    step = Step(0, None, digest or digest_of([("key", header.checksum)]))
    index = Index("forged", 0, 1, "", [step])
    place.mkdir()
    (place / name).write_bytes(write_file(index, step, {"key": payload}, {"key": Part(*part)}))
    step.anchor[name] = 1
    (place / "index-00000.json").write_bytes(index.to_bytes())


def test_forged_files_are_refused(tmp_path: Path):
    huge = write_payload(("F32", "F32", "key", "key"), (10**15,), 1, 10**15, 0, memoryview(b"1"))
    empty = write_payload(("F32", "", "key", ""), (2**64 - 1, 0), 0, 0, 0, memoryview(b""))
    some = encode(torch.ones(4, 3))
    made_up = [(huge, ("x", 0, (10**15,))), (empty, ("x", 0, (2**64 - 1, 0)))]
    made_up += [(some, part) for part in ((5, 0, (4, 3)), ([], 0, (4, 3)), ("x", 0.0, (4, 3)), ("x", -1, (4, 3)))]
    made_up += [(some, part) for part in (("x", False, (4, 3)), ("x", 0, (4.0, 3)), ("x", 0, (10**15, 3)), ("x", 4, (8, 3)))]
    for number, (payload, part) in enumerate(made_up):
        forge(tmp_path / str(number), payload, part)
        with pytest.raises((CheckpointError, CorruptFileError)):
            Subscriber(tmp_path / str(number)).update()
    forge(tmp_path / "right", some, ("x", 0, (4, 3)))
    assert Subscriber(tmp_path / "right").update() == 0
    forge(tmp_path / "other weights", some, ("x", 0, (4, 3)), digest_of([("key", 1)]))
    with pytest.raises(CorruptFileError):
        Subscriber(tmp_path / "other weights").update()


def test_tensors_that_someone_changed_begin_at_an_anchor(tmp_path: Path, caplog):
    tensors, subscriber = zeros(), Subscriber(tmp_path)
    with Publisher(tmp_path) as run:
        run.publish(weights(0), 0)
        run.wait()
        subscriber.update(tensors)
        run.publish(weights(1), 1)
    tensors["frozen"][0, 0] = 7
    with caplog.at_level(logging.WARNING):
        assert subscriber.update(tensors) == 1
    assert "'frozen' is not as the last update left it" in caplog.text
    assert same(tensors, weights(1))


def test_another_run_is_not_mixed_in(tmp_path: Path, caplog):
    publish(tmp_path, range(2))
    tensors, subscriber = zeros(), Subscriber(tmp_path)
    subscriber.update(tensors)
    with pytest.raises(CheckpointError, match="holds the steps of another training .* resume=True"):
        Publisher(tmp_path)
    with pytest.raises(CheckpointError, match="holds the steps of run"):
        Publisher(tmp_path, run="mine", resume=True)
    for path in tmp_path.iterdir():
        path.unlink()
    publish(tmp_path, range(5, 7))
    with caplog.at_level(logging.WARNING):
        assert subscriber.update(tensors) == 6
    assert "no longer holds the run" in caplog.text and same(tensors, weights(6))


def test_a_step_of_another_run_under_a_known_name_is_refused(tmp_path: Path, caplog):
    publish(tmp_path / "one", range(2), run="one")
    publish(tmp_path / "other", range(2), run="other")
    name = files(tmp_path / "one", "step")[0]
    os.replace(tmp_path / "other" / name, tmp_path / "one" / name)
    subscriber = Subscriber(tmp_path / "one")
    assert subscriber.update() == 0
    assert "is not the file of this run and step" in caplog.text


def test_two_publishers_into_one_place_are_refused(tmp_path: Path):
    first = Publisher(tmp_path, run="mine")  # has not written a step yet
    with pytest.raises(CheckpointError, match="steps of another training .'mine'"):
        Publisher(tmp_path)
    first.publish(weights(0), 0)
    first.wait()
    later = Publisher(tmp_path, resume=True)
    later.publish(weights(1), 1)
    later.wait()
    first.publish(weights(2), 2)
    with pytest.raises(CheckpointError, match="Another publisher writes to .* step 2"):
        first.close()
    subscriber = Subscriber(tmp_path)
    assert subscriber.update() == 1 and same(subscriber.tensors, weights(1))
    later.close()


def test_a_run_keeps_its_tensors_and_its_order(tmp_path: Path):
    with Publisher(tmp_path) as run:
        run.publish(weights(0), 0)
        with pytest.raises(ValueError, match="step 0 does not follow step 0"):
            run.publish(weights(1), 0)
        with pytest.raises(ValueError, match="step must be 0 or more, not -1"):
            run.publish(weights(1), -1)
        for wrong in ({"new": torch.ones(1)}, {"frozen": torch.ones(9, 8)}, {"frozen": torch.ones(8, 8).half()}):
            with pytest.raises(CheckpointError, match=f"'{next(iter(wrong))}' is new, missing, or of another type or shape"):
                run.publish(weights(1) | wrong, 1)
        with pytest.raises(CheckpointError, match="'empty' is new, missing"):
            run.publish({name: tensor for name, tensor in weights(1).items() if name != "empty"}, 1)
        run.publish(weights(2), np.int64(2))
    subscriber = Subscriber(tmp_path)
    assert subscriber.update() == 2 and same(subscriber.tensors, weights(2))


ODD = {
    "meta": torch.ones(3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
    "array": np.ones(3),
    "too far": Rows(torch.ones(2, 3), 1, (2, 3)),
    "before": Rows(torch.ones(2, 3), -1, (2, 3)),
    "other columns": Rows(torch.ones(2, 3), 0, (2, 4)),
    "other dimensions": Rows(torch.ones(1), 0, ()),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("transform", [None, lambda tensors: tensors])
def test_what_is_no_tensor_with_values_is_refused_by_name(tmp_path: Path, name: str, transform):
    with Publisher(tmp_path, transform=transform) as run:
        with pytest.raises(CheckpointError, match=f"'{name}' (cannot be published|of shape .* has no rows)"):
            run.publish({"x": torch.ones(2), name: ODD[name]}, 0)
    assert Subscriber(tmp_path).steps() == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rank": 1}, "rank 1 is not one of 1"),
        ({"rank": -1, "world_size": 2, "run": "x"}, "rank -1 is not one of 2"),
        ({"world_size": 0}, "rank 0 is not one of 0"),
        ({"anchor_every": 0}, "must be 1 or more"),
        ({"dtype": torch.int8}, "must be a float type"),
        ({"dtype": "bfloat16"}, "must be a float type"),
    ],
)
def test_options_of_no_run_are_refused(tmp_path: Path, options: dict, reason: str):
    with pytest.raises(ValueError, match=reason):
        Publisher(tmp_path / "place", **options)
    assert not (tmp_path / "place").exists()


def test_after_a_failed_write_the_next_step_holds_both_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensors, subscriber = zeros(), Subscriber(tmp_path)
    with Publisher(tmp_path) as run:
        run.publish(weights(0), 0)
        run.wait()
        subscriber.update(tensors)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
            run.publish(weights(1), 1)
            with pytest.raises(OSError, match="disk full"):
                run.wait()
        run.publish(weights(2), 2)
    assert subscriber.steps() == [0, 2]
    assert subscriber.update(tensors) == 2 and same(tensors, weights(2))
    assert not files(tmp_path, "step-00000001")


@pytest.mark.parametrize("limit", range(9))
def test_a_killed_publisher_leaves_whole_steps_and_goes_on(tmp_path: Path, limit: int):
    assert killed_at(limit, os, "replace", lambda: publish(tmp_path, range(3), anchor_every=2)) == (limit < 8)
    subscriber = Subscriber(tmp_path)
    for step in subscriber.steps():
        assert subscriber.update(step=step) == step and same(subscriber.tensors, weights(step))
    tensors, done = subscriber.tensors, subscriber.steps()
    publish(tmp_path, range(len(done), len(done) + 2), resume=True)
    assert subscriber.update(tensors or None) == len(done) + 1
    assert same(subscriber.tensors, weights(len(done) + 1))


@pytest.mark.parametrize("limit", range(3))
def test_a_publisher_killed_while_replacing_leaves_whole_steps(tmp_path: Path, limit: int):
    publish(tmp_path, range(3), anchor_every=1, keep_anchors=1)
    assert killed_at(limit, os, "replace", lambda: publish(tmp_path, range(2, 3), anchor_every=2, resume=True))
    subscriber = Subscriber(tmp_path)
    assert subscriber.steps() == [2]
    assert subscriber.update() == 2 and same(subscriber.tensors, weights(2))


def test_a_continued_run_numbers_its_steps_on(tmp_path: Path):
    for first in (0, 2):
        with Publisher(tmp_path, resume=True) as run:
            for step in (first, first + 1):
                assert run.next_step == step
                run.publish(weights(step), run.next_step)
                run.wait()
    assert Subscriber(tmp_path).steps() == [0, 1, 2, 3]


def test_a_training_that_resumes_earlier_replaces_later_steps(tmp_path: Path):
    publish(tmp_path, range(5))
    tensors, subscriber = zeros(), Subscriber(tmp_path)
    subscriber.update(tensors)
    with Publisher(tmp_path, resume=True) as run:
        run.publish(weights(9), 3)
        run.publish(weights(8), 4)
    assert subscriber.steps() == [0, 1, 2, 3, 4]
    assert subscriber.update(tensors) == 4 and same(tensors, weights(8))
    assert subscriber.update(tensors, 2) == 2 and same(tensors, weights(2))


class Store(dict):
    """A place in memory that refuses to remove a file twice. Its next `put` fails after all is done, if `loses` is set."""

    loses = False

    def put(self, files: Mapping[str, bytes], remove: Collection[str] = ()) -> None:
        self.update(files)
        for name in remove:
            if self.pop(name, None) is None:
                raise FileNotFoundError(name)
        if self.loses:
            self.loses = False
            raise OSError("the answer is lost")

    def get(self, name: str) -> bytes:
        if name not in self:
            raise FileNotFoundError(name)
        return self[name]


@pytest.mark.parametrize("lost", range(4))
def test_a_publisher_goes_on_after_a_write_whose_answer_was_lost(lost: int):
    place = Store()
    with Publisher(place, anchor_every=1, keep_anchors=1) as run:
        for step in range(5):
            place.loses = step == lost
            run.publish(weights(step), step)
            with pytest.raises(OSError, match="the answer is lost") if step == lost else nullcontext():
                run.wait()
    subscriber = Subscriber(place)
    assert subscriber.update() == 4 and same(subscriber.tensors, weights(4))
    assert len(place) == 3  # a step, an anchor, the index


def test_threads_may_publish_and_wait_at_once(tmp_path: Path):
    def publish_all(offset: float) -> list[int]:
        done = []
        for step in range(6):
            with suppress(ValueError):  # another thread has published the step or a later one
                run.publish({"x": torch.full((50_000,), step + offset)}, step)
                done.append(step)
            run.wait()
        return done

    with Publisher(tmp_path, anchor_every=10, keep_anchors=9) as run, ThreadPoolExecutor(2) as pool:
        lists = list(pool.map(publish_all, (0.1, 0.2)))
    subscriber = Subscriber(tmp_path)
    assert subscriber.steps() == sorted(step for done in lists for step in done)
    for number, done in enumerate(lists):
        for step in done:
            subscriber.update(step=step)
            assert torch.equal(subscriber.tensors["x"], torch.full((50_000,), step + (number + 1) / 10))


def test_an_index_of_files_that_do_not_exist_is_given_up_soon(tmp_path: Path):
    publish(tmp_path, range(1))
    path = tmp_path / "index-00000.json"
    content = json.loads(path.read_text())
    (step,) = content["steps"]
    forged = [step | {"step": i, "anchor": {file_name("anchor", i, 0, 0): 1}} for i in range(1, 1000)]
    path.write_text(json.dumps(content | {"steps": [step, *forged]}))
    with pytest.raises(CorruptFileError, match=f"More than {MOST_DAMAGED} files"):
        Subscriber(tmp_path).update()
