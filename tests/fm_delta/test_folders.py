"""Folders with links, pipes and permissions, two writers of one folder, and what a command leaves where it fails."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kills import in_child
from processes import peak_above
from repeats import repeats
from tiny_checkpoints import assert_restored, contents, edit_settings, fine_tune, pair, weights, write_folder
from tiny_merges import write_tasks

from hf_ext import CheckpointError, CorruptFileError, HfExtError, emr, fm_delta
from hf_ext.fm_delta import compress
from hf_ext.storage import at_most_cores, prefetch
from hf_ext.storage.files import STAGE
from hf_ext.storage.layout import MOVING

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses pipes, users and processes as Linux does"),
    pytest.mark.usefixtures("no_progress_bars"),
]


# ---- links, pipes and permissions ------------------------------------------------------------------------------------


def test_links_to_folders_stay_and_links_to_files_are_copied(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path)
    elsewhere, out, back = tmp_path / "elsewhere", tmp_path / "elsewhere" / "out", tmp_path / "back"
    for folder in (elsewhere, tuned / "inside"):
        folder.mkdir()
        (folder / "notes.txt").write_text(folder.name)
    (tmp_path / "blob").write_text("words")
    (tuned / "vocab.txt").symlink_to("../blob")
    links = {"data": elsewhere, "nowhere": "not/there", "near": "inside", "circle": ".", "inside/up": tuned, "parent": tmp_path}
    for name, place in links.items():
        (tuned / name).symlink_to(place)
    (elsewhere / "again").symlink_to(tuned / "inside")
    fm_delta.compress_checkpoint(tuned, base, out, verify=True)
    fm_delta.decompress_checkpoint(out, back)
    for folder in (out, back):
        assert all((folder / name).is_symlink() for name in links)
        assert (folder / "data").resolve() == elsewhere and (folder / "parent").resolve() == tmp_path
        assert (folder / "circle").resolve() == (folder / "inside/up").resolve() == folder
        assert os.readlink(folder / "near") == "inside" and os.readlink(folder / "nowhere") == "not/there"
        assert not (folder / "vocab.txt").is_symlink() and (folder / "vocab.txt").read_text() == "words"
        assert contents(folder).keys() - {"README.md"} == contents(tuned).keys()


def test_paths_with_two_dots_follow_links_as_the_system_does(tmp_path: Path) -> None:
    """`link/../base` lies beside the folder that the link leads to."""
    (tmp_path / "store").mkdir()
    tuned, base = pair(tmp_path / "store")
    (tuned / "data").symlink_to("../data")
    (tmp_path / "link").symlink_to(tuned)
    fm_delta.compress_checkpoint(tmp_path / "link", tmp_path / "link/../base", tmp_path / "store/small")
    assert (tmp_path / "store/small/data").readlink() == tmp_path / "store/data"
    assert json.loads((tmp_path / "store/small/config.json").read_text())["quantization_config"]["base"] == "../base"
    edit_settings(tmp_path / "store/small", base="../base")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("store/small")
    fm_delta.decompress_checkpoint(tmp_path / "link", tmp_path / "back")
    assert contents(tmp_path / "back")["model.safetensors"] == contents(tuned)["model.safetensors"]
    fm_delta.compress_all([tuned], tmp_path / "link/../all", base, workers=1)
    assert (tmp_path / "store/all/tuned/config.json").exists()


def test_permissions_stay(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, shards=2)
    (tuned / "private").mkdir(mode=0o700)
    for path in tuned.iterdir():
        path.chmod(0o600 if path.is_file() else 0o700)
    (tuned / "model-00002-of-00002.safetensors").chmod(0o640)
    expected = {path.name: path.stat().st_mode for path in tuned.iterdir()}
    fm_delta.compress_checkpoint(tuned, base, tmp_path / "small")
    fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")
    for folder in ("small", "back"):
        assert {name: (tmp_path / folder / name).stat().st_mode for name in expected} == expected


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_pipes_and_sockets_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    tuned, base = pair(tmp_path)
    if kind == "pipe":
        os.mkfifo(tuned / "odd")
    else:
        socket.socket(socket.AF_UNIX).bind(str(tuned / "odd"))
    with pytest.raises(CheckpointError, match=f"odd is a {kind}, which cannot be copied"):
        fm_delta.compress_checkpoint(tuned, base, tmp_path / "out")
    assert (tuned / "model.safetensors").exists() and not (tmp_path / "out").exists()


def test_files_are_not_written_through_a_link_to_another_folder(tmp_path):
    base, folders = write_tasks(tmp_path / "in", {"cr": 2})
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    (home / "config.json").write_text("mine")
    out.mkdir()
    (out / "task-cr").symlink_to(home)
    with pytest.raises(CheckpointError, match="task-cr is a link"):
        emr.merge(base, folders, out, overwrite=True, method="emr")
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


@pytest.fixture
def everybodys_folder():
    """A folder that a user without rights can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody(work: Callable[[], object]) -> tuple[int | None, str]:
    def step_down():
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return work()

    return in_child(step_down)


