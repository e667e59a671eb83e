"""A merge with a file that is damaged, missing, or of another merge does not load."""

from __future__ import annotations

import re
import shutil

import pytest
from processes import loads_without_plugin
from tiny_checkpoints import edit_settings
from tiny_merges import METHODS, classifier, write_tasks
from tiny_models import bert, perturb
from transformers import AutoModelForSequenceClassification

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, EMRConfig, emr
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


def test_without_the_plugin_it_fails_loudly(merges):
    targets = (f"{auto}@{merges / 'merged'}" for auto in ("AutoModel", "AutoModelForSequenceClassification"))
    outcomes, printed = loads_without_plugin(*targets)
    assert outcomes == ["RuntimeError", "RuntimeError"] and "got hf_ext.emr" in printed


def test_each_damaged_byte_of_the_modulators_is_noticed(broken):
    path = modulators(broken)
    good = path.read_bytes()
    header = int.from_bytes(good[:8], "little")
    for place in (*range(8, 8 + header, 211), *range(8 + header, len(good), 97), len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x15]) + good[place + 1 :])
        with pytest.raises(CorruptFileError, match="subj"):
            emr.verify(broken)
    for cut in (0, 7, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(CorruptFileError, match="subj"):
            Auto.from_pretrained(broken)


def change_version(path):
    data = path.read_bytes()
    assert data.count(b'\\"version\\": 1') == 1
    path.write_bytes(data.replace(b'\\"version\\": 1', b'\\"version\\": 9'))


DAMAGES = {
    "none": (lambda merge: modulators(merge).unlink(), "is missing"),
    "another merge's": (
        lambda merge: shutil.copy(modulators(merge.parent / "second"), modulators(merge)),
        "belongs to another merge",
    ),
    "another task's": (lambda merge: shutil.copy(modulators(merge, "cr"), modulators(merge)), "belongs to task 'cr', not"),
    "no first task": (lambda merge: edit_settings(merge, tasks=["subj"]), "does not list the task 'cr'"),
    "no last task": (lambda merge: edit_settings(merge, tasks=["cr"]), "does not list the task 'subj'"),
    "later version": (lambda merge: change_version(modulators(merge)), "format version 9.*update hf_ext"),
    "another base": (
        lambda merge: perturb(bert(), 5).bert.save_pretrained(merge.parent / "in/base"),
        "is another model or revision",
    ),
    "no base": (lambda merge: (merge.parent / "in/base/model.safetensors").unlink(), "is needed to read this checkpoint"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_do_not_belong_together_are_refused(broken, name):
    damage, message = DAMAGES[name]
    damage(broken)
    for use in (Auto.from_pretrained, lambda folder: emr.extract(folder, "subj", folder.parent / "out")):
        with pytest.raises(BaseModelError if "base" in name else CorruptFileError, match=message):
            use(broken)


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


@pytest.mark.parametrize("text", [None, "", "{}", "{", '{"model_type": "gpt2"}'])
def test_a_task_without_its_config_is_refused(broken, text):
    path = broken / "task-subj" / "config.json"
    path.unlink() if text is None else path.write_text(text)
    for read in (emr.verify, lambda folder: emr.extract(folder, "subj", folder.parent / "out")):
        with pytest.raises(CorruptFileError, match="is missing|checksum mismatch"):
            read(broken)
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
