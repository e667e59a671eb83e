"""`fm_delta.compress_series` stores a run's checkpoints against one another, bit-equal after deletions, moves and kills."""

from __future__ import annotations

import os
import shutil
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from kills import killed
from repeats import repeats
from tiny_checkpoints import contents, edit_settings, fine_tune, flip_bit, weights, write_folder
from tiny_models import assert_same_weights, bert, perturb
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from hf_ext import BaseModelError, CheckpointError, fm_delta
from hf_ext.fm_delta.series import LONGEST_CHAIN, is_compressed, needed_by, secure
from hf_ext.storage.open import MAX_CHAIN, open_checkpoint


@pytest.fixture(autouse=True)
def no_progress_bars(monkeypatch):
    monkeypatch.setattr(logging, "_tqdm_active", False)


def write_run(folder: Path, steps, shards: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """A base and a run away from it, each checkpoint nearer to the one before than to the base; `plain` is a copy of it."""
    tensors = weights(dtype)
    write_folder(folder / "base", tensors)
    for seed in (101, 102, 103):
        tensors = fine_tune(tensors, seed)
    for i, step in enumerate(steps):
        tensors = fine_tune(tensors, seed=step)
        checkpoint = write_folder(folder / f"run/checkpoint-{step}", tensors, shards=shards)
        (checkpoint / "optimizer.pt").write_bytes(f"of step {step}".encode())
        os.utime(checkpoint, (i, i))
    shutil.copytree(folder / "run", folder / "plain")
    return folder / "run"


def restored(checkpoint: Path, out: Path) -> dict[str, str]:
    shutil.rmtree(out, ignore_errors=True)
    fm_delta.decompress_checkpoint(checkpoint, out)
    return contents(out)


def assert_all_come_back(run: Path) -> None:
    """Every checkpoint is compressed, is what it was, and all that is not weights or config.json still lies beside it."""
    for checkpoint in run.glob("checkpoint-*"):
        plain = contents(run.parent / "plain" / checkpoint.name)
        assert is_compressed(checkpoint)
        assert contents(checkpoint).keys() == plain.keys() | {"README.md"}
        assert restored(checkpoint, run.parent / "back") == plain


def weights_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def bases(run: Path) -> dict[int, str]:
    recorded = {c.name: c.base for c in fm_delta.inspect_series(run).checkpoints}
    return {int(name.split("-")[1]): base and base.replace(str(run.parent) + "/", "") for name, base in recorded.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_checkpoint_is_restored_byte_for_byte(tmp_path, shards, dtype):
    run = write_run(tmp_path, (5, 10, 15, 100), shards, dtype)
    times = {checkpoint.name: checkpoint.stat().st_mtime_ns for checkpoint in run.iterdir()}
    report = fm_delta.compress_series(run, tmp_path / "base")
    assert bases(run) == {5: "checkpoint-10", 10: "checkpoint-15", 15: "checkpoint-100", 100: "base"}
    assert_all_come_back(run)
    assert {checkpoint.name: checkpoint.stat().st_mtime_ns for checkpoint in run.iterdir()} == times
    assert report == fm_delta.inspect_series(run) and report.ratio < 1
    for checkpoint in report.checkpoints:
        assert checkpoint.compressed_bytes == weights_size(run / checkpoint.name)
        assert checkpoint.original_bytes == weights_size(tmp_path / "plain" / checkpoint.name)


def test_the_smaller_of_both_is_kept(tmp_path):
    run = write_run(tmp_path, (1, 2, 3))
    tensors = weights()
    for seed in range(7, 12):
        tensors = fine_tune(tensors, seed)
    write_folder(run / "checkpoint-2", tensors)  # another way from the base
    before = contents(run)
    fm_delta.compress_series(run, tmp_path / "base")
    assert bases(run) == {1: "base", 2: "base", 3: "base"}
    for folder in run.iterdir():
        fm_delta.decompress_checkpoint(folder, tmp_path / "back" / folder.name)
    assert contents(tmp_path / "back") == before


def test_no_chain_grows_beyond_its_limit(tmp_path):
    run = write_run(tmp_path, range(1, 2 * LONGEST_CHAIN + 4))
    fm_delta.compress_series(run, tmp_path / "base")
    last = 2 * LONGEST_CHAIN + 3
    assert [step for step, base in bases(run).items() if base == "base"] == [LONGEST_CHAIN, 2 * LONGEST_CHAIN, last]
    assert_all_come_back(run)


def test_an_interrupted_series_resumes_and_may_keep_plain_ones(tmp_path):
    run = write_run(tmp_path, (1, 2, 3, 4))
    fm_delta.compress_series(run, tmp_path / "base", keep={"checkpoint-2", "checkpoint-3"}, until=3)
    assert [base is None for base in bases(run).values()] == [False, True, True, True]
    first = (run / "checkpoint-1/model.safetensors").stat().st_ino
    fm_delta.compress_series(run, tmp_path / "base")
    assert (run / "checkpoint-1/model.safetensors").stat().st_ino == first
    assert_all_come_back(run)


# ---- reading ---------------------------------------------------------------------------------------------------------


def model_run(folder: Path, **options) -> Path:
    """A run of three models, compressed; `plain` is a copy of it as it was."""
    model = bert()
    model.save_pretrained(folder / "base")
    for step in (1, 2, 3):
        model = perturb(model, seed=step)
        model.save_pretrained(folder / f"run/checkpoint-{step}", **options)
    shutil.copytree(folder / "run", folder / "plain")
    fm_delta.compress_series(folder / "run", folder / "base")
    chain_to(folder / "run", 1, 2)
    chain_to(folder / "run", 2, 3)
    return folder / "run"


def chain_to(run: Path, step: int, other: int) -> None:
    """Stores a checkpoint against another by the public calls, as one that is copied by hand may be."""
    checkpoint = run / f"checkpoint-{step}"
    plain = run.parent / "unpacked"
    fm_delta.decompress_checkpoint(checkpoint, plain)
    shutil.rmtree(checkpoint)
    fm_delta.compress_checkpoint(plain, run / f"checkpoint-{other}", checkpoint)
    shutil.rmtree(plain)
    edit_settings(checkpoint, base=f"../checkpoint-{other}")


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "60KB"}], ids=["whole", "shards"])
def test_a_moved_run_is_read_along_its_chain(tmp_path, monkeypatch, options):
    run = model_run(tmp_path, **options)
    assert bases(run) == {1: "checkpoint-2", 2: "checkpoint-3", 3: "base"}
    run = run.rename(tmp_path / "moved")
    monkeypatch.chdir(run / "checkpoint-3")  # from where ../checkpoint-2 means the same, and ../../moved/checkpoint-1 too
    for folder in (run, Path(".."), Path("../../moved")):
        for step in (1, 2, 3):
            checkpoint, plain = folder / f"checkpoint-{step}", tmp_path / f"plain/checkpoint-{step}"
            models = [AutoModelForSequenceClassification.from_pretrained(path) for path in (checkpoint, plain)]
            assert_same_weights(*models)
            assert fm_delta.verify(checkpoint) == len(models[1].state_dict())
            assert fm_delta.inspect(checkpoint).original_bytes == weights_size(plain)
    before, after = contents(tmp_path / "plain/checkpoint-1"), restored(run / "checkpoint-1", tmp_path / "back")
    del before["config.json"], after["config.json"]  # which `edit_settings` has written in another way
    assert after == before


