"""The pictures of all reports have one style: each panel has a title, and its axes have names and units."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_ext.emr.reports import MergeReport, TaskReport
from hf_ext.fm_delta.reports import CheckpointReport, TensorReport

TENSORS = [
    TensorReport(f"model.layers.{i}.self_attn.q_proj.weight", "attention", "delta", "BF16", (8, 8), 64, 128, 20 + i)
    for i in range(3)
]
PICTURES = {
    "merge": (
        MergeReport([TaskReport("cola", 100, 1.0, 0.9, 1.1, 0.6, 0.1, 0.2, 0.3, 0.95, 0.6)], 1000),
        [
            "Cosine to the single model",
            "L2 distance",
            "% of the task vector",
            "Masked or changed alone",
            "% of all parameters",
            "cola",
        ],
    ),
    "checkpoint": (
        CheckpointReport("base", None, TENSORS, original_bytes=400, compressed_bytes=80),
        ["Size of each layer: 0.00 MB of 0.00 MB (20.0 %)", "layer", "MB", "original", "attention, compressed"],
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_titles_units_and_legends(tmp_path: Path, name: str):
    report, wanted = PICTURES[name]
    report.plot(tmp_path / "picture.svg")
    written = re.findall(r"<!-- (.*?) -->", (tmp_path / "picture.svg").read_text(encoding="utf-8"))
    assert set(wanted) <= set(written)
    report.plot(tmp_path / f"{name}.png")
