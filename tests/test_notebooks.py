"""The notebooks run, and show what they write."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="belongs to the extra `slow`")
NotebookClient = pytest.importorskip("nbclient").NotebookClient
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHORTER = {
    "emr": {"STEPS": 2},
    "fm_delta": {"STEPS": 2},
    "pissa": {"STEPS": 2},
    "trans_lora": {"SAMPLES": 16, "EPOCHS": 1},
    "uni_med": {"STEPS": 4},
}

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(notebook: nbformat.NotebookNode, tag: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def test_each_method_has_one():
    assert {path.stem for path in NOTEBOOKS} == {"emr", "fm_delta", "pissa", "trans_lora", "uni_med"}


@by_name
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    [parameters] = cells(notebook, "parameters")
    for name, value in SHORTER[path.stem].items():
        parameters.source, changed = re.subn(rf"^{name} = .*$", f"{name} = {value}", parameters.source, flags=re.MULTILINE)
        assert changed
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


@by_name
def test_a_notebook_shows_the_outputs_of_a_whole_run(path):
    notebook = nbformat.read(path, as_version=4)
    [install] = cells(notebook, "skip-execution")
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell is not install]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = nbformat.writes(notebook)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert os.path.expanduser("~") not in text and "site-packages" not in text
