"""A run that fails or is killed leaves what was there; the next run succeeds and clears what the last one left."""

import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kills import in_child
from processes import peak_above
from tiny_checkpoints import contents, fine_tune, pair, weights, write_folder
from transformers.utils import logging

from hf_ext import fm_delta
from hf_ext.errors import CheckpointError, CorruptFileError, HfExtError
from hf_ext.fm_delta import compress
from hf_ext.storage import at_most_cores, prefetch
from hf_ext.storage.files import STAGE
from hf_ext.storage.safetensors_file import SafetensorsFile

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills and limits processes as Linux does")


@pytest.fixture(autouse=True)
def no_progress_bars(monkeypatch):
    monkeypatch.setattr(logging, "_tqdm_active", False)


def large_pair(folder: Path, tensors: int) -> tuple[Path, Path]:
    """A fine-tune and its base, of 1 MiB a tensor."""
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.weight": torch.randn(512, 512, generator=generator) for i in range(tensors)}
    return write_folder(folder / "tuned", fine_tune(base)), write_folder(folder / "base", base)


# ---- where nothing may be written ------------------------------------------------------------------------------------


def test_the_source_and_the_base_are_never_written_over(tmp_path, monkeypatch):
    src, base = pair(tmp_path)
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    small, before = tmp_path / "small", contents(tmp_path)
    (tmp_path / "link").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    for out in (src, base, "tuned", "base/", "small/../base", "link"):
        with pytest.raises(CheckpointError, match="cannot be overwritten"):
            fm_delta.compress_checkpoint(src, base, out)
    for out in (small, base, "small", "./base", "link"):
        for source in (small, small / "model.safetensors"):
            with pytest.raises(CheckpointError, match="cannot be overwritten"):
                fm_delta.decompress_checkpoint(source, out)
    with pytest.raises(CheckpointError, match="base model itself"):
        fm_delta.compress_checkpoint("link", base, "out")
    assert contents(tmp_path) == before


def test_a_file_or_an_impossible_place_as_target_is_refused(tmp_path):
    src, base = pair(tmp_path)
    (tmp_path / "file").write_text("mine")
    small = tmp_path / "small"
    fm_delta.compress_checkpoint(src, base, small)
    for out in (tmp_path / "file", tmp_path / "file/below", Path("/proc/no-such-process/out"), tmp_path / ("n" * 300)):
        for write, arguments in ((fm_delta.compress_checkpoint, (src, base)), (fm_delta.decompress_checkpoint, (small,))):
            with pytest.raises(CheckpointError, match=f"({out}|{out.parent}) (is a file|could not be written|was not written)"):
                write(*arguments, out)
    assert (tmp_path / "file").read_text() == "mine"


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


# ---- failures half way -----------------------------------------------------------------------------------------------


def test_a_compression_that_fails_leaves_the_older_one(tmp_path):
    src, base = pair(tmp_path, shards=2)
    out = tmp_path / "small"
    fm_delta.compress_checkpoint(src, base, out)
    before = contents(out)
    write_folder(src, fine_tune(weights(), seed=2), shards=2)
    second = src / "model-00002-of-00002.safetensors"
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    with pytest.raises(CorruptFileError, match=second.name):
        fm_delta.compress_checkpoint(src, base, out)
    second.write_bytes(data)
    with pytest.raises(HfExtError, match="missing"):
        fm_delta.compress_checkpoint(src, tmp_path / "missing", out)
    (src / "config.json").write_text("no JSON")
    with pytest.raises(CorruptFileError, match="config.json"):
        fm_delta.compress_checkpoint(src, base, out)
    assert contents(out) == before
    assert fm_delta.verify(out) == 7


def test_a_decompression_that_fails_leaves_the_older_one(tmp_path):
    src, base = pair(tmp_path, shards=2)
    small, out = tmp_path / "small", tmp_path / "out"
    fm_delta.compress_checkpoint(src, base, small)
    fm_delta.decompress_checkpoint(small, out)
    (small / "config.json").write_text((small / "config.json").read_text().replace(": 16", ": 32"))
    changed = SafetensorsFile(base / "model.safetensors")["lm_head.weight"].data.copy()
    data = (base / "model.safetensors").read_bytes()
    changed[3000] ^= 1  # in the last tensor, between the places that the fingerprint samples
    (base / "model.safetensors").write_bytes(data[: -len(changed)] + changed.tobytes())
    with pytest.raises(HfExtError, match="'lm_head.weight' of the base model has changed"):
        fm_delta.decompress_checkpoint(small, out, overwrite=True)
    assert contents(out) == contents(src)


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


