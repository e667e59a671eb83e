"""`hf-ext mount` shows the plain folders of compressed models and merges, byte for byte."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_checkpoints
from tiny_merges import write_tasks

from hf_ext import emr, fm_delta

HAS_FUSE = (
    os.access("/dev/fuse", os.R_OK | os.W_OK) and importlib.util.find_spec("mfusepy") and ctypes.util.find_library("fuse3")
)
pytestmark = pytest.mark.skipif(not HAS_FUSE, reason="needs /dev/fuse and libfuse 3")


@contextmanager
def mounted(src: Path, where: Path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "hf_ext", "mount", os.path.relpath(src, where.parent), where.name]
    process = subprocess.Popen(command, cwd=where.parent, stderr=subprocess.PIPE, text=True)
    try:
        while not os.path.ismount(where):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def compressed(folder: Path, **options: int) -> Path:
    """Writes a compressed model to `folder`/small. Returns the folder of the plain one."""
    tuned, base = tiny_checkpoints.pair(folder, **options)
    fm_delta.compress_checkpoint(tuned, base, folder / "small")
    return tuned


def test_a_compressed_folder_is_the_plain_one(tmp_path):
    tuned = compressed(tmp_path, shards=2)
    with mounted(tmp_path / "small", tmp_path / "plain") as process:
        assert tiny_checkpoints.contents(tmp_path / "plain") == tiny_checkpoints.contents(tuned)
        with pytest.raises(OSError):
            (tmp_path / "plain" / "new").write_text("")
    assert process.returncode == 0 and not (tmp_path / "plain").exists()


def test_parts_of_a_file_are_those_of_the_plain_one(tmp_path):
    tuned = compressed(tmp_path)
    expected = (tuned / "model.safetensors").read_bytes()
    with mounted(tmp_path / "small", tmp_path / "plain"), open(tmp_path / "plain" / "model.safetensors", "rb") as file:
        for begin in range(0, len(expected), len(expected) // 17):
            for size in (1, 7, 4096, len(expected)):
                assert os.pread(file.fileno(), size, begin) == expected[begin : begin + size]


def test_a_merge_is_a_folder_for_each_task(tmp_path):
    base, tasks = write_tasks(tmp_path)
    emr.merge(base, tasks, tmp_path / "merged")
    with mounted(tmp_path / "merged", tmp_path / "tasks"):
        assert sorted(os.listdir(tmp_path / "tasks")) == sorted(tasks)
        for task in tasks:
            emr.extract(tmp_path / "merged", task, tmp_path / f"extracted-{task}")
            shown, extracted = tmp_path / "tasks" / task, tmp_path / f"extracted-{task}"
            assert tiny_checkpoints.contents(shown) == tiny_checkpoints.contents(extracted)


def test_a_damaged_tensor_leaves_other_files_readable(tmp_path):
    tuned = compressed(tmp_path)
    with mounted(tmp_path / "small", tmp_path / "plain") as process:
        data = bytearray((tmp_path / "small" / "model.safetensors").read_bytes())
        data[-20] ^= 1  # after it was opened and checked
        (tmp_path / "small" / "model.safetensors").write_bytes(data)
        with pytest.raises(OSError), open(tmp_path / "plain" / "model.safetensors", "rb") as file:
            file.read()
        assert (tmp_path / "plain" / "config.json").read_bytes() == (tuned / "config.json").read_bytes()
    assert "model.safetensors cannot be read" in process.stderr.read()


def test_after_a_killed_process_the_error_says_how_to_unmount(tmp_path):
    compressed(tmp_path)
    command = [sys.executable, "-m", "hf_ext", "mount", "small", "plain"]
    try:
        with mounted(tmp_path / "small", tmp_path / "plain") as process:
            process.kill()
            process.wait(30)
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and f"fusermount3 -u {tmp_path / 'plain'}" in done.stderr
    finally:
        subprocess.run(["fusermount3", "-u", tmp_path / "plain"], check=True)


@pytest.mark.parametrize("case", ["not empty", "plain"])
def test_sources_that_cannot_be_mounted_are_one_clear_error(tmp_path, case):
    compressed(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    src, where = ("small", "full") if case == "not empty" else ("base", "where")
    command = [sys.executable, "-m", "hf_ext", "mount", src, where]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and ("is not an empty folder" if case == "not empty" else "is not compressed") in done.stderr
    assert not (tmp_path / "where").exists()
