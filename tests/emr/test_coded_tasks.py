"""Coded tasks (`method="switch"`): each by itself, close to its own model, beside others of either method."""

from __future__ import annotations

import json
import re
import shutil
from copy import deepcopy
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from repeats import some
from safetensors.torch import save_file
from tiny_checkpoints import fine_tune, weights, write_folder
from tiny_merges import classifier, extracted, same_tensors, tensors_of
from tiny_models import assert_same_weights, bert
from transformers import AutoModelForSequenceClassification, BertModel

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, UnsavedChangesError, emr
from hf_ext.emr import coding, steps
from hf_ext.emr.modulators import TaskFile, TaskWriter

Auto = AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, base, tasks):
    """A merge of an elected task and of two coded ones."""
    place = tmp_path_factory.mktemp("mixed")
    emr.merge(base, {"trec": tasks["trec"]}, place / "elected", method="emr")
    emr.add_task(place / "elected", {task: tasks[task] for task in ("cr", "subj")}, place / "merged", method="switch", bits=6)
    return place / "merged"


def test_methods_stand_side_by_side(tmp_path, base, tasks):
    emr.merge(base, {task: tasks[task] for task in ("trec", "cr")}, tmp_path / "elected", method="emr")
    emr.add_task(tmp_path / "elected", {"subj": tasks["subj"]}, tmp_path / "mixed", method="switch", bits=6)
    emr.add_task(tmp_path / "mixed", {"sst2": tasks["sst2"]}, tmp_path / "all", method="emr", accept_conflicts=True)
    for task in ("trec", "cr", "subj"):
        first = tmp_path / ("mixed" if task == "subj" else "elected")
        same_tensors(*(extracted(folder, task, tmp_path / "out") for folder in (first, tmp_path / "all")))
    model = Auto.from_pretrained(tmp_path / "all")
    for task in ("subj", "sst2", "cr", "subj"):
        model.set_task(task)
        extracted(tmp_path / "all", task, tmp_path / task)
        assert_same_weights(model, Auto.from_pretrained(tmp_path / task))
    report = emr.report(tmp_path / "all")
    assert [task.step is None for task in report.tasks] == [True, True, False, True] and emr.verify(tmp_path / "all") > 0
    report.plot(tmp_path / "report.png")


