"""A merge with damaged or forged files does not load. Tests of every reader are in test_promises_reading.py."""

from __future__ import annotations

import re
import shutil

import pytest
from processes import loads_without_plugin
from tiny_checkpoints import edit_settings
from tiny_merges import METHODS, classifier, write_tasks
from transformers import AutoModelForSequenceClassification

from hf_ext import CheckpointError, CorruptFileError, EMRConfig, emr
from hf_ext.emr.modulators import Modulated, TaskFile, copy_task

Auto = AutoModelForSequenceClassification


@pytest.fixture(scope="module", params=METHODS)
def merges(tmp_path_factory, request):
    """Two merges with one base and tasks of the same names."""
    folder = tmp_path_factory.mktemp("merges")
    base, tasks = write_tasks(folder / "in", {"cr": 2, "subj": 3})
    emr.merge(base, tasks, folder / "merged", **METHODS[request.param])
    classifier(2, 9).save_pretrained(tasks["cr"])
    emr.merge(base, tasks, folder / "second", **METHODS[request.param])
    return folder


@pytest.fixture
def broken(merges, tmp_path):
    """A merge of its own, to damage, and beside it its base and the second merge."""
    shutil.copytree(merges, tmp_path, dirs_exist_ok=True)
    edit_settings(tmp_path / "merged", base=str(tmp_path / "in/base"))
    return tmp_path / "merged"


def modulators(folder, task="subj"):
    return folder / f"task-{task}" / "modulators.safetensors"


@pytest.mark.parametrize("merges", ["switch"], indirect=True)
def test_without_the_plugin_it_fails_loudly(merges):
    targets = (f"{auto}@{merges / 'merged'}" for auto in ("AutoModel", "AutoModelForSequenceClassification"))
    outcomes, printed = loads_without_plugin(*targets)
    assert outcomes == ["RuntimeError", "RuntimeError"] and "got hf_ext.emr" in printed


def test_each_damaged_byte_of_the_modulators_is_noticed(broken):
    path = modulators(broken)
    good = path.read_bytes()
    header = int.from_bytes(good[:8], "little")
    for place in (*range(8, 8 + header, 421), *range(8 + header, len(good), 197), len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x15]) + good[place + 1 :])
        with pytest.raises(CorruptFileError, match="subj"):
            emr.verify(broken)


@pytest.mark.parametrize("tasks", ["cr", [], [3], ["../../etc"], None, ["cr", "gone"]])
def test_a_config_with_invalid_tasks_is_refused(broken, tasks):
    edit_settings(broken, tasks=tasks)
    with pytest.raises(CorruptFileError):
        Auto.from_pretrained(broken)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: {"modulated": record.modulated | {"not.there": Modulated(1.0, "b0")}},
        lambda record: {"modulated": record.modulated | {"classifier.weight": Modulated(1.0, "b0")}},
        lambda record: {"shared": ["not.there"]},
    ],
    ids=["no tensor", "not elected", "not shared"],
)
def test_modulators_of_tensors_that_do_not_exist_are_refused(broken, change):
    file = TaskFile(modulators(broken))
    copy_task(file, other := file.path.with_name("other.safetensors"), **change(file.record))
    other.replace(file.path)
    config = broken / "config.json"
    config.write_text(re.sub(r'"digests": {.*?}', '"digests": null', config.read_text(), flags=re.S))  # forged, too
    with pytest.raises(CorruptFileError, match="does not fit the elected weights and the base"):
        Auto.from_pretrained(broken)


def test_files_of_no_task_may_lie_beside(broken):
    (broken / "task-notes").mkdir()
    modulators(broken, "notes").write_text("garbage")
    shutil.copytree(broken.parent / "second/task-subj", broken / "task-older")
    assert Auto.from_pretrained(broken).tasks == ["cr", "subj"]


def test_merging_over_a_damaged_merge_leaves_none_of_its_tasks(broken, tmp_path):
    base, tasks = write_tasks(tmp_path / "again", {"cr": 2, "subj": 3})
    emr.add_task(broken, "more", tasks["cr"], tmp_path / "larger", accept_conflicts=True)
    (tmp_path / "larger/config.json").unlink()
    emr.merge(base, tasks, tmp_path / "larger")
    assert not (tmp_path / "larger/task-more").exists()
    assert Auto.from_pretrained(tmp_path / "larger").tasks == ["cr", "subj"]


def test_an_emr_config_does_not_load_a_plain_checkpoint(merges):
    with pytest.raises(CheckpointError, match="not a merge"):
        Auto.from_pretrained(merges / "in/cr", quantization_config=EMRConfig(base="somewhere"))
