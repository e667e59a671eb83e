"""A run that fails or is killed leaves what was there; the next run succeeds and clears what the last one left."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kills import in_child
from processes import peak_above
from tiny_checkpoints import contents, fine_tune, pair, write_folder
from transformers.utils import logging

from hf_ext import fm_delta
from hf_ext.errors import CorruptFileError
from hf_ext.fm_delta import compress
from hf_ext.storage import at_most_cores, prefetch
from hf_ext.storage.files import STAGE

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
