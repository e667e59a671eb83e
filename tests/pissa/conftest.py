"""PiSSA requires PEFT 0.21. With an older one, the tests of its adapters are not collected."""

from pathlib import Path

import peft
import pytest
from packaging.version import Version
from tiny_adapters import small_llama

collect_ignore_glob = [] if Version(peft.__version__) >= Version("0.21") else ["test_*pissa*.py"]


@pytest.fixture(scope="session")
def llama_base(tmp_path_factory) -> Path:
    """The folder of a Llama, which no test changes."""
    small_llama().save_pretrained(folder := tmp_path_factory.mktemp("llama"))
    return folder