def test_a_folder_of_the_same_relative_name_is_not_used(tmp_path, monkeypatch):
    run = model_run(tmp_path)
    (tmp_path / "elsewhere/here").mkdir(parents=True)
    perturb(bert(), seed=9).save_pretrained(tmp_path / "elsewhere/checkpoint-2")
    monkeypatch.chdir(tmp_path / "elsewhere/here")
    assert fm_delta.verify(run / "checkpoint-1")


def test_a_missing_or_changed_link_is_named(tmp_path):
    run = model_run(tmp_path)
    shutil.copytree(run, tmp_path / "whole")
    shutil.rmtree(run / "checkpoint-3")
    for step, needing in ((1, 2), (2, 2)):
        with pytest.raises(BaseModelError) as error:
            AutoModelForSequenceClassification.from_pretrained(run / f"checkpoint-{step}")
        assert f"needed to read this checkpoint, '{run}/checkpoint-{needing}'." in str(error.value)
        assert "../checkpoint-3" in str(error.value)
    perturb(bert(), seed=9).save_pretrained(run / "checkpoint-3")
    with pytest.raises(BaseModelError, match=f"'{run}/checkpoint-2', was compressed against .*checkpoint-3' is another model"):
        fm_delta.verify(run / "checkpoint-1")
    (tmp_path / "base").rename(tmp_path / "gone")
    with pytest.raises(BaseModelError, match=f"{tmp_path}/base' is needed to read this checkpoint, .*whole/checkpoint-3"):
        fm_delta.verify(tmp_path / "whole/checkpoint-1")
    edit_settings(tmp_path / "whole/checkpoint-3", base="../../gone")
    assert fm_delta.verify(tmp_path / "whole/checkpoint-1")


