"""Draws no reports of transfers where no fixture of a module asks for one: a picture takes as long as all the training."""

import sys

import pytest


@pytest.fixture(autouse=True)
def without_matplotlib(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
