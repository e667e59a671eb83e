"""Opens a checkpoint in whatever form it is stored."""

from __future__ import annotations

import os
from pathlib import Path

from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.file import KEY
from hf_ext.storage.delta.source import PARTS_OF, SEVERAL_MODELS, DeltaCheckpoint, open_delta
from hf_ext.storage.hub import HUB, Hub
from hf_ext.storage.layout import all_weights

OF_TASK = "#"  # in a name: between a merge and one of its tasks


def open_checkpoint(name: str | os.PathLike, revision: str | None = None, hub: Hub = HUB) -> Checkpoint | DeltaCheckpoint:
    """Opens a checkpoint, plain or compressed.

    Args:
        name: a folder, or the id of a repository on the Hub.
        revision: branch, tag or commit on the Hub.
        hub: access settings, for the base of a compressed checkpoint too.

    Raises:
        BaseModelError: there are no weights of that name, or their base is missing or is another model.
        CheckpointError: the files hold several models merged into one.
        CorruptFileError: they are damaged.
    """
    checkpoint = Checkpoint(name, revision, hub)
    if checkpoint.has_metadata(PARTS_OF):
        raise CheckpointError(f"{checkpoint} {SEVERAL_MODELS}")
    return open_delta(checkpoint.paths, hub=hub, opened=checkpoint) if checkpoint.has_metadata(KEY) else checkpoint


def open_plain(name: str | os.PathLike, revision: str | None = None) -> Checkpoint:
    """Opens a base model, which must be uncompressed.

    Raises:
        BaseModelError: it cannot be read, is compressed itself, or holds several models merged into one.
    """
    checkpoint = Checkpoint(name, revision)
    if checkpoint.has_metadata(PARTS_OF):
        raise BaseModelError(f"The base {checkpoint} {SEVERAL_MODELS}")
    if checkpoint.has_metadata(KEY):
        raise BaseModelError(f"The base {checkpoint} is itself compressed; decompress it first and give the plain folder.")
    return checkpoint


def holds_several_models(folder: str | os.PathLike) -> bool:
    """Checks whether the files of a local folder hold several models merged into one, or whether a name ends with a task."""
    if OF_TASK in os.fspath(folder) and not os.path.exists(folder):
        return True
    return os.path.isdir(folder) and bool(all_weights(Path(folder))) and Checkpoint(folder).has_metadata(PARTS_OF)