def test_a_damaged_link_is_noticed_before_anything_is_decoded(tmp_path):
    run = model_run(tmp_path)
    flip_bit(run / "checkpoint-3/model.safetensors")
    with pytest.raises(ValueError, match="checkpoint-3|damaged"):
        open_checkpoint(run / "checkpoint-1")


def test_a_chain_that_is_too_long_is_refused_early(tmp_path):
    base = write_folder(tmp_path / "0", {"weight": torch.zeros(8)})
    for step in range(1, MAX_CHAIN + 2):
        tuned = write_folder(tmp_path / "tuned", {"weight": torch.full((8,), float(step))})
        fm_delta.compress_checkpoint(tuned, base, tmp_path / str(step), level=1)
        base = tmp_path / str(step)
    assert open_checkpoint(base).read("weight").to_torch().tolist() == [MAX_CHAIN + 1.0] * 8
    with pytest.raises(CheckpointError, match=f"needs {MAX_CHAIN} other compressed checkpoints"):
        fm_delta.compress_checkpoint(tuned, base, tmp_path / "longer", delete_source=True)
    assert tuned.exists() and not (tmp_path / "longer").exists()
    shutil.copytree(tuned, tmp_path / "run/checkpoint-1")
    with pytest.raises(CheckpointError, match=f"{MAX_CHAIN - LONGEST_CHAIN + 1} are the limit"):
        fm_delta.compress_series(tmp_path / "run", tmp_path / str(MAX_CHAIN))
    fm_delta.compress_series(tmp_path / "run", tmp_path / str(MAX_CHAIN - LONGEST_CHAIN))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_checkpoints_that_need_each_other_are_refused(tmp_path, step):
    run = model_run(tmp_path)
    edit_settings(run / "checkpoint-3", base=f"../checkpoint-{step}")
    with pytest.raises(BaseModelError, match=f"need each other.*checkpoint-3 → .*checkpoint-{step}"):
        AutoModelForSequenceClassification.from_pretrained(run / "checkpoint-1")
    with pytest.raises(BaseModelError, match="need each other"):
        fm_delta.verify(run / "checkpoint-3")
    assert len(fm_delta.inspect_series(run).checkpoints) == 3


def test_a_link_that_is_plain_again_serves_as_before(tmp_path):
    run = model_run(tmp_path)
    fm_delta.decompress_checkpoint(run / "checkpoint-2", tmp_path / "unpacked")
    shutil.rmtree(run / "checkpoint-2")
    (tmp_path / "unpacked").rename(run / "checkpoint-2")
    assert fm_delta.verify(run / "checkpoint-1")


