"""A base and four fine-tunes, which tests only read."""

from pathlib import Path

import pytest
from tiny_merges import write_tasks


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> dict[str, Path]:
    return write_tasks(tmp_path_factory.mktemp("tasks"))[1]


@pytest.fixture(scope="session")
def base(tasks) -> Path:
    return tasks["cr"].parent / "base"
