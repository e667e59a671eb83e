"""Merges that were written once and must always give the same weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hf_ext import emr

GOLDEN = Path(__file__).parent / "golden"

# SHA-256 of the weights of each task: float32 and bfloat16, untouched rows, longer and shorter vocabularies, heads of their
# own, an integer.
WEIGHTS = {
    "v1": {
        "plain": "14bb40bb9b8ddd82263a836648a270d3febcac90b061215e225240df64ebe7af",
        "longer": "597712aba7eb5c42109c813c7957e2bc84b2a79eeb36135feaf5e5cdde2fc8cf",
        "shorter": "2648e27ff99ae4861a744cc838e388ab427d6bc729d737ff9d4f9fa8da020b4b",
        "alone": "b5d8b9d70a504c2679c8d252409f2fe39b7af0c4f0b0b9a0a073f579b2596094",
    }
}


@pytest.mark.parametrize("version, task", [(version, task) for version in WEIGHTS for task in WEIGHTS[version]])
def test_merges_of_every_version_give_the_weights_they_gave(version: str, task: str, tmp_path: Path) -> None:
    emr.extract(GOLDEN / version, task, tmp_path / "out")
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == WEIGHTS[version][task]