def test_a_chain_is_read_tensor_by_tensor(tmp_path):
    tensors = {f"layers.{i}.weight": torch.randn(256, 256, generator=torch.Generator().manual_seed(i)) for i in range(48)}
    write_folder(tmp_path / "base", tensors)
    for step in range(1, 5):
        tensors = fine_tune(tensors, seed=step)
        write_folder(tmp_path / f"run/checkpoint-{step}", tensors)
    fm_delta.compress_series(tmp_path / "run", tmp_path / "base")
    checkpoint = open_checkpoint(tmp_path / "run/checkpoint-1")
    one = tensors["layers.0.weight"].nbytes
    tracemalloc.start()
    for name in checkpoint.names():
        checkpoint.read(name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert one < peak < 6 * one  # of 48


# ---- deleting --------------------------------------------------------------------------------------------------------


def test_the_oldest_checkpoint_may_always_be_deleted(tmp_path):
    run = write_run(tmp_path, range(1, 6))
    fm_delta.compress_series(run, tmp_path / "base")
    for step in range(1, 5):
        shutil.rmtree(run / f"checkpoint-{step}")
        assert_all_come_back(run)


def test_a_needed_checkpoint_is_deleted_only_after_rebasing(tmp_path):
    run = write_run(tmp_path, range(1, 6))
    fm_delta.compress_series(run, tmp_path / "base")
    assert needed_by(run / "checkpoint-3") == run / "checkpoint-4"
    before = contents(run)
    with pytest.raises(CheckpointError, match="checkpoint-4 is needed to read checkpoint-3.*--rebase"):
        fm_delta.remove_checkpoint(run / "checkpoint-4")
    assert contents(run) == before
    fm_delta.remove_checkpoint(run / "checkpoint-4", rebase=True)
    assert sorted(bases(run)) == [1, 2, 3, 5] and bases(run)[3] in ("base", "checkpoint-5")
    assert_all_come_back(run)
    fm_delta.remove_checkpoint(run / "checkpoint-1")
    fm_delta.remove_checkpoint(run / "checkpoint-5", rebase=True)
    assert bases(run)[3] == "base" and sorted(bases(run)) == [2, 3]
    assert_all_come_back(run)


def test_only_checkpoints_are_deleted(tmp_path):
    run = write_run(tmp_path, (1,))
    for folder in (run, tmp_path / "base", run / "checkpoint-2", run / "checkpoint-1/config.json"):
        with pytest.raises(CheckpointError, match="is not a checkpoint of a run"):
            fm_delta.remove_checkpoint(folder)


def test_no_checkpoint_needs_one_that_may_be_overwritten(tmp_path):
    run = write_run(tmp_path, (1, 2, 3, 4))
    fm_delta.compress_series(run, tmp_path / "base")
    assert needed_by(run / "checkpoint-2") and needed_by(run / "checkpoint-3")
    secure(run, 4)
    assert needed_by(run / "checkpoint-2") and needed_by(run / "checkpoint-3")
    secure(run, 3)
    assert needed_by(run / "checkpoint-2") and not needed_by(run / "checkpoint-3")
    secure(run, 3, best="checkpoint-2")
    assert not needed_by(run / "checkpoint-2")
    assert_all_come_back(run)


def test_a_checkpoint_in_the_wrong_order_is_stored_on_the_base(tmp_path):
    run = write_run(tmp_path, (8, 9, 10))
    fm_delta.compress_series(run, tmp_path / "base")
    assert needed_by(run / "checkpoint-9")
    os.utime(run / "checkpoint-10", (1, 1))  # the same as that of 9, and "checkpoint-10" comes before "checkpoint-9"
    secure(run, 10)
    assert not needed_by(run / "checkpoint-9")
    assert_all_come_back(run)


def test_a_damaged_checkpoint_does_not_stop_a_training(tmp_path, caplog):
    run = write_run(tmp_path, (1, 2, 3))
    fm_delta.compress_series(run, tmp_path / "base")
    (run / "checkpoint-1/model.safetensors").write_bytes(b"damaged")
    secure(run, 2)
    assert not needed_by(run / "checkpoint-2") and "checkpoint-1 cannot be read and is not changed" in caplog.text


# ---- what is refused, what is killed ---------------------------------------------------------------------------------


def test_an_unusable_run_or_base_is_named(tmp_path):
    run = write_run(tmp_path, (1, 2))
    with pytest.raises(CheckpointError, match="holds no checkpoint-N"):
        fm_delta.compress_series(tmp_path, tmp_path / "base")
    with pytest.raises(BaseModelError, match="no/such"):
        fm_delta.compress_series(run, "no/such")
    with pytest.raises(CheckpointError, match="is a checkpoint of the run itself"):
        fm_delta.compress_series(run, run / "checkpoint-1")
    before = contents(run)
    (run / "checkpoint-2/config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(CheckpointError, match="checkpoint-2 is quantized"):
        fm_delta.compress_series(run, tmp_path / "base", keep={"checkpoint-1"})
    del before["checkpoint-2/config.json"]
    assert before.items() <= contents(run).items() and not list(run.glob(".*"))


def test_a_base_that_is_compressed_itself_serves(tmp_path):
    run = write_run(tmp_path, (1, 2))
    fm_delta.compress_checkpoint(run / "checkpoint-1", tmp_path / "base", tmp_path / "start")
    fm_delta.compress_series(run, tmp_path / "start")
    assert_all_come_back(run)


def test_a_model_may_be_saved_against_a_compressed_base(tmp_path):
    run = model_run(tmp_path)
    tuned = perturb(AutoModelForSequenceClassification.from_pretrained(run / "checkpoint-1"), seed=9)
    fm_delta.enable(tuned, run / "checkpoint-1").save_pretrained(tmp_path / "small")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
    assert_same_weights(loaded, fm_delta.disable(tuned))


def test_adapters_alone_are_left(tmp_path):
    run = write_run(tmp_path, (1, 2))
    (run / "checkpoint-3").mkdir()
    (run / "checkpoint-3/adapter_model.safetensors").write_bytes(b"an adapter")
    fm_delta.compress_series(run, tmp_path / "base")
    assert contents(run / "checkpoint-3").keys() == {"adapter_model.safetensors"}
    shutil.rmtree(run / "checkpoint-3")
    assert_all_come_back(run)


def test_files_are_copied_without_hard_links(tmp_path, monkeypatch):
    def none(source, target, **options):
        raise OSError("no links here")

    run = write_run(tmp_path, (1, 2))
    monkeypatch.setattr(os, "link", none)
    fm_delta.compress_series(run, tmp_path / "base")
    assert_all_come_back(run)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills processes as Linux does")
@repeats("stride", 15, 1)
@pytest.mark.parametrize("work", ["compress", "remove"])
def test_a_killed_run_leaves_each_checkpoint_whole(tmp_path, work, stride):
    run = write_run(tmp_path, (1, 2))
    base, start = tmp_path / "base", tmp_path / "start"
    if work == "remove":
        fm_delta.compress_series(run, base)
        assert needed_by(run / "checkpoint-1")

    def act():
        fm_delta.compress_series(run, base) if work == "compress" else fm_delta.remove_checkpoint(run / "checkpoint-2", True)

    def whole(checkpoint: Path) -> bool:
        plain = contents(tmp_path / "plain" / checkpoint.name)
        return contents(checkpoint) == plain or restored(checkpoint, tmp_path / "back") == plain

    run.rename(start)
    absent = 0
    for n in killed(run, start, act, stride):
        there = [run / f"checkpoint-{step}" for step in (1, 2) if (run / f"checkpoint-{step}").exists()]
        absent += len(there) < 2
        if len(there) < 2 and list(run.glob("*.hf_ext-held")):  # between two renames, of which the next call undoes the first
            fm_delta.series.recover(run)
            there = [run / f"checkpoint-{step}" for step in (1, 2) if (run / f"checkpoint-{step}").exists()]
        assert (run / "checkpoint-1") in there and (work == "remove" or len(there) == 2)
        assert all(map(whole, there))
        if (n % 9 == 0 or stride > 1) and len(there) == 2:
            act()
            assert not list(run.glob(".*"))
            assert_all_come_back(run)
    assert work == "remove" if absent else work == "compress" or stride > 1