# ---- killed ----------------------------------------------------------------------------------------------------------


def test_a_kill_while_weights_are_written_leaves_nothing_visible(tmp_path):
    src, base = large_pair(tmp_path, tensors=32)
    older, _ = pair(tmp_path / "older")
    out = tmp_path / "out"
    fm_delta.compress_checkpoint(older, base, out)
    before = contents(out)
    child = multiprocessing.get_context("fork").Process(target=fm_delta.compress_checkpoint, args=(src, base, out))
    child.start()
    half = f".out{STAGE}/model.safetensors"
    deadline = time.monotonic() + 60
    while child.is_alive() and time.monotonic() < deadline:
        if any(path.stat().st_size > 1 << 20 for path in tmp_path.glob(half)):
            break
        time.sleep(0.001)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL and list(tmp_path.glob(half))
    assert contents(out) == before
    assert fm_delta.verify(out) == 7
    fm_delta.compress_checkpoint(src, base, out)
    assert fm_delta.verify(out) == 32
    assert not list(tmp_path.glob(".*"))


def test_leftovers_of_a_killed_save_are_not_copied(tmp_path):
    src, base = pair(tmp_path)
    before = contents(src)
    left = src / f".small{STAGE}"
    left.mkdir()
    for name in ("config.json", "model.safetensors", "other.txt"):
        (left / name).write_text("half")
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")
    assert contents(tmp_path / "back") == before


# ---- full disks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 100, 2000, 9000, 15000])
def test_files_that_may_not_grow_are_an_error_and_leave_nothing(tmp_path, limit):
    src, base = pair(tmp_path)
    small, out, before = tmp_path / "small", tmp_path / "out", contents(tmp_path)
    fm_delta.compress_checkpoint(src, base, small)

    def limited(work):
        def run():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return work()

        return in_child(run)

    for work in (
        lambda: fm_delta.compress_checkpoint(src, base, out),
        lambda: fm_delta.decompress_checkpoint(small, out),
    ):
        code, answer = limited(work)
        assert code == 0 and re.match(f"CheckpointError: {out} was not written: .*File too large", answer)
        assert not out.exists()
    shutil.rmtree(small)
    assert contents(tmp_path) == before


FULL_DISK = """
import os, sys
from pathlib import Path
from hf_ext import fm_delta
from hf_ext.errors import CheckpointError
disk, src, base = map(Path, sys.argv[1:])
old = {path.name: path.read_bytes() for path in (disk / "out").iterdir()}
compress, decompress = fm_delta.compress_checkpoint, fm_delta.decompress_checkpoint
for function, arguments, options in ((compress, (src, base), {"level": 1}), (decompress, (src.parent / "small",), {})):
    for out in (disk / "out", disk / "new"):
        try:
            function(*arguments, out, **options, overwrite=True)
        except CheckpointError as error:
            assert "No space left on device" in str(error) and str(out) in str(error), error
        else:
            raise SystemExit(f"{function.__name__} found room")
        assert {path.name: path.read_bytes() for path in (disk / "out").iterdir()} == old
        assert [path.name for path in disk.iterdir()] == ["out"]
print("refused, and all is as it was")
"""


def test_a_full_disk_is_an_error_and_leaves_what_was_there(tmp_path):
    src, base = large_pair(tmp_path, tensors=8)
    fm_delta.compress_checkpoint(src, base, tmp_path / "small")
    older, _ = pair(tmp_path / "older")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=3m tmpfs "{disk}"'
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-ec"]
    try:
        subprocess.run([*private, mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a small disk")
    command = f'{mount}; cp -r "{older}" "{disk}/out"; exec "$0" -c "$1" "{disk}" "{src}" "{base}"'
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [*private, command, sys.executable, FULL_DISK], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "refused, and all is as it was\n", result.stderr


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_checkpoint(tmp_path, monkeypatch):
    """96 tensors of 1 MiB, twice what a run may hold."""
    monkeypatch.setattr(prefetch, "AHEAD", 4 << 20)
    src, base = large_pair(tmp_path, tensors=96)

    def work():
        with at_most_cores(2):
            fm_delta.compress_checkpoint(src, base, tmp_path / "small")
            fm_delta.verify(tmp_path / "small")
            fm_delta.decompress_checkpoint(tmp_path / "small", tmp_path / "back")

    code, answer = in_child(lambda: peak_above(work))
    assert code == 0 and 0 < int(answer) < 48 << 20  # less than 1 MiB if the process had freed memory before
    assert contents(tmp_path / "back") == contents(src)
