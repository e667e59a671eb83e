"""Checks the installed versions before any other library is imported, so that one clear error names an unsupported one."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

TESTED = "tested up to "  # in the comment of a line of requirements.txt


@cache
def check() -> None:
    """Compares the installed packages with requirements.txt, once per process. A missing package is not an error here: storage
    needs neither Transformers nor PEFT. Raises ImportError if a package is too old."""
    too_old, untested = {}, []
    for name, (need, tested) in requirements().items():
        version = installed(name)
        if version is not None and _is_older(version, Requirement(need)):
            too_old[need] = version
        elif is_untested(name):
            untested.append(f"{name} {version} ({TESTED}{tested})")
    if too_old:
        message = _upgrade("hf_ext", too_old)
        if "hf-ext" in [Path(word).stem for word in sys.orig_argv[:2]] or sys.orig_argv[1:3] == ["-m", "hf_ext.cli"]:
            sys.exit(f"hf-ext: {message}")  # the command line, which cannot start: one line instead of a traceback
        raise ImportError(message)
    if untested:
        warnings.warn(f"hf_ext has not been tested with {', '.join(untested)}.", UserWarning, stacklevel=2)


@cache
def requirements() -> dict[str, tuple[str, str | None]]:
    """Returns the requirements of requirements.txt by package, each with the newest tested version where the file has one."""
    lines = Path(__file__).parents[1].joinpath("requirements.txt").read_text(encoding="utf-8").splitlines()
    needs = ((need.strip(), comment.strip()) for need, _, comment in (line.partition("#") for line in lines) if need)
    return {
        Requirement(need).name: (need, comment.removeprefix(TESTED) if comment.startswith(TESTED) else None)
        for need, comment in needs
    }


def is_untested(package: str) -> bool:
    """Checks whether the installed version of a package is newer than the newest tested one."""
    version, tested = installed(package), requirements()[package][1]
    release = version and _release(version)
    return bool(release and tested and release > Version(tested))


def require(feature: str, *needs: str, advice: str = "") -> None:
    """Checks the versions that one feature needs, where it needs newer ones than the package as a whole. Raises ImportError if
    a package is missing or too old. `advice` is another way to the goal, for the error."""
    lacking = {}
    for need in needs:
        requirement = Requirement(need)
        version = installed(requirement.name)
        if version is None or _is_older(version, requirement):
            lacking[need] = version
    if lacking:
        raise ImportError(f"{_upgrade(feature, lacking)}{'. Or: ' if advice else ''}{advice}")


def installed(package: str) -> str | None:
    """Returns the installed version of a package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_older(version: str, requirement: Requirement) -> bool:
    release = _release(version)
    lower = SpecifierSet(",".join(str(spec) for spec in requirement.specifier if spec.operator == ">="))
    return release is not None and not lower.contains(release, prereleases=True)


def _release(version: str) -> Version | None:
    """Returns the release that a build belongs to: NVIDIA's 2.11.0a0+nv26.3 has nearly the sources of 2.11.0."""
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:  # a fork's own scheme: nothing to compare
        return None


def _upgrade(feature: str, needs: Mapping[str, str | None]) -> str:
    listed = " and ".join(f"{need} (found {version or 'none'})" for need, version in needs.items())
    return f"{feature} requires {listed}: pip install {shlex.join(needs)}"