def test_folders_without_permission_are_refused_and_left(everybodys_folder):
    src, base = pair(everybodys_folder)
    locked, secret = everybodys_folder / "locked", everybodys_folder / "secret"
    shutil.copytree(src, locked)
    shutil.copytree(src, secret)
    locked.chmod(0o555)
    (secret / "model.safetensors").chmod(0)
    before = contents(locked)
    code, answer = as_nobody(lambda: fm_delta.compress_checkpoint(src, base, locked))
    assert (code, answer[:16]) == (0, "CheckpointError:") and "Permission denied" in answer
    code, answer = as_nobody(lambda: fm_delta.compress_checkpoint(secret, base, everybodys_folder / "locked/out"))
    assert code == 0 and answer.startswith(("CheckpointError:", "CorruptFileError:"))
    assert contents(locked) == before


def test_read_only_files_are_compressed_and_restored(everybodys_folder):
    src, base = pair(everybodys_folder)
    for path in src.iterdir():
        path.chmod(0o444)
    everybodys_folder.chmod(0o777)

    def round_trip(small: Path, back: Path):
        for _ in range(2):  # the second time over read-only files
            fm_delta.compress_checkpoint(src, base, small)
            fm_delta.decompress_checkpoint(small, back)

    round_trip(everybodys_folder / "before", everybodys_folder / "back")  # Python's own files may be out of nobody's reach
    shutil.rmtree(everybodys_folder / "back")
    small, back = everybodys_folder / "small", everybodys_folder / "back"
    assert as_nobody(lambda: round_trip(small, back)) == (0, "None")
    assert contents(back) == contents(src)


# ---- two writers, failures and memory ---------------------------------------------------------------------------------


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
        fm_delta.decompress_checkpoint(out, tmp_path / "back", overwrite=True)
        whole = contents(tmp_path / "back")
        assert any(whole == contents(model) for model, answer in zip(models, answers) if answer == "done")
        assert not list(tmp_path.rglob(".*"))


def test_a_failed_command_leaves_no_empty_folders(tmp_path):
    src, base = pair(tmp_path)
    (src / "config.json").write_text("no JSON")
    with pytest.raises(HfExtError):
        fm_delta.compress_checkpoint(src, base, tmp_path / "new" / "deep" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tuned"]


def test_a_result_that_does_not_verify_is_not_written(tmp_path, monkeypatch):
    (src, base), out = pair(tmp_path, shards=2), tmp_path / "small"
    before, write = contents(src), compress.write_with_card

    def faulty(sets, base, out, *arguments, **options):
        write(sets, base, out, *arguments, **options)
        path = out / "model-00002-of-00002.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(compress, "write_with_card", faulty)
    with pytest.raises(CorruptFileError, match="is damaged"):
        fm_delta.compress_checkpoint(src, base, out, verify=True)
    assert contents(src) == before and not out.exists()


def test_out_may_be_the_parent_of_the_source(tmp_path):
    src, base = pair(tmp_path, shards=2)
    (src / "vocab.txt").write_text("tokens")
    fm_delta.compress_checkpoint(src, base, src.parent, verify=True, overwrite=True)
    assert (src.parent / "vocab.txt").read_text() == "tokens" and not list(src.parent.glob(".*"))
    assert fm_delta.verify(src.parent) == 7


def test_leftovers_of_a_killed_save_are_not_copied(tmp_path):
    src, base = pair(tmp_path)
    shutil.copytree(src, tmp_path / "before")
    left = src / f".small{STAGE}"
    left.mkdir()
    for name in ("config.json", "model.safetensors", "other.txt"):
        (left / name).write_text("half")
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    assert_restored(tmp_path / "small", tmp_path / "before")


def test_memory_does_not_grow_with_the_checkpoint(tmp_path, monkeypatch):
    """96 tensors of 1 MiB, twice what a run may hold."""
    monkeypatch.setattr(prefetch, "AHEAD", 4 << 20)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(512, 512, generator=generator) for i in range(96)}
    src, base = write_folder(tmp_path / "tuned", fine_tune(tensors)), write_folder(tmp_path / "base", tensors)

    def work():
        with at_most_cores(2):
            fm_delta.compress_checkpoint(src, base, tmp_path / "small")
            fm_delta.verify(tmp_path / "small")
            fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")

    code, answer = in_child(lambda: peak_above(work))
    assert code == 0 and 0 < int(answer) < 48 << 20  # less than 1 MiB if the process had freed memory before
    assert contents(tmp_path / "back") == contents(src)