def test_what_cannot_be_coded_is_one_error_and_nothing_is_written(tmp_path, monkeypatch, base, tasks, mixed):
    broken = classifier(2, 2)
    broken.bert.pooler.dense.bias.data[3] = torch.nan
    torch.manual_seed(99)
    stranger = classifier(2, 2)
    stranger.bert = BertModel(bert().config)
    for options, message in (
        ({"bits": -1}, "bits=-1 is out of range"),
        ({"bits": float("nan")}, "out of range"),
        ({"bits": "3"}, "bits='3' is out of range"),
        ({"size": "-3MB"}, "size='-3MB' is not a size"),
        ({"size": "0"}, "is not a size"),
        ({"bits": [1]}, r"bits=\[1\] is out of range"),
        ({"bits": Decimal(1)}, "out of range"),
        ({"bits": True}, "out of range"),
        ({"size": "20KB"}, "A folder of 20000 bytes is too small: .* Give at least"),
        ({"bits": 0.5, "size": "1MB"}, "bits and size are given; give one"),
        ({"method": "emr", "bits": 1}, "Only the method 'switch' takes bits"),
        ({"rescale": "paper"}, "Only the method 'emr' takes rescale"),
        ({"method": "dare"}, "choose one of: switch, emr"),
        ({"method": "emr", "rescale": "layer"}, "tensor, paper, tensor_mean"),
    ):
        with pytest.raises(CheckpointError, match=message):
            emr.merge(base, {"cr": tasks["cr"]}, tmp_path / "out", **options)
    with pytest.raises(CheckpointError, match="of task 'more' .* has values that are infinite .*, unlike in the base"):
        emr.add_task(mixed, {"more": broken}, tmp_path / "out", bits=4)
    with monkeypatch.context() as patch:
        patch.setattr(coding, "coarsened", None)  # both are refused before anything is coded
        few = "Tasks get too few bits: .*'more' .*Give them more"
        for task, bits, message in ((stranger, 4, "no fine-tune of this"), (tasks["cr"], 0.01, few)):
            with pytest.raises((CheckpointError, BaseModelError), match=message):
                emr.add_task(mixed, {"more": task}, tmp_path / "out", bits=bits)
    damaged = shutil.copytree(base, tmp_path / "damaged")
    tensors = tensors_of(damaged)
    tensors["pooler.dense.bias"][3] = torch.inf
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    for options in ({"method": "emr"}, {"bits": 4}):
        with pytest.raises(CheckpointError, match="of the base '.*damaged' has values that are infinite"):
            emr.merge(damaged, {"cr": tasks["cr"]}, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def coded_alone(place: Path, base: dict, tuned: dict, **options) -> emr.TaskReport:
    """Merges a task by itself, coded, into `out`."""
    for folder, tensors in (("base", base), ("task", tuned)):
        write_folder(place / folder, tensors)
    [task] = emr.merge(place / "base", {"t": place / "task"}, place / "out", method="switch", **options).tasks
    return task


@pytest.mark.parametrize("scale", [1e-42, 1e-33, 1e33])
def test_weights_of_any_size_are_coded(tmp_path, scale):
    base = {"up.weight": torch.randn(64, 64), "norm.weight": torch.ones(64)}
    scaled = [{name: tensor * scale for name, tensor in tensors.items()} for tensors in (base, fine_tune(base))]
    coded_alone(tmp_path, *scaled, bits=30, accept_conflicts=True)
    assert emr.verify(tmp_path / "out")


def test_a_task_that_changes_few_tensors_is_coded_by_those(tmp_path, monkeypatch):
    base = {f"layer.{i}.weight": torch.randn(128, 128) for i in range(9)}
    tuned = base | {"layer.0.weight": base["layer.0.weight"] + 0.01 * torch.randn(128, 1) * torch.randn(1, 128)}
    monkeypatch.setattr(steps, "FEW_VALUES", 0)
    monkeypatch.setattr(steps, "PLACES", 1)  # a tensor that did not change
    task = coded_alone(tmp_path, base, tuned, bits=0.5)
    assert task.relative < 0.5 and task.bits < 0.6


CHANGES = {
    "even": dict.fromkeys(range(24), 1e-3),
    "one layer": {0: 0.03} | dict.fromkeys(range(1, 24), 1e-4),
    "another layer": {22: 0.03},
    "one value": dict.fromkeys(range(24), 1e-3),
}


@pytest.mark.parametrize("change", CHANGES)
@some("dtype", [torch.bfloat16], [torch.float32, torch.float16], ids=str)
def test_what_is_written_takes_what_was_asked_whichever_layer_changed(tmp_path, monkeypatch, dtype, change):
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.up.weight": torch.randn(64, 256, generator=generator) / 8 for i in range(24)}
    tuned = {
        name: tensor + CHANGES[change].get(i, 0) * torch.randn(tensor.shape, generator=generator)
        for i, (name, tensor) in enumerate(base.items())
    }
    if change == "one value":
        tuned["layers.5.up.weight"][3, 4] = 6e4 if dtype == torch.float16 else 1e6
    for name, value in {"FEW_VALUES": 0, "PLACES": 8, "MOST_VALUES": 1 << 12}.items():
        monkeypatch.setattr(steps, name, value)
    base, tuned = ({name: tensor.to(dtype) for name, tensor in tensors.items()} for tensors in (base, tuned))
    assert coded_alone(tmp_path, base, tuned, bits=0.3, accept_conflicts=True).bits == pytest.approx(0.3, rel=0.05)
    moved, single = (tensors["layers.5.up.weight"] for tensors in (extracted(tmp_path / "out", "t", tmp_path / "plain"), tuned))
    assert change != "one value" or float(moved[3, 4]) == pytest.approx(float(single[3, 4]), rel=0.01)


def test_a_change_between_the_rows_of_the_sample_takes_the_bits_asked_for(tmp_path, monkeypatch):
    base = {f"layers.{i}.weight": torch.randn(256, 64) for i in range(4)}
    tuned = base | {"layers.2.weight": base["layers.2.weight"].clone()}
    tuned["layers.2.weight"][129:139] += 0.01 * torch.randn(10, 64)
    for name, value in {"FEW_VALUES": 0, "GLANCE": 128, "MOST_VALUES": 128}.items():
        monkeypatch.setattr(steps, name, value)
    assert coded_alone(tmp_path, base, tuned, bits=0.1).bits == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("bits", [2, 8])
def test_the_names_of_a_small_model_count(tmp_path, bits):
    assert coded_alone(tmp_path, weights(), fine_tune(weights()), bits=bits).bits == pytest.approx(bits, rel=0.05)


def test_a_task_that_takes_more_or_less_than_asked_in_any_step_is_coded_once(tmp_path, monkeypatch):
    counts, write = [], coding.CodedTask._write
    monkeypatch.setattr(coding.CodedTask, "_write", lambda task, planned: counts.append(len(planned)) or write(task, planned))
    base = weights(torch.bfloat16)

    def taken(bits: float) -> float:
        counts.clear()
        return coded_alone(tmp_path, base, fine_tune(base), bits=bits, accept_conflicts=True).bits

    for bits in (0.25, 12, 1.15 * taken(12)):
        assert abs(taken(bits) - bits) > 0.1 * bits and len(counts) == 1


def test_float64_is_refused(tmp_path):
    base = weights(torch.float64)
    with pytest.raises(CheckpointError, match="is of type float64, which cannot be coded. Save the model in float32"):
        coded_alone(tmp_path, base, fine_tune(base))


def test_a_folder_takes_at_most_the_size_that_was_asked_for(tmp_path):
    base = {"up.weight": torch.randn(512, 512), "norm.weight": torch.ones(512)}
    write_folder(tmp_path / "base", base)
    for seed in (1, 2):
        write_folder(tmp_path / f"t{seed}", fine_tune(base, seed))
    tasks = {f"t{i}": tmp_path / f"t{i}" for i in (1, 2)}

    def written(size: int | str) -> int:
        emr.merge(tmp_path / "base", tasks, tmp_path / "out", method="switch", size=size)
        return sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())

    assert 90_000 < written("100KB") <= 100_000
    assert written(40_000) <= 40_000  # with the card of the merge before
    with pytest.raises(CheckpointError, match="A folder of 2000 bytes is too small") as error:
        written(2000)
    advised = int(re.search(r"Give at least (\d+) bytes", str(error.value))[1])
    assert written(advised) <= advised < 30_000


