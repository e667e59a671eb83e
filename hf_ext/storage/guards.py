"""Guards what a folder holds: nothing is overwritten without being asked for."""

from __future__ import annotations

import contextlib
import filecmp
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.storage.layout import MOVING

NO_CONTENT = (".", "README.md")  # in a folder that is as good as empty: a new repository has them


def require_place(folder: Path, overwrite: bool | Callable[[], bool] = False) -> bool:
    """Checks whether a folder is a place to write into. Returns true if files there may be overwritten: if `overwrite` is true,
    or recognizes the caller's earlier result in the folder. Raises CheckpointError if the folder holds files, other than those
    of a new repository, and nothing allows to overwrite it."""
    if overwrite is True:
        return True
    names = sorted(name for name in os.listdir(folder) if not name.startswith(NO_CONTENT)) if folder.is_dir() else []
    if not names or os.path.lexists(folder / MOVING):  # `staged_folder` completes the move first
        return False
    with contextlib.suppress(HfExtError):  # of damaged files
        if callable(overwrite) and overwrite():
            return True
    raise _occupied(folder, names)


def require_new(files: Iterable[Path], stage: Path, target: Path) -> None:
    """Raises CheckpointError if one of these files would replace a file of `target` with other contents. Ignores folders, and
    files that `stage` does not have."""

    def replaces(path: Path) -> bool:
        if not (os.path.lexists(stage / path) and os.path.lexists(target / path)) or os.path.isdir(stage / path):
            return False
        return not ((target / path).is_file() and filecmp.cmp(stage / path, target / path, shallow=False))

    if replaced := sorted(path.as_posix() for path in files if replaces(path)):
        raise _occupied(target, replaced)


def _occupied(folder: Path, names: Sequence[str]) -> CheckpointError:
    listed = ", ".join(names[:3]) + ", …" * (len(names) > 3)
    return CheckpointError(
        f"{folder} holds something else: {listed}. Give a new folder, or overwrite files of the same names with --force (in "
        "Python: overwrite=True)."
    )
