"""With HF_EXT_DECODED, the first load of a compressed checkpoint keeps its decoded files, and later loads map these."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import flip_bit
from tiny_merges import write_tasks
from tiny_models import MODELS, assert_same_weights, fine_tuned, llama, perturb
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, HfExtError, emr, fm_delta
from hf_ext.emr.folder import MergeFolder
from hf_ext.storage import DeltaCheckpoint, decoded, files
from hf_ext.storage.plain_writer import shards_of
from hf_ext.storage.safetensors_file import RawTensor


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """The folder of the decoded files, which does not exist yet."""
    monkeypatch.setenv(decoded.FOLDER, str(tmp_path / "kept" / "decoded"))
    return tmp_path / "kept" / "decoded"


def compressed(folder: Path, model=None, **options) -> Path:
    fine_tuned(model or llama(), folder, **options)
    fm_delta.compress_checkpoint(folder / "tuned", folder / "base", folder / "small", level=1)
    return folder / "small"


def entries(kept: Path) -> list[Path]:
    return sorted(kept.iterdir(), key=lambda path: path.stat().st_mtime) if kept.exists() else []


def decodes_nothing(monkeypatch) -> None:
    def fail(*args):
        raise AssertionError("decoded again")

    monkeypatch.setattr(DeltaCheckpoint, "read", fail)
    monkeypatch.setattr(MergeFolder, "tensor", fail)


@pytest.mark.parametrize(("name", "options"), [
    ("llama_tied", {}), ("mixtral", {"max_shard_size": "150KB"}), ("bert", {}), ("t5", {}),
])  # fmt: skip
def test_a_second_load_decodes_nothing(tmp_path, kept, monkeypatch, name, options):
    auto, folder = MODELS[name].auto, compressed(tmp_path, MODELS[name].build(), **options)
    plain = auto.from_pretrained(tmp_path / "tuned")
    assert_same_weights(auto.from_pretrained(folder), plain)
    (entry,) = entries(kept)
    assert {path.name for path in entry.iterdir()} == {path.name for path in folder.glob("*.safetensors")}
    decodes_nothing(monkeypatch)
    for dtype in (torch.float32, torch.bfloat16):
        model = auto.from_pretrained(folder, dtype=dtype)
        assert_same_weights(model, auto.from_pretrained(tmp_path / "tuned", dtype=dtype))
        assert not hasattr(model.config, "quantization_config")
    assert entries(kept) == [entry]


def test_a_second_load_of_a_merge_decodes_nothing(tmp_path, kept, monkeypatch):
    base, tasks = write_tasks(tmp_path, {"trec": 6, "cr": 2})
    emr.merge(base, tasks, tmp_path / "merged", method="emr")
    with monkeypatch.context() as patch:
        patch.delenv(decoded.FOLDER)
        expected = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    for _ in range(2):
        with monkeypatch.context() as patch:
            if entries(kept):
                decodes_nothing(patch)
            model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
        for task in ("trec", "cr", "trec"):  # the files stay as they are
            model.set_task(task)
            expected.set_task(task)
            assert_same_weights(model, expected)
    assert len(entries(kept)) == 1


def test_another_file_or_base_never_hits(tmp_path, kept):
    folder = compressed(tmp_path)
    AutoModelForCausalLM.from_pretrained(folder)
    perturb(llama(), seed=7).save_pretrained(tmp_path / "tuned")
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", folder, level=1)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(tmp_path / "tuned"))
    assert len(entries(kept)) == 2
    flip_bit(folder / "model.safetensors", 0.6)
    with pytest.raises(CorruptFileError, match="model.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)
    flip_bit(folder / "model.safetensors", 0.6)
    perturb(llama(), seed=8).save_pretrained(tmp_path / "base")
    with pytest.raises(BaseModelError, match="another model or revision"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_failure_leaves_no_entry_and_a_broken_entry_is_replaced(tmp_path, kept):
    folder = compressed(tmp_path)
    weights = load_file(tmp_path / "base/model.safetensors")
    weights["lm_head.weight"].view(-1)[weights["lm_head.weight"].numel() // 4] += 0.5  # the fingerprint takes no sample there
    (tmp_path / "base/model.safetensors").rename(tmp_path / "kept.safetensors")
    save_file(weights, tmp_path / "base/model.safetensors", {"format": "pt"})
    with pytest.raises(BaseModelError, match=r"lm_head\.weight"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not entries(kept)
    (tmp_path / "kept.safetensors").rename(tmp_path / "base/model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    for _ in range(2):
        assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), plain)
        (entry,) = entries(kept)
        os.truncate(entry / "model.safetensors", 5000)


# ---- the folder ----


def weights(count: int, values: int = 1000):
    """Files of this many bytes, the digest of which is the number, and what holds their entry while it is referenced."""
    tensor = RawTensor("U8", (values,), torch.full((values,), count, dtype=torch.uint8).numpy())
    return str(count), shards_of({"a": ("U8", (values,))}, lambda name: tensor, Path(), "1GB"), ExitStack()


def test_the_least_recently_loaded_entries_are_removed_first(kept, monkeypatch):
    monkeypatch.setenv(decoded.LIMIT, "3e-6")  # two entries with their headers
    kept.joinpath("decoded-by-hand").mkdir(parents=True)
    first, second = (decoded.decoded_folder(*weights(count)) for count in (1, 2))
    for age, entry in enumerate((second, first)):
        os.utime(entry, (age, age))
    decoded.decoded_folder(*weights(1))
    third = decoded.decoded_folder(*weights(3))
    assert {*entries(kept)} == {kept / "decoded-by-hand", first, third}
    with pytest.raises(CheckpointError, match="do not fit"):
        decoded.decoded_folder(*weights(4, values=4000))
    assert first.is_dir() and third.is_dir()


@pytest.mark.parametrize("used_by", ["a writer", "a model"])
def test_an_entry_in_use_is_not_removed_nor_counted_as_removed(kept, monkeypatch, used_by):
    monkeypatch.setenv(decoded.LIMIT, "1.5e-6")  # one entry
    digest, shards, held = weights(1)
    entry = decoded.decoded_folder(digest, shards, held)
    if used_by == "a writer":
        held.close()
        held.enter_context(files.locked(entry))
    with ThreadPoolExecutor(1) as pool, pytest.raises(CheckpointError, match="do not fit"):
        pool.submit(decoded.decoded_folder, *weights(2)).result()
    assert [*kept.glob("decoded-*")] == [entry]
    held.close()
    other = decoded.decoded_folder(*weights(2))
    assert entries(kept) == [other]


def test_an_offloaded_model_keeps_its_entry(tmp_path, kept, monkeypatch):
    first = compressed(tmp_path / "first")
    tokens, layers = torch.arange(5)[None], {"model.layers.0": "cpu", "model.layers.1": "disk"}
    devices = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu") | layers
    for _ in range(2):  # writes the entry, then finds it
        model = AutoModelForCausalLM.from_pretrained(first, device_map=devices, offload_folder=tmp_path / "offload")
        (entry,) = entries(kept)
        monkeypatch.setenv(decoded.LIMIT, "1e-5")  # less than that
        expected = model(tokens).logits
        AutoModelForCausalLM.from_pretrained(compressed(tmp_path / "second", perturb(llama(), seed=9)))
        assert entries(kept) == [entry] and torch.equal(model(tokens).logits, expected)
        monkeypatch.delenv(decoded.LIMIT)
    del model
    gc.collect()
    monkeypatch.setenv(decoded.LIMIT, str(sum(path.stat().st_size for path in entry.iterdir()) / 1e9))
    AutoModelForCausalLM.from_pretrained(tmp_path / "second/small")
    assert len(entries(kept)) == 1 and not entry.exists()


def test_a_link_to_nothing_is_replaced_by_the_entry(kept):
    entry = decoded.decoded_folder(*weights(1))
    entry.rename(kept / "moved")
    entry.symlink_to("nowhere/at/all")
    assert decoded.decoded_folder(*weights(1)) == entry and not entry.is_symlink()
    (entry / "model.safetensors").unlink()
    (entry / "model.safetensors").symlink_to("nowhere")
    decoded.decoded_folder(*weights(1))
    assert load_file(entry / "model.safetensors")["a"].sum() == 1000


REASONS = [("0", "do not fit"), ("much", "not a number"), ("nan", "not a number"), (None, "is a file")]


@pytest.mark.parametrize(("limit", "reason"), REASONS)
def test_without_a_place_the_weights_are_decoded_in_memory(tmp_path, kept, monkeypatch, caplog, limit, reason):
    folder = compressed(tmp_path)
    if limit is None:
        kept.parent.write_text("")
    else:
        monkeypatch.setenv(decoded.LIMIT, limit)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    for _ in range(2):
        assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), plain)
    (warning,) = (record.getMessage() for record in caplog.records if "decoded in memory" in record.getMessage())
    assert reason in warning
    assert kept.parent.is_file() or not entries(kept)


def test_several_writers_of_one_entry_leave_it_whole(kept):
    def load(_: int) -> Path | str:
        try:
            return decoded.decoded_folder(*weights(1, values=1_000_000))
        except HfExtError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        results = {*pool.map(load, range(32))}
    (entry,) = (result for result in results if isinstance(result, Path))
    assert all("Another process is writing" in result for result in results - {entry})
    assert entries(kept) == [entry] and load_file(entry / "model.safetensors")["a"].sum() == 1_000_000


@pytest.mark.parametrize(("shared", "memory", "disk", "place"), [
    (True, 3000, 0, "memory"), (True, 1500, 3000, "disk"), (False, 3000, 1500, "disk"), (True, 1500, 500, None),
])  # fmt: skip
def test_temporary_files_go_where_there_is_room(tmp_path, monkeypatch, shared, memory, disk, place):
    free = {tmp_path / "memory": memory, tmp_path / "disk": disk}
    for folder in free:
        folder.mkdir()
    monkeypatch.setattr(decoded, "SHARED_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(decoded.tempfile, "tempdir", str(tmp_path / "disk"))
    monkeypatch.setattr(decoded.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    if place is not None:
        assert decoded.place_for(weights(1)[1], shared) == tmp_path / place
    else:
        with pytest.raises(CheckpointError, match=r"0\.0 GB do not fit into .*disk.*Set TMPDIR"):
            decoded.place_for(weights(1)[1], shared)
