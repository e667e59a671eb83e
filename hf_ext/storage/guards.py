"""Checks that a folder may be overwritten or deleted."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hf_ext.errors import CheckpointError
from hf_ext.storage.layout import OURS
from hf_ext.storage.source import TensorSource
from hf_ext.storage.tree import real_path


def require_deletable(src: Path, out: Path, needed: Iterable[str | os.PathLike]) -> None:
    """Raises CheckpointError if one of `src` and `out` lies in the other, or if `src` holds a file or folder of `needed`, or
    temporary files of this package, which are not copied."""
    if src.is_symlink():
        raise CheckpointError(f"{src} is a link and is not deleted; give the folder that it leads to.")
    folder = real_path(src)
    if folder.is_relative_to(real_path(out)):
        raise CheckpointError(f"{src} cannot be deleted, it lies in {out}; give another folder to write.")
    for path in (out, *map(Path, needed)):
        if any(place.is_relative_to(folder) for place in (real_path(path), real_path(path.parent) / path.name)):
            raise CheckpointError(f"{src} cannot be deleted, {path} lies in it and is needed; move that first.")
    for left in src.rglob(f"*{OURS}*"):
        raise CheckpointError(f"{src} cannot be deleted, an interrupted command left {left} there; move or delete that first.")


def places_of(base: TensorSource) -> list[str | Path]:
    """Returns the folder and the files that reading a base needs."""
    return [*([base.name] if os.path.isdir(base.name) else []), *base.paths]
