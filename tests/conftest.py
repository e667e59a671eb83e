"""All tests run offline; those of the Hub talk to `local_hub` from processes of their own."""

import gc
import os
from tempfile import TemporaryDirectory

import processes  # noqa: F401  # makes forks safe
import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


def pytest_addoption(parser) -> None:
    parser.addoption("--sglang-reader", metavar="FILE", help="SGLang's local_checkpoint.py, to read what is published for it")


@pytest.fixture
def no_progress_bars(monkeypatch):
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", False)


def pytest_configure(config) -> None:
    if "TINY_MODELS" not in os.environ:  # workers and the processes that tests start have it from here
        shared = TemporaryDirectory(prefix="tiny-models-")
        os.environ["TINY_MODELS"] = shared.name
        config.add_cleanup(shared.cleanup)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: no collection needs to look through it
