"""Whether this package works with those that are installed. It is asked before any of them is imported, so that another version
is told by its name, and not by whatever fails first in it."""

from __future__ import annotations

import shlex
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version


def check() -> None:
    """Compares what is installed with requirements.txt. A package that is missing is left to whoever imports it.

    Raises:
        ImportError: a package is outside the range.
    """
    lines = Path(__file__).parents[1].joinpath("requirements.txt").read_text(encoding="utf-8").splitlines()
    other = {}
    for line in lines:
        if not line.startswith("#"):
            need = Requirement(line)
            found = _installed(need.name)
            if found and not need.specifier.contains(_release(found), prereleases=True):
                other[line] = found
    if other:
        told = " and ".join(f"{line} (found {found})" for line, found in other.items())
        raise ImportError(f"hf_ext needs {told}: pip install {shlex.join(other)}")


def _release(version: str) -> str:
    """What a version is a build of, or is to become: vendors ship 2.11.0a0+nv26.3, whose sources are nearly those of 2.11."""
    try:
        return Version(version).base_version
    except InvalidVersion:
        return version


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


