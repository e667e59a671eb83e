"""On import, an unsupported version is an error with the command that replaces it; an untested newer one is one warning."""

import os
import re
import subprocess
import sys
import warnings
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import hf_ext
from hf_ext.integration.versions import check, require

ROOT = Path(__file__).parents[1]
LINES = Path(hf_ext.__file__).with_name("requirements.txt").read_text().splitlines()
NEEDED = {Requirement(need).name: need.strip() for need in (line.partition("#")[0] for line in LINES) if need}
TESTED = {name: line.partition("tested up to ")[2] for name in NEEDED for line in LINES if line.startswith(name)}
COLUMNS = sorted(path.name for path in ROOT.glob("constraints/*.txt"))


def install(folder, package, version):
    """Writes what pip leaves of a package beside its code."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def python(folder, *line) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(folder), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, *line], env=environment, capture_output=True, text=True, timeout=120)


def pinned(name) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


@pytest.mark.parametrize(("package", "version"), [("transformers", "4.57.6"), ("peft", "0.17.0")])
def test_an_unsupported_version_is_an_early_error(tmp_path, package, version):
    install(tmp_path, package, version)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise SystemExit('it was imported')")
    result = python(tmp_path, "-c", "import hf_ext")
    need = NEEDED[package]
    assert result.returncode == 1 and result.stdout == ""
    error = f"ImportError: hf_ext requires {need} (found {version}): pip install '{need}'"
    assert result.stderr.splitlines()[-1] == error


def test_one_error_names_all_that_are_too_old(tmp_path, monkeypatch):
    install(tmp_path, "torch", "1.13.0+cu117")
    install(tmp_path, "huggingface_hub", "0.36.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as error:
        check.__wrapped__()
    for package, version in (("torch", "1.13.0+cu117"), ("huggingface_hub", "0.36.0")):
        assert f"{NEEDED[package]} (found {version})" in str(error.value)
    assert str(error.value).endswith(f": pip install '{NEEDED['torch']}' '{NEEDED['huggingface_hub']}'")


def test_a_version_newer_than_tested_is_one_warning(tmp_path):
    for package, version in TESTED.items():
        if version:
            install(tmp_path, package, version)
    install(tmp_path / "newer", "transformers", "6.1.0")
    install(tmp_path / "newer", "peft", "0.99.0")
    code = "import hf_ext, importlib; importlib.reload(hf_ext); hf_ext.errors"
    assert python(tmp_path, "-W", "error", "-c", code).returncode == 0
    result = python(tmp_path / "newer", "-c", f"import sys; sys.path.insert(2, {str(tmp_path)!r}); {code}")
    assert result.returncode == 0, result.stderr
    warning = (
        f"UserWarning: hf_ext has not been tested with transformers 6.1.0 (tested up to {TESTED['transformers']}), "
        f"peft 0.99.0 (tested up to {TESTED['peft']})."
    )
    assert result.stderr.count("UserWarning") == 1 and warning in result.stderr


def test_storage_needs_neither_transformers_nor_peft_installed(monkeypatch):
    def version(package):
        if package in ("transformers", "peft", "accelerate", "torch"):
            raise metadata.PackageNotFoundError(package)
        return real(package)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    check.__wrapped__()
    with pytest.raises(ImportError, match=r"Merging requires transformers>=5.16.1 \(found none\): pip install"):
        require("Merging", "transformers>=5.16.1")


def test_a_feature_names_the_newer_version_that_it_needs(tmp_path, monkeypatch):
    install(tmp_path, "transformers", "5.6.0")
    monkeypatch.syspath_prepend(tmp_path)
    check.__wrapped__()
    require("Storage", "transformers>=5.6", "packaging>=22")
    with pytest.raises(ImportError) as error:
        require("Loading", "transformers>=5.16.1", "packaging>=22")
    text = "Loading requires transformers>=5.16.1 (found 5.6.0): pip install 'transformers>=5.16.1'"
    assert str(error.value) == text


@pytest.mark.parametrize("version", ["2.99.0.dev20300101+cpu", "2.99.0a0+1234abc", "2.11.0a0+nv26.3", "2.11.0+a.fork", "fork"])
def test_builds_of_a_version_in_the_range_are_in_the_range(tmp_path, monkeypatch, version):
    install(tmp_path, "torch", version)
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.version("torch") == version
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check.__wrapped__()


def test_the_command_reports_it_in_one_line(tmp_path):
    install(tmp_path, "peft", "0.17.0")
    result = python(tmp_path, "-m", "hf_ext.cli", "verify", "nothing")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("hf-ext: hf_ext requires peft") and "pip install 'peft" in result.stderr


def test_the_package_is_installed_with_what_is_checked():
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["options"]["install_requires"] == "file: hf_ext/requirements.txt"
    assert "requirements.txt" in settings["options.package_data"]["hf_ext"]


def test_the_newest_tested_versions_are_those_of_the_tests():
    """`make test-newest` may have tested a newer PyTorch than that of constraints.txt."""
    versions = pinned("constraints.txt") | {"torch": TESTED["torch"]}
    assert {name: version for name, version in TESTED.items() if version} == {
        name: versions[name] for name, version in TESTED.items() if version
    }
    assert Version(TESTED["torch"]) >= Version(pinned("constraints.txt")["torch"])
    assert {"transformers", "peft", "torch", "huggingface_hub", "accelerate"} <= {name for name in TESTED if TESTED[name]}


@pytest.mark.parametrize("name", ["constraints.txt", *[f"constraints/{name}" for name in COLUMNS]])
def test_the_versions_that_tests_run_with_are_in_the_range(name):
    for package, version in pinned(name).items():
        if package in NEEDED:
            assert Requirement(NEEDED[package]).specifier.contains(version), package


def test_the_oldest_tested_versions_are_the_lower_bounds():
    for package, version in pinned("constraints/oldest.txt").items():
        if package in NEEDED and package != "transformers":  # older ones run a part: docs/compatibility.md
            assert Version(version) == Version(re.search(r">=([\d.]+)", NEEDED[package])[1]), package
