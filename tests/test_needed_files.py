"""A base may be compressed against another base, and that one too: none of the files that such a chain needs is overwritten or
deleted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_checkpoints import contents, fine_tune, weights, write_folder
from tiny_merges import write_tasks
from tiny_models import bert, perturb
from transformers import AutoModelForSequenceClassification

from hf_ext import CheckpointError, emr, fm_delta
from hf_ext.storage.stored import open_checkpoint


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A folder with `root`, its fine-tunes `one` and `two`, and `one` compressed against the root as `base`."""
    write_folder(tmp_path / "root", weights())
    for seed, name in enumerate(("one", "two"), start=1):
        write_folder(tmp_path / name, fine_tune(weights(), seed=seed))
    fm_delta.compress_checkpoint(tmp_path / "one", tmp_path / "root", tmp_path / "base")
    shutil.rmtree(tmp_path / "one")
    return tmp_path


@pytest.mark.parametrize(
    "write",
    [
        lambda place, out: fm_delta.compress_checkpoint(place / "two", place / "base", out, overwrite=True),
        lambda place, out: fm_delta.decompress_checkpoint(place / "small", out, overwrite=True),
    ],
    ids=["compress", "decompress"],
)
def test_no_command_loses_the_base_of_a_base(chain: Path, write: Callable[[Path, Path], object]) -> None:
    fm_delta.compress_checkpoint(chain / "two", chain / "base", chain / "small")
    before = contents(chain / "root")
    with pytest.raises(CheckpointError, match="still needed|is needed|the base needs it"):
        write(chain, chain / "root")
    assert contents(chain / "root") == before
    assert all(open_checkpoint(chain / "base").read(name).data.size for name in weights())


def test_a_model_is_not_saved_over_the_base_of_its_base(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "root")
    perturb(bert(), 1).save_pretrained(tmp_path / "one")
    fm_delta.compress_checkpoint(tmp_path / "one", tmp_path / "root", tmp_path / "base")
    model = fm_delta.enable(perturb(bert(), 2), tmp_path / "base")
    with pytest.raises(CheckpointError, match="still needed"):
        model.save_pretrained(tmp_path / "root")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")


def test_adding_a_task_overwrites_neither_it_nor_its_base(tmp_path: Path) -> None:
    base, tasks = write_tasks(tmp_path / "in", {"cr": 2, "subj": 3, "trec": 6})
    emr.merge(base, {"cr": tasks["cr"]}, tmp_path / "merged")
    fm_delta.compress_checkpoint(tasks["subj"], tasks["trec"], tmp_path / "small")
    for needed in (tmp_path / "small", tasks["trec"]):
        before = contents(needed)
        for write in (
            lambda out: emr.add_task(tmp_path / "merged", "subj", tmp_path / "small", out, overwrite=True),
            lambda out: emr.merge(base, {"subj": tmp_path / "small"}, out, overwrite=True),
        ):
            with pytest.raises(CheckpointError, match="still needed"):
                write(needed)
        assert contents(needed) == before


def test_a_merge_keeps_the_base_of_its_base(tmp_path: Path) -> None:
    base, tasks = write_tasks(tmp_path / "in", {"cr": 2, "subj": 3})
    emr.merge(base, tasks, tmp_path / "merged")
    perturb(bert(), 7).bert.save_pretrained(tmp_path / "root")
    fm_delta.compress_checkpoint(base, tmp_path / "root", tmp_path / "small")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    config["quantization_config"]["base"] = str(tmp_path / "small")
    (tmp_path / "merged" / "config.json").write_text(json.dumps(config))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    for write in (
        lambda: emr.extract(tmp_path / "merged", "cr", tmp_path / "root", overwrite=True),
        lambda: emr.add_task(tmp_path / "merged", "more", tasks["cr"], tmp_path / "root", overwrite=True),
        lambda: model.save_pretrained(tmp_path / "root"),
    ):
        with pytest.raises(CheckpointError, match="still needed"):
            write()
    emr.verify(tmp_path / "merged")
