"""A package of another version is told on import, by name, with what to do."""

import os
import re
import subprocess
import sys
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hf_ext
from hf_ext.integration.versions import check

ROOT = Path(__file__).parents[1]
LINES = Path(hf_ext.__file__).with_name("requirements.txt").read_text().splitlines()
NEEDED = {Requirement(line).name: line for line in LINES if not line.startswith("#")}


def install(folder, package, version):
    """What pip leaves of a package beside its code."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def imported(folder) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(folder), *sys.path])
    line = [sys.executable, "-c", "import hf_ext"]
    return subprocess.run(line, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("package", "version"), [("transformers", "4.57.6"), ("peft", "0.17.0"), ("transformers", "6.0.0")])
def test_another_version_is_told_by_name_before_anything_is_imported(tmp_path, package, version):
    install(tmp_path, package, version)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise SystemExit('it was imported')")
    result = imported(tmp_path)
    need = NEEDED[package]
    assert result.returncode == 1 and result.stdout == ""
    told = f"ImportError: hf_ext needs {need} (found {version}): pip install '{need}'"
    assert result.stderr.splitlines()[-1] == told


def test_all_that_do_not_fit_are_told_at_once(tmp_path, monkeypatch):
    install(tmp_path, "torch", "1.13.0+cu117")
    install(tmp_path, "huggingface_hub", "0.36.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as told:
        check()
    for package, found in (("torch", "1.13.0+cu117"), ("huggingface_hub", "0.36.0")):
        assert f"{NEEDED[package]} (found {found})" in str(told.value)
    assert str(told.value).endswith(f": pip install '{NEEDED['torch']}' '{NEEDED['huggingface_hub']}'")


@pytest.mark.parametrize("version", ["2.99.0", "2.99.0.dev20300101+cpu", "2.99.0a0+1234abc", "2.11.0a0+nv26.3"])
def test_builds_of_a_version_in_the_range_are_in_the_range(tmp_path, monkeypatch, version):
    install(tmp_path, "torch", version)
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.version("torch") == version
    check()


def test_the_command_tells_it_in_one_line(tmp_path):
    install(tmp_path, "peft", "0.17.0")
    line = [sys.executable, "-m", "hf_ext", "verify", "nothing"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    result = subprocess.run(line, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("hf-ext: hf_ext needs peft") and "pip install 'peft" in result.stderr


def constraints(name) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_package_is_installed_with_what_is_checked():
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["options"]["install_requires"] == "file: hf_ext/requirements.txt"
    assert settings["options.package_data"]["hf_ext"] == "requirements.txt"


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_the_versions_that_tests_run_with_are_in_the_range(name):
    pinned = constraints(name)
    for package in ("transformers", "peft", "torch", "huggingface_hub"):
        assert Requirement(NEEDED[package]).specifier.contains(pinned[package])


def test_the_oldest_versions_that_tests_run_with_are_the_lower_ends():
    pinned = constraints("constraints-oldest.txt")
    for package in ("transformers", "peft", "torch", "huggingface_hub"):
        lowest = re.search(r">=([\d.]+)", NEEDED[package])[1]
        assert pinned[package] == lowest or pinned[package].removesuffix(".0") == lowest
