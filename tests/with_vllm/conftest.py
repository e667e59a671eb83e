"""These tests run where vLLM is installed: `make test-vllm`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    from serving import make_models

    folder = tmp_path_factory.mktemp("vllm")
    make_models(folder)
    return folder


@pytest.fixture(scope="session")
def expected(folder) -> dict[str, dict]:
    """Digests and answers of the plain models, by vLLM alone."""
    from serving import OPTIONS, PROMPT, TASKS

    models = ["base", *TASKS, "half", *(f"merged-{task}" for task in TASKS)]
    script = [sys.executable, str(Path(__file__).with_name("reference.py")), str(folder), PROMPT, *models]
    environment = os.environ | OPTIONS | {"VLLM_PLUGINS": ""}
    subprocess.run(script, env=environment, timeout=600, check=True)
    return json.loads((folder / "expected.json").read_text())
