"""Coded tasks (`method="switch"`): each by itself, close to its own model, beside others of either method."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import contents
from tiny_merges import same_tensors, tensors_of, write_tasks
from tiny_models import MODELS, assert_same_weights, perturb
from transformers import AutoModelForSequenceClassification

from hf_ext import emr

Auto = AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def coded(tmp_path_factory, folders):
    """A merge of three coded tasks."""
    merged = tmp_path_factory.mktemp("coded") / "merged"
    emr.merge(folders[0], {task: folders[1][task] for task in ("trec", "cr", "subj")}, merged, method="switch", bits=6)
    return merged


def extracted(merged, task, out) -> dict[str, torch.Tensor]:
    emr.extract(merged, task, out, overwrite=True)
    return tensors_of(out)


def away(tensors, single, base) -> float:
    """How far tensors are from those of the single model, relative to its own change of the base's."""
    pairs = [(tensors[name].double(), single[name].double(), base[name].double()) for name in base if name in single]
    pairs = [pair for pair in pairs if pair[1].shape == pair[2].shape]
    off, moved = (sum(float((pair[1] - pair[i]).square().sum()) for pair in pairs) for i in (0, 2))
    return (off / moved) ** 0.5


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_coded_and_comes_back_close(tmp_path, name):
    model = MODELS[name].build()
    model.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        perturb(model, seed).save_pretrained(tmp_path / f"t{seed}", max_shard_size="40KB" if seed == 2 else "50GB")
    tasks = {"one": tmp_path / "t1", "two": tmp_path / "t2"}
    report = emr.merge(tmp_path / "base", tasks, tmp_path / "merged", max_shard_size="50KB", method="switch", keep=0.9)
    base = tensors_of(tmp_path / "base")
    for task, folder in tasks.items():
        found, single = extracted(tmp_path / "merged", task, tmp_path / "out"), tensors_of(folder)
        assert {name: (t.shape, t.dtype) for name, t in found.items()} == {
            name: (t.shape, t.dtype) for name, t in single.items()
        }
        assert away(found, single, base) < 0.5
    assert all(task.relative < 0.5 and 0 < task.density <= 1 and task.bits > 0 and task.step for task in report.tasks)


def test_the_tasks_switch_save_and_are_checked(tmp_path, folders, coded):
    model = Auto.from_pretrained(coded)
    for task in ("cr", "subj", "trec"):
        model.set_task(task)
        extracted(coded, task, tmp_path / task)
        assert_same_weights(model, Auto.from_pretrained(tmp_path / task))
    model.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(coded) and emr.verify(tmp_path / "again") > 0
    with torch.no_grad():
        model.bert.pooler.dense.weight += 1
    with pytest.raises(RuntimeError, match="was changed since"):
        model.set_task("cr")
    model.set_task("cr", discard_changes=True)
    assert_same_weights(model, Auto.from_pretrained(tmp_path / "cr"))


def test_the_figures_are_those_of_the_weights(tmp_path, folders, coded):
    base = {f"bert.{name}": tensor for name, tensor in tensors_of(folders[0]).items()}
    for task in emr.report(coded).tasks:
        found, single = extracted(coded, task.task, tmp_path / "out"), tensors_of(folders[1][task.task])
        assert task.relative == pytest.approx(away(found, single, base), rel=1e-3)
        vectors = [
            torch.cat([(part[name].double() - base[name].double()).reshape(-1) for name in base]) for part in (found, single)
        ]
        assert task.cosine == pytest.approx(float(torch.cosine_similarity(*vectors, 0)), rel=1e-3)
        assert all(torch.equal(found[name], single[name]) for name in single if name not in base)  # the head


def test_methods_stand_side_by_side(tmp_path, folders):
    base, tasks = folders
    emr.merge(base, {task: tasks[task] for task in ("trec", "cr")}, tmp_path / "elected")
    emr.add_task(tmp_path / "elected", "subj", tasks["subj"], tmp_path / "mixed", method="switch", bits=6)
    emr.add_task(tmp_path / "mixed", "sst2", tasks["sst2"], tmp_path / "all", method="emr", accept_conflicts=True)
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
