"""A merge with damaged or forged files does not load, and a damaged base gives the exact tensors or an error. Tests of every
reader are in test_promises_reading.py."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import torch
from processes import loads_without_plugin
from tiny_checkpoints import edit_settings, write_folder
from tiny_merges import METHODS, write_tasks
from transformers import AutoModelForSequenceClassification

from hf_ext import CheckpointError, CorruptFileError, EMRConfig, HfExtError, emr
from hf_ext.emr.folder import MergeFolder
from hf_ext.emr.modulators import Modulated, TaskFile, copy_task
from hf_ext.storage.native import FLOATS
from hf_ext.storage.safetensors_file import SafetensorsFile, torch_dtype

Auto = AutoModelForSequenceClassification


@pytest.fixture(scope="module", params=METHODS)
def merges(tmp_path_factory, request):
    """A merge, and beside it what it was made of."""
    folder = tmp_path_factory.mktemp("merges")
    emr.merge(*write_tasks(folder / "in", {"cr": 2, "subj": 3}), folder / "merged", **METHODS[request.param])
    return folder


@pytest.fixture
def broken(merges, tmp_path):
    """A merge of its own, to damage, and beside it its base."""
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
    emr.merge(broken.parent / "in/base", {"subj": broken.parent / "in/subj"}, broken.parent / "second", method="emr")
    shutil.copytree(broken.parent / "second/task-subj", broken / "task-older")
    assert Auto.from_pretrained(broken).tasks == ["cr", "subj"]


def test_merging_over_a_damaged_merge_leaves_none_of_its_tasks(broken, tmp_path):
    base, tasks = write_tasks(tmp_path / "again", {"cr": 2, "subj": 3})
    emr.add_task(broken, {"more": tasks["cr"]}, tmp_path / "larger", accept_conflicts=True)
    (tmp_path / "larger/config.json").unlink()
    emr.merge(base, tasks, tmp_path / "larger", method="emr")
    assert not (tmp_path / "larger/task-more").exists()
    assert Auto.from_pretrained(tmp_path / "larger").tasks == ["cr", "subj"]


def test_an_emr_config_does_not_load_a_plain_checkpoint(merges):
    with pytest.raises(CheckpointError, match="not a merge"):
        Auto.from_pretrained(merges / "in/cr", quantization_config=EMRConfig(base="somewhere"))


# ---- the base --------------------------------------------------------------------------------------------------------

FLIPS = 12  # of a bit each, spread over the base's data


def tensors(base_type: str, task_type: str, seed: int) -> dict[str, torch.Tensor]:
    """Weights as training in bf16 leaves them, in a wider type: most payloads are then coded without the base's low bits."""
    generator = torch.Generator().manual_seed(0)
    base = {"layer.weight": torch.randn(24, 16, generator=generator), "layer.bias": torch.zeros(16)}
    if not seed:
        return {name: tensor.to(torch_dtype(base_type)) for name, tensor in base.items()}
    generator.manual_seed(seed)
    tuned = {name: tensor + torch.randn(tensor.shape, generator=generator) / 64 for name, tensor in base.items()}
    return {name: tensor.bfloat16().to(torch_dtype(task_type)) for name, tensor in tuned.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task_type", FLOATS)
@pytest.mark.parametrize("base_type", FLOATS)
def test_a_flipped_bit_of_the_base_is_found_or_harmless(tmp_path, base_type, task_type, method):
    if (task_type, method) == ("F64", "switch"):
        pytest.skip("float64 cannot be coded")
    base = write_folder(tmp_path / "base", tensors(base_type, task_type, 0))
    tasks = {f"t{seed}": write_folder(tmp_path / f"t{seed}", tensors(base_type, task_type, seed)) for seed in (1, 2)}
    emr.merge(base, tasks, tmp_path / "merged", **METHODS[method])
    merged = MergeFolder(tmp_path / "merged")
    expected = {(task, name): merged.tensor(task, name).data for task in tasks for name in merged.source(task).names()}
    path = base / "model.safetensors"
    content, start = path.read_bytes(), 8 + len(SafetensorsFile(path).header_bytes)
    noticed = 0
    for place in np.linspace(start, len(content) - 1, FLIPS, dtype=int):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            merged = MergeFolder(tmp_path / "merged")
            for (task, name), data in expected.items():
                assert np.array_equal(merged.tensor(task, name).data, data), (place, task, name)
        except HfExtError:
            noticed += 1
            with pytest.raises(HfExtError):
                emr.verify(tmp_path / "merged")
        else:
            emr.verify(tmp_path / "merged")
    assert noticed
