"""A base may be compressed itself: chains of checkpoints are read bit-equal, and what is missing or wrong in one is named."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import contents, edit_settings, fine_tune, write_folder
from tiny_models import assert_same_weights, bert, perturb
from transformers import AutoModelForSequenceClassification

import hf_ext.storage.open
from hf_ext import CheckpointError, fm_delta
from hf_ext.storage.stored import open_checkpoint

load = AutoModelForSequenceClassification.from_pretrained


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Models 1 to 3 in `plain`, compressed in `run`: 1 against 2, 2 against 3, and 3 against `base`."""
    folder = tmp_path_factory.mktemp("chain")
    model = bert()
    model.save_pretrained(folder / "base")
    for step in (1, 2, 3):
        model = perturb(model, seed=step)
        model.save_pretrained(folder / f"plain/{step}")
    for step, base in ((3, "base"), (2, "run/3"), (1, "run/2")):
        fm_delta.compress_checkpoint(folder / f"plain/{step}", folder / base, folder / f"run/{step}")
        edit_settings(folder / f"run/{step}", base="../../base" if step == 3 else f"../{step + 1}")
    return folder


@pytest.fixture
def chain(written, tmp_path) -> Path:
    return shutil.copytree(written, tmp_path / "chain")


def test_a_moved_chain_is_read_from_any_working_directory(chain, monkeypatch):
    elsewhere = chain / "elsewhere/here"
    elsewhere.mkdir(parents=True)
    perturb(bert(), seed=9).save_pretrained(chain / "elsewhere/2")  # `../2`, seen from the working directory
    for place in (chain / "run/3", elsewhere):
        monkeypatch.chdir(place)
        for step in (1, 2, 3):
            assert_same_weights(load(chain / f"run/{step}"), load(chain / f"plain/{step}"))
            assert fm_delta.verify(Path(chain / "run", str(step))) == len(load(chain / f"plain/{step}").state_dict())
    fm_delta.decompress_checkpoint(chain / "run/1", chain / "back")
    before, after = contents(chain / "plain/1"), contents(chain / "back")
    del before["config.json"], after["config.json"]  # which `edit_settings` has written in another way
    assert after == before


def test_a_link_may_be_plain_again(chain):
    shutil.rmtree(chain / "run/2")
    shutil.copytree(chain / "plain/2", chain / "run/2")
    assert fm_delta.verify(chain / "run/1")


def test_a_chain_that_is_too_long_is_refused_early(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_ext.storage.open, "MAX_CHAIN", 3)
    base = write_folder(tmp_path / "0", {"weight": torch.zeros(8)})
    for step in range(1, 5):
        tuned = write_folder(tmp_path / "tuned", {"weight": torch.full((8,), float(step))})
        fm_delta.compress_checkpoint(tuned, base, tmp_path / str(step), level=1)
        base = tmp_path / str(step)
    assert open_checkpoint(base).read("weight").to_torch().tolist() == [4.0] * 8
    with pytest.raises(CheckpointError, match="needs 3 other compressed checkpoints"):
        fm_delta.compress_checkpoint(tuned, base, tmp_path / "longer")
    assert not (tmp_path / "longer").exists()


def test_a_chain_is_read_tensor_by_tensor(tmp_path):
    tensors = {f"layers.{i}.weight": torch.randn(128, 256, generator=torch.Generator().manual_seed(i)) for i in range(48)}
    base = write_folder(tmp_path / "base", tensors)
    for step in ("1", "2", "3"):
        tensors = fine_tune(tensors, seed=int(step))
        fm_delta.compress_checkpoint(write_folder(tmp_path / "tuned", tensors), base, tmp_path / step, level=1)
        base = tmp_path / step
    checkpoint, one = open_checkpoint(base), tensors["layers.0.weight"].nbytes
    tracemalloc.start()
    for name in checkpoint.names():
        assert np.array_equal(checkpoint.read(name).to_torch(), tensors[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert one < peak < 8 * one  # of 48
