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
