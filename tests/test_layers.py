"""The floors of the package, and what each may import: the contracts stand in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_package_imports_only_what_stands_below_it():
    pytest.importorskip("importlinter")
    # In a process of its own: it configures logging for all.
    code = "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(config_filename='pyproject.toml', no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_at_level_1_the_codec_works_without_torch_and_the_hub():
    code = """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "peft", "accelerate", "huggingface_hub", "filelock", "jinja2"]))
import numpy as np
from hf_ext.storage import RawTensor, apply_raw, decode_raw, encode_raw
for dtype in ("BF16", "F8_E4M3", "I32"):
    old = np.random.default_rng(0).integers(0, 64, 1 << 18, np.uint8)
    new, shape = old.copy(), (64, old.size // 64 // {"BF16": 2, "F8_E4M3": 1, "I32": 4}[dtype])
    new[::998] += 1
    payload = encode_raw(RawTensor(dtype, shape, new), RawTensor(dtype, shape, old), level=1)
    assert len(payload) < 1000
    assert (decode_raw(payload, RawTensor(dtype, shape, old)).data == new).all()
    apply_raw(payload, RawTensor(dtype, shape, old))
    assert (old == new).all()
try:
    encode_raw(RawTensor("BF16", (64, 2048), new), RawTensor("BF16", (64, 2048), old), level=2)
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MissingDependencyError") and "pip install torch, or compress with level=1" in done.stdout
