"""Checkpoints opened for some of their tensors. Each tensor is read on request, with the base's tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.storage.checkpoint import LazyCheckpoint
from hf_ext.storage.delta.file import KEY, CompressedFile, require_one_save
from hf_ext.storage.delta.source import (
    MAX_CHAIN,
    MOVED,
    PARTS_OF,
    SEVERAL_MODELS,
    DeltaCheckpoint,
    base_of,
    decode_tensor,
    needed,
    no_base,
    place_of_base,
    require_fingerprint,
)
from hf_ext.storage.hub import HUB, Hub, absolute
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.storage.source import TensorSource


class LazyDeltaCheckpoint(DeltaCheckpoint):
    """A compressed checkpoint that checks each payload when it is read, instead of all payloads when it is opened."""

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        file = self._file_of[name]
        payload = file.payload(name)
        header = file.check(name, payload)
        if header.base_name in self.base:  # before the base's tensor is downloaded
            twin = self.base.entry(header.base_name)
            header.require_base(twin.dtype, twin.shape)
        return decode_tensor(file, self.base, name, out, (payload, header))


def open_lazily(
    name: str | os.PathLike, revision: str | None = None, base: str | os.PathLike | None = None, hub: Hub = HUB
) -> TensorSource:
    """Opens a checkpoint, plain or compressed, without downloading or checking more than its headers.

    The fingerprint of a plain base covers a few bytes of every tensor. It is not compared if the base is read over the network,
    because that takes requests for each tensor. The checksum of each decoded tensor detects a wrong base too.

    Args:
        name: a folder, or the id of a repository on the Hub.
        revision: branch, tag or commit on the Hub.
        base: folder or Hub id of the base, if it is no longer where config.json says.
        hub: access settings, for the base too.

    Raises:
        BaseModelError: there are no weights of that name, their base is missing or is another model, or the server does not
            support range requests.
        CheckpointError: the files hold several models merged into one.
        CorruptFileError: a header is damaged.
    """
    checkpoint = LazyCheckpoint(name, revision, hub)
    if checkpoint.has_metadata(PARTS_OF):
        raise CheckpointError(f"{checkpoint} {SEVERAL_MODELS}")
    return _with_base(checkpoint, base, hub, [])


def _with_base(
    checkpoint: LazyCheckpoint, base: str | os.PathLike | None, hub: Hub, readers: Sequence[LazyCheckpoint]
) -> TensorSource:
    """Returns a plain checkpoint as it is, and a compressed one with its base, which may be compressed itself.

    Args:
        readers: the compressed checkpoints that need this one.
    """
    if not checkpoint.has_metadata(KEY):
        return checkpoint
    files = [CompressedFile(file) for file in checkpoint.files]
    require_one_save(files)
    recorded, readers = files[0].base, [*readers, checkpoint]
    if len(readers) > MAX_CHAIN:
        raise BaseModelError(f"{readers[0]} needs more than {MAX_CHAIN} other checkpoints, each to read the one before.")
    folder = checkpoint.folder()
    name, revision = (absolute(base), None) if base is not None else base_of(files[0], folder)
    if recorded is None:
        return LazyDeltaCheckpoint(files, no_base(name, checkpoint))
    place, hub = place_of_base(recorded, name, revision, folder, hub)
    try:
        source = LazyCheckpoint(place, revision, hub)
    except BaseModelError as error:
        raise BaseModelError(needed(recorded, checkpoint, error)) from error
    if source.has_metadata(PARTS_OF):
        raise BaseModelError(f"The base {source} of {checkpoint} {SEVERAL_MODELS}")
    if any((source.name, source.revision) == (reader.name, reader.revision) for reader in readers):
        chain = " → ".join(map(str, [*readers, source]))
        raise BaseModelError(f"These checkpoints need each other, so none can be read: {chain}. {MOVED}")
    opened = _with_base(source, None, hub, readers)
    if opened is not source or not source.is_remote:
        require_fingerprint(opened, recorded, checkpoint)
    return LazyDeltaCheckpoint(files, opened)
