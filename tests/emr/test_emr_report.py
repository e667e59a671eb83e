"""The report of a merge is what a comparison of the weights gives."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from tiny_checkpoints import edit_settings
from tiny_merges import METHODS, extracted, tensors_of

from hf_ext import HfExtError, emr


@pytest.fixture(scope="module", params=METHODS)
def merge(tmp_path_factory, request, base, tasks):
    folder = tmp_path_factory.mktemp("merge")
    return folder, request.param, emr.merge(base, tasks, folder / "merged", **METHODS[request.param])


def test_the_figures_are_those_of_the_weights(merge, tmp_path, base, tasks):
    folder, method, report = merge
    prior = {f"bert.{name}": tensor for name, tensor in tensors_of(base).items()}

    def vector(tensors):
        return torch.cat([(tensors[name].double() - prior[name].double()).reshape(-1) for name in sorted(prior)])

    for task in report.tasks:
        tuned, merged = tensors_of(tasks[task.task]), extracted(folder / "merged", task.task, tmp_path / task.task)
        single, given = vector(tuned), vector(merged)
        assert all(torch.equal(merged[name], tuned[name]) for name in tuned.keys() - prior.keys())  # the head
        assert task.parameters == single.numel()
        assert math.isclose(task.distance, (single - given).norm(), rel_tol=1e-3)
        assert math.isclose(task.relative, (single - given).norm() / single.norm(), rel_tol=1e-3)
        assert math.isclose(task.cosine, torch.cosine_similarity(single, given, 0), rel_tol=1e-4)
        if method == "emr":
            assert math.isclose(task.density, (given != 0).double().mean(), rel_tol=1e-3)
            assert math.isclose(task.conflicts, 1 - (given != 0).sum() / (single != 0).sum(), rel_tol=1e-2)
            assert task.least_scale <= task.scale <= task.largest_scale
    (folder / "merged/report.png").write_bytes(b"0" * 999)
    own = [path for path in (folder / "merged").rglob("*") if path.is_file() and path.name not in ("README.md", "report.png")]
    size = sum(path.stat().st_size for path in own)
    assert report.bytes == emr.report(folder / "merged").bytes == size
    assert f"{size / 1e6:.2f} MB" in report.summary()
    assert f"Together they take {size / 1e6:.2f} MB." in (folder / "merged/README.md").read_text()


def test_the_report_is_a_table_a_dictionary_and_a_picture(merge, tmp_path):
    *_, report = merge
    lines = str(report).splitlines()
    assert len(lines) == 2 + len(report.tasks) + 2 and lines[2].startswith("trec ")
    assert report.to_dict()["tasks"][1]["task"] == "cr"
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(HfExtError, match="could not be written"):
        report.plot(tmp_path / "none" / "report.png")


def test_the_report_needs_no_base(merge, tmp_path):
    folder, _, report = merge
    merged = shutil.copytree(folder / "merged", tmp_path / "merged")
    edit_settings(merged, base="gone")
    assert emr.report(merged).tasks == report.tasks
