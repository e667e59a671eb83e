"""Merges of every format version give the weights they gave when they were written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_checkpoints import MERGES, merge_tensors, sha256, write_folder

from hf_ext import emr
from hf_ext.emr.modulators import SEAL

WEIGHTS = {path.parent: json.loads(path.read_text()) for path in sorted(MERGES.glob("v*/weights.json"))}


@pytest.mark.parametrize(
    ("folder", "task"),
    [(folder, task) for folder in WEIGHTS for task in WEIGHTS[folder]],
    ids=lambda value: getattr(value, "name", value),
)
def test_merges_of_every_version_give_the_weights_they_gave(folder: Path, task: str, tmp_path: Path) -> None:
    base = write_folder(tmp_path / "base", merge_tensors(int(folder.name[1:]))[0])
    emr.extract(folder, task, tmp_path / "out", base=base)
    assert sha256(tmp_path / "out" / "model.safetensors") == WEIGHTS[folder][task]


def test_there_is_a_merge_of_every_version() -> None:
    assert [folder.name for folder in WEIGHTS] == [f"v{version}" for version in range(1, SEAL.version + 1)]
