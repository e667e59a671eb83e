"""Checks the installed versions before any other library is imported, so that one clear error names an unsupported one."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

TESTED = "tested up to "  # in the comment of a line of requirements.txt


@cache
def check() -> None:
    """Compares the installed packages with requirements.txt, once per process. A missing package is not an error here: storage
    needs neither Transformers nor PEFT.

    Raises:
        ImportError: a package is too old.
    """
    too_old, untested = {}, []
    for name, (need, tested) in requirements().items():
        version = installed(name)
        if version is not None and is_older(version, need):
            too_old[need] = version
        elif _is_newer(version, tested):
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
        need.partition(">=")[0]: (need, comment.removeprefix(TESTED) if comment.startswith(TESTED) else None)
        for need, comment in needs
    }


def is_untested(package: str) -> bool:
    """Checks whether the installed version of a package is newer than the newest tested one."""
    return _is_newer(installed(package), requirements()[package][1])


def require(feature: str, *needs: str, advice: str = "") -> None:
    """Checks the versions that one feature needs, where it needs newer ones than the package as a whole.

    Args:
        advice: another way to the goal, for the error.

    Raises:
        ImportError: a package is missing or too old.
    """
    lacking = {}
    for need in needs:
        version = installed(need.partition(">=")[0])
        if version is None or is_older(version, need):
            lacking[need] = version
    if lacking:
        raise ImportError(f"{_upgrade(feature, lacking)}{'. Or: ' if advice else ''}{advice}")


def installed(package: str) -> str | None:
    """Returns the installed version of a package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_older(version: str, need: str) -> bool:
    """Checks whether a version is below the lower bound of a requirement. Versions of a fork's own scheme are not."""
    release = _release(version)
    return bool(release) and release < _release(need.partition(">=")[2])


def _is_newer(version: str | None, tested: str | None) -> bool:
    release = _release(version or "")
    return bool(release and tested) and release > _release(tested or "")


def _release(version: str) -> tuple[int, ...]:
    """Returns the first three numbers of the release that a build belongs to: NVIDIA's 2.11.0a0+nv26.3 has nearly the sources
    of 2.11.0. Returns an empty tuple for a fork's own scheme. Importing `packaging` would take longer than all checks."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return (*map(int, numbers[0].split(".")), 0, 0)[:3] if numbers else ()


def _upgrade(feature: str, needs: Mapping[str, str | None]) -> str:
    listed = " and ".join(f"{need} (found {version or 'none'})" for need, version in needs.items())
    return f"{feature} requires {listed}: pip install {shlex.join(needs)}"
