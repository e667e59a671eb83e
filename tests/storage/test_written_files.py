"""Folders and files are written whole or not at all, by one process at a time, and what others wrote stays."""

import contextlib
import ctypes
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kills import killed, without_exchange
from tiny_checkpoints import contents

from hf_ext.errors import CheckpointError
from hf_ext.storage.files import MOVES, STAGE, staged_folder, write_atomically
from hf_ext.storage.layout import MOVING


def fill(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def texts(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_failed_block_leaves_the_folder_as_it_was_or_absent(tmp_path):
    old = {"model.safetensors": "old", "config.json": "old", "notes.txt": "mine"}
    fill(tmp_path / "old", old)
    for target in (tmp_path / "old", tmp_path / "new"):
        with pytest.raises(KeyError), staged_folder(target) as stage:
            fill(stage, {"model.safetensors": "new", "config.json": "new"})
            assert target.exists() == (target.name == "old") and stage.parent == target.parent
            raise KeyError
    assert texts(tmp_path / "old") == old
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_what_a_killed_process_left_is_cleared(tmp_path):
    fill(tmp_path / f".out{STAGE}", {"model.safetensors": "half", "stale.txt": "stale"})
    others = [tmp_path / f".{name}{STAGE}" for name in ("out2", "out.1")]
    for other in others:
        fill(other, {"model.safetensors": "of another folder"})
    with staged_folder(tmp_path / "out") as stage:
        fill(stage, {"config.json": "new"})
    assert texts(tmp_path / "out") == {"config.json": "new"}
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "out"])


