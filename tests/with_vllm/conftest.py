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
    """A base, fine-tunes of it, what the package makes of them, and models that cannot be served."""
    from peft import get_peft_model
    from servers import write_models
    from tiny_adapters import moved

    from hf_ext import PissaConfig, fm_delta

    folder = tmp_path_factory.mktemp("vllm")
    base = write_models(folder)
    adapted = moved(get_peft_model(base, PissaConfig(r=4, lora_alpha=4, target_modules=["q_proj", "down_proj"])))
    adapted.save_pretrained(folder / "pissa")
    fm_delta.extract_lora(folder / "two", folder / "base", folder / "extracted", rank=4)
    return folder


@pytest.fixture(scope="session")
def expected(folder) -> dict[str, dict]:
    """Digests and answers of the plain models, by vLLM alone."""
    from servers import MERGED, PROMPT, TASKS
    from vllm_server import OPTIONS

    models = ["base", *TASKS, "half", *(f"merged-{task}" for task in MERGED)]
    script = [sys.executable, str(Path(__file__).with_name("reference.py")), str(folder), PROMPT, *models]
    environment = os.environ | OPTIONS | {"VLLM_PLUGINS": ""}
    subprocess.run(script, env=environment, timeout=600, check=True)
    return json.loads((folder / "expected.json").read_text())