def test_the_size_that_an_error_advises_is_enough(tmp_path):
    base = {f"layers.{i}.weight": torch.randn(128, 128).bfloat16() for i in range(4)}
    write_folder(tmp_path / "base", base)
    tasks = {name: write_folder(tmp_path / name, fine_tune(base, seed)) for seed, name in enumerate("abc", 1)}
    with pytest.raises(CheckpointError, match="is too small") as error:
        emr.merge(tmp_path / "base", tasks, tmp_path / "out", size=3000, accept_conflicts=True)
    advised = int(re.search(r"Give at least (\d+) bytes", str(error.value))[1])
    emr.merge(tmp_path / "base", tasks, tmp_path / "out", size=advised, accept_conflicts=True)


def forge(folder, task) -> None:
    """Damages the last coded change of a task's file, with the checksums of what is stored computed again."""
    file = TaskFile(folder / f"task-{task}" / "modulators.safetensors")
    writer, last = TaskWriter(other := file.path.with_name("other.safetensors")), max(file.coded)
    for key in file.entries:
        data = file.read(key).data.copy()
        if key == f"code/{last}":
            data[-8:] ^= 0x15
            data[28:36] = 0
            data[28:36] = np.frombuffer(xxhash.xxh3_64_intdigest(data).to_bytes(8, "little"), np.uint8)
        writer.add(key, replace(file.read(key), data=data))
    writer.finish(replace(file.record, checksums={}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["digests"][task] = TaskFile(other).digest
    (folder / "config.json").write_text(json.dumps(config))
    other.replace(file.path)


@pytest.mark.parametrize("active", ["cr", "trec"])
def test_a_change_that_cannot_be_decoded_leaves_the_weights_of_the_active_task(tmp_path, mixed, active):
    forge(shutil.copytree(mixed, tmp_path / "merged"), "subj")
    model = Auto.from_pretrained(tmp_path / "merged")
    model.set_task(active)
    before = deepcopy(model)
    with pytest.raises((CorruptFileError, BaseModelError), match="checksum mismatch"):
        model.set_task("subj")
    assert_same_weights(model, before)
    for task in ("cr", "trec"):
        model.set_task(task)
    with open(tmp_path / "merged/task-cr/modulators.safetensors", "r+b") as file:  # the mapped file: nothing can be restored
        model.set_task("cr")
        file.seek(-8, 2)
        file.write(bytes(8))
    with pytest.raises(CorruptFileError):
        model.set_task("subj", discard_changes=True)
    with pytest.raises((CorruptFileError, UnsavedChangesError)):
        model.set_task("cr")
    model.set_task("trec", discard_changes=True)
    assert_same_weights(model, Auto.from_pretrained(tmp_path / "merged"))


# ---- removing a task -------------------------------------------------------------------------------------------------


@some("method", ["mixed"], ["emr", "switch"])
def test_the_tasks_that_stay_keep_all_bits(tmp_path, base, tasks, method):
    same = {"cr": tasks["cr"], "trec": tasks["trec"], "again": tasks["cr"]}  # a head that two of three share
    emr.merge(base, same, tmp_path / "merged", **{"bits": 4} if method == "switch" else {"method": "emr"})
    if method == "mixed":
        emr.add_task(tmp_path / "merged", {"subj": tasks["subj"]}, tmp_path / "more", method="switch", bits=4)
    whole = tmp_path / ("more" if method == "mixed" else "merged")
    names = [task.task for task in emr.report(whole).tasks]
    model = Auto.from_pretrained(whole)
    for gone in names:
        report = emr.remove_task(whole, gone, tmp_path / "fewer")
        assert [task.task for task in report.tasks] == [task for task in names if task != gone]
        assert report.bytes < emr.report(whole).bytes and emr.verify(tmp_path / "fewer")
        assert not (tmp_path / "fewer" / f"task-{gone}" / "modulators.safetensors").exists()
        for task in report.tasks:
            same_tensors(*(extracted(folder, task.task, tmp_path / "out") for folder in (whole, tmp_path / "fewer")))
        first, *_, last = [task.task for task in report.tasks]
        loaded = Auto.from_pretrained(tmp_path / "fewer")
        assert loaded.active_task == first and loaded.config.num_labels == (6 if first == "trec" else 2)
        loaded.set_task(last)
        model.set_task(gone)  # the old folder is still there
    with pytest.raises(CheckpointError, match="There is no task 'x'"):
        emr.remove_task(whole, "x", tmp_path / "none")


def test_no_merge_is_written_from_a_base_that_changed(tmp_path):
    base = {"up.weight": torch.randn(64, 64), "norm.weight": torch.ones(64)}
    coded_alone(tmp_path, base, fine_tune(base), bits=8)
    base["up.weight"][10, 0] += 1  # a value outside the fingerprint
    write_folder(tmp_path / "base", base)
    for change in (
        lambda: emr.rename_task(tmp_path / "out", "t", "u", tmp_path / "new"),
        lambda: emr.add_task(tmp_path / "out", {"u": tmp_path / "task"}, tmp_path / "new"),
        lambda: emr.verify(tmp_path / "out"),
    ):
        with pytest.raises(BaseModelError, match="'up.weight' of the base .* has changed"):
            change()
    assert not (tmp_path / "new").exists()


def test_a_renamed_task_keeps_all_bits_and_its_place(tmp_path, mixed):
    for name, place in (("trec", 0), ("subj", 2)):  # an elected task, which loads first, and a coded one
        report = emr.rename_task(mixed, name, "new", tmp_path / "renamed")
        tasks = [task.task for task in emr.report(mixed).tasks]
        assert [task.task for task in report.tasks] == [*tasks[:place], "new", *tasks[place + 1 :]]
        assert emr.verify(tmp_path / "renamed") and not (tmp_path / f"renamed/task-{name}").exists()
        for task in tasks:
            renamed = extracted(tmp_path / "renamed", "new" if task == name else task, tmp_path / "out")
            same_tensors(renamed, extracted(mixed, task, tmp_path / "out"))
        assert_same_weights(Auto.from_pretrained(tmp_path / "renamed/task-new"), Auto.from_pretrained(mixed / f"task-{name}"))
    for old, new, message in (("x", "y", "no task 'x'"), ("cr", "subj", "'subj' already"), ("cr", "a/b", "cannot be the name")):
        with pytest.raises(CheckpointError, match=message):
            emr.rename_task(mixed, old, new, tmp_path / "none")


def test_the_last_task_and_a_task_in_use(tmp_path, base, tasks):
    emr.merge(base, {task: tasks[task] for task in ("cr", "subj")}, tmp_path / "two", method="switch", bits=4)
    model = Auto.from_pretrained(tmp_path / "two")
    emr.remove_task(tmp_path / "two", "cr", tmp_path / "one")
    before = deepcopy(model)
    with pytest.raises(CheckpointError, match="'subj' is the only task"):
        emr.remove_task(tmp_path / "one", "subj", tmp_path / "none")
    shutil.rmtree(tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "two")  # the model's folder, without its active task
    for use in (lambda: model.set_task("subj"), lambda: model.save_pretrained(tmp_path / "copy")):
        with pytest.raises((CheckpointError, CorruptFileError), match="another merge|is missing"):
            use()
    assert_same_weights(model, before)


def test_weights_that_no_task_takes_any_more_are_free_for_the_next(tmp_path):
    base = weights()
    write_folder(tmp_path / "base", base)
    for seed, task in enumerate(("a", "b")):
        write_folder(tmp_path / task, fine_tune(base, seed))
    emr.merge(tmp_path / "base", {"a": tmp_path / "a", "still": tmp_path / "base"}, tmp_path / "two", method="emr")
    emr.remove_task(tmp_path / "two", "a", tmp_path / "one")
    emr.add_task(tmp_path / "one", {"b": tmp_path / "b"}, tmp_path / "more")
    same_tensors(extracted(tmp_path / "more", "b", tmp_path / "out"), tensors_of(tmp_path / "b"))