OLD = {"config.json": "old", "model.safetensors": "old", "vocab.txt": "old", "task-a/masks": "old", "checkpoint-1/state": "old"}
NEW = {"config.json": "new", "model-00001-of-00001.safetensors": "new", "vocab.txt": "new", "task-b/masks": "new"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills processes as Linux does")
@pytest.mark.parametrize("fail", [False, True], ids=["killed", "failing"])
@pytest.mark.parametrize("old, exchanges", [(OLD, True), (OLD, False), ({}, True)], ids=["one step", "file by file", "new"])
def test_a_kill_at_any_step_leaves_the_old_folder_or_the_new(tmp_path, monkeypatch, old, exchanges, fail):
    if not exchanges:
        without_exchange(monkeypatch)
    out, start = tmp_path / "out", tmp_path / "start"
    fill(start, old)
    new = NEW | ({"checkpoint-1/state": "old"} if old else {})

    def work(files=NEW):
        with staged_folder(out, [Path("task-a/masks")]) as stage:
            fill(stage, files)

    states = []
    for step in killed(out, start if old else None, work, 1, fail):
        files = {name: text for name, text in texts(out).items() if ".hf_ext-" not in name} if out.exists() else {}
        states.append("old" if files == old else "new" if files == new else "neither")
        assert states[-1] != "neither" or "config.json" not in files and (out / MOVING).exists()
        if states[-1] == "neither" and step % 2:  # a write of other files completes the move, too
            work({"notes.txt": "notes"})
            assert texts(out) == new | {"notes.txt": "notes"}
        work()
        assert {name: text for name, text in texts(out).items() if name != "notes.txt"} == new
        assert [path.name for path in tmp_path.iterdir() if path != start] == ["out"]
    assert "old" in states and ("neither" in states) == (bool(old) and not exchanges)


def test_links_in_the_place_of_temporary_folders_are_not_followed(tmp_path):
    home, out = tmp_path / "home", tmp_path / "out"
    fill(home, {"config.json": "mine", "files/id": "mine"})
    for place in (tmp_path / f".out{STAGE}", out / STAGE, out / MOVING):
        fill(out, {"config.json": "old"})
        place.symlink_to(home)
        with staged_folder(out) as stage:
            fill(stage, {"config.json": "new"})
        assert texts(out) == {"config.json": "new"} and texts(home) == {"config.json": "mine", "files/id": "mine"}


@pytest.mark.parametrize("listed", ["../home/config.json", "{home}/config.json", "link/config.json", "", None])
def test_a_strangers_record_of_moves_changes_nothing_outside(tmp_path, listed):
    home, out = tmp_path / "home", tmp_path / "out"
    fill(home, {"config.json": "mine"})
    fill(out, {"config.json": "old", f"{MOVING}/config.json": "stranger"})
    (out / "link").symlink_to(home)
    record = out / MOVING / MOVES
    os.mkfifo(record) if listed is None else record.write_text(
        json.dumps({"files": ["config.json"], "dropped": [listed.format(home=home)]}) if listed else "no JSON"
    )
    with contextlib.suppress(CheckpointError), staged_folder(out) as stage:
        fill(stage, {"vocab.txt": "new"})
    assert texts(home) == {"config.json": "mine"}


def test_other_files_of_the_folder_stay_the_same_files(tmp_path):
    out = tmp_path / "out"
    fill(out, {"optimizer.pt": "state", "config.json": "old", "empty/deep/file": "text"})
    (out / "to-nowhere").symlink_to("nowhere")
    (out / "runs").symlink_to(tmp_path)
    out.chmod(0o750)
    before = {path: (out / path).lstat().st_ino for path in ("optimizer.pt", "empty/deep/file", "to-nowhere", "runs")}
    for stale in ([], [Path("optimizer.pt")]):
        with staged_folder(out, stale) as stage:
            fill(stage, {"config.json": "new"})
        assert {path: (out / path).lstat().st_ino for path in before} == before
        assert (out / "config.json").read_text() == "new" and out.stat().st_mode & 0o777 == 0o750
        before.pop("optimizer.pt", None)  # the second save has it among those to remove
    assert not (out / "optimizer.pt").exists()


def test_what_others_write_meanwhile_is_kept(tmp_path, monkeypatch):
    """As the processes of a distributed training do, which save their parts beside the model."""
    library, out = ctypes.CDLL, tmp_path / "out"

    def later(*arguments, **options):  # called right before the folders are exchanged
        fill(out, {"rng_state_1.pth": "of another process", "kept.txt": "changed", "replaced.new": "replaced"})
        (out / "replaced.new").rename(out / "replaced.txt")
        return library(*arguments, **options)

    fill(out, {"config.json": "old", "kept.txt": "old", "replaced.txt": "old"})
    with staged_folder(out) as stage:
        fill(stage, {"config.json": "new"})
        monkeypatch.setattr(ctypes, "CDLL", later)
    expected = {"config.json": "new", "kept.txt": "changed", "replaced.txt": "replaced"}
    assert texts(out) == expected | {"rng_state_1.pth": "of another process"}


def test_a_folder_is_written_by_one_at_a_time(tmp_path):
    def write() -> None:
        with staged_folder(tmp_path / "out") as stage:
            fill(stage, {"config.json": "of another"})

    with staged_folder(tmp_path / "out") as stage:
        with pytest.raises(CheckpointError, match="Another process is writing to .*out"), ThreadPoolExecutor(1) as pool:
            pool.submit(write).result()
        fill(stage, {"config.json": "mine"})
    assert texts(tmp_path) == {"out/config.json": "mine"}


def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch):
    fill(tmp_path / "out", {"config.json": "old", "model-00001-of-00001.safetensors": "old"})
    monkeypatch.chdir(tmp_path / "out")
    with staged_folder(".") as stage:
        fill(stage, {"config.json": "new", "model.safetensors": "new"})
    assert texts(Path.cwd()) == {"config.json": "new", "model.safetensors": "new"} == texts(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_where_a_file_is_to_be_is_left(tmp_path):
    fill(tmp_path / "out", {"config.json/inside": "mine", "model.safetensors": "old"})
    with pytest.raises(CheckpointError, match="config.json is a folder"), staged_folder(tmp_path / "out") as stage:
        fill(stage, {"config.json": "new", "model.safetensors": "new"})
    assert texts(tmp_path / "out") == {"config.json/inside": "mine", "model.safetensors": "old"}


SHARDS = {"model-00001-of-00002.safetensors": "1", "model-00002-of-00002.safetensors": "2"}
INDEX = {"model.safetensors.index.json": "index"}
FP32 = {"model.fp32-00001-of-00001.safetensors": "1"}
KEPT = {"adapter_model.safetensors": "kept", "sub/model.safetensors": "kept", "model.fp16.safetensors": "kept"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SHARDS | INDEX, {"model.safetensors": "new"}),
        ({"model.safetensors": "old"}, SHARDS | INDEX),
        ({"model-00003-of-00003.safetensors": "3"} | INDEX, SHARDS | INDEX),
        ({"model.safetensors": "old"}, {"model.safetensors": "new"}),
        (SHARDS, {"model.safetensors": "new", "sub/model-00001-of-00002.safetensors": "elsewhere"}),
        (FP32 | {"model.safetensors.index.fp32.json": "index"}, {"model.fp32.safetensors": "new"}),
        ({"model-00001-of-00001.safetensors": "old", "model.safetensors.index.json": "no JSON"}, {"model.safetensors": "new"}),
    ],
)
def test_weights_that_a_save_replaces_by_other_files_go(tmp_path, old, new):
    fill(tmp_path, old | KEPT)
    with staged_folder(tmp_path) as stage:
        fill(stage, new)
    assert texts(tmp_path) == KEPT | new


def test_weights_stay_where_a_save_has_none(tmp_path):
    old = SHARDS | INDEX | {"model.safetensors": "old"}
    fill(tmp_path, old)
    with staged_folder(tmp_path) as stage:
        fill(stage, {"config.json": "new", "sub/model.safetensors": "elsewhere"})
    assert texts(tmp_path) == old | {"config.json": "new", "sub/model.safetensors": "elsewhere"}


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda beside: beside.write_text("first"))

    def fail(beside):
        beside.write_text("half")
        raise KeyError

    with pytest.raises(KeyError):
        write_atomically(path, fail)
    assert contents(tmp_path).keys() == {"file"}
    assert path.read_text() == "first"
