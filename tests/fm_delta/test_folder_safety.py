"""Commands that write folders, killed at any step or run twice at once, leave the old folder or the new one, and no other."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kills import in_child
from repeats import repeats
from tiny_checkpoints import contents, fine_tune, pair, weights, write_folder
from tiny_merges import write_tasks

from hf_ext import BaseModelError, CheckpointError, HfExtError, emr, fm_delta
from hf_ext.storage.layout import MOVING

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills processes as Linux does")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), {"trec": 6, "cr": 2})


@repeats("rounds", 3, 60)
def test_of_two_writers_at_once_one_writes_the_whole_folder(tmp_path, rounds):
    chance, base = random.Random(0), write_folder(tmp_path / "base", weights())
    models = [write_folder(tmp_path / f"tuned{seed}", fine_tune(weights(), seed=seed)) for seed in (1, 2)]
    out = tmp_path / "out"

    def late(model: Path, wait: float) -> str:
        return in_child(lambda: [time.sleep(wait), fm_delta.compress_checkpoint(model, base, out), "done"][-1])[1]

    for _ in range(rounds):
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(late, models, (0.0, chance.uniform(0, 0.06))))
        assert "done" in answers and {answer.partition(":")[0] for answer in answers} <= {"done", "CheckpointError"}
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        fm_delta.decompress_checkpoint(out, tmp_path / "back")
        whole = contents(tmp_path / "back")
        assert any(whole == contents(model) for model, answer in zip(models, answers) if answer == "done")
        assert not list(tmp_path.rglob(".*"))


def test_a_failed_command_leaves_no_empty_folders(tmp_path):
    src, base = pair(tmp_path)
    (src / "config.json").write_text("no JSON")
    with pytest.raises(HfExtError):
        fm_delta.compress_checkpoint(src, base, tmp_path / "new" / "deep" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tuned"]


# ---- links and pipes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["as the source", "as the base"])
def test_a_folder_whose_files_are_being_moved_is_not_read(tmp_path, use):
    tuned, base = pair(tmp_path)
    ((tuned if use == "as the source" else base) / MOVING).mkdir()
    with pytest.raises((CheckpointError, BaseModelError), match="is incomplete: a command that wrote to it was interrupted"):
        fm_delta.compress_checkpoint(tuned, base, tmp_path / "out")


def test_files_are_not_written_through_a_link_to_another_folder(tmp_path, tasks):
    base, folders = tasks
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    (home / "config.json").write_text("mine")
    out.mkdir()
    (out / "task-cr").symlink_to(home)
    with pytest.raises(CheckpointError, match="task-cr is a link"):
        emr.merge(base, folders, out, overwrite=True)
    assert not (out / "config.json").exists()
    assert {path.name: path.read_text() for path in home.iterdir()} == {"config.json": "mine"}


@pytest.mark.parametrize("place", ["base/README.md", "out/README.md", "base/model.safetensors.index.json", f"out/{MOVING}"])
def test_a_pipe_is_never_read_from(tmp_path, place):
    """A reader of a pipe that nobody writes to would wait forever."""
    src, base = pair(tmp_path)
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".json":
        (base / "model.safetensors").unlink()
    os.mkfifo(path)
    previous = signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(60)
    try:
        with contextlib.suppress(HfExtError):
            fm_delta.compress_checkpoint(src, base, tmp_path / "out")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize(
    ("place", "copied"), [("tuned", "out"), ("tuned/below", "out/below"), ("base", "base"), ("out", "out")]
)
def test_a_link_to_itself_is_copied_as_a_link(tmp_path, place, copied):
    src, base = pair(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "loop").symlink_to("loop")
    fm_delta.compress_checkpoint(src, base, tmp_path / "out", overwrite=True)
    assert os.readlink(tmp_path / copied / "loop") == "loop"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json", "out"])
def test_a_link_to_itself_is_copied_or_a_clear_error(tmp_path, file):
    src, base = pair(tmp_path)
    link = tmp_path / "out" if file == "out" else src / file
    link.unlink(missing_ok=True)
    link.symlink_to(link.name)
    with contextlib.suppress(HfExtError):
        fm_delta.compress_checkpoint(src, base, tmp_path / "out")
    assert os.readlink(link) == link.name
