"""Compressed files as a source of tensors; opens and checks their base."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from huggingface_hub.utils import SafetensorsFileMetadata

from hf_ext.errors import BaseModelError, CheckpointError
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.codec import decode_raw
from hf_ext.storage.delta.file import KEY, BaseInfo, CompressedFile, check_shards
from hf_ext.storage.delta.payload import Header, is_payload, peek_header
from hf_ext.storage.hub import HUB, Hub, absolute, snapshot_of
from hf_ext.storage.layout import no_weights, shard_sets, storage_settings, weights_or_adapter
from hf_ext.storage.prefetch import Prefetcher, threads_for
from hf_ext.storage.safetensors_file import Entry, RawTensor
from hf_ext.storage.source import NoBase, TensorSource

if TYPE_CHECKING:
    import torch

#: Metadata entry of files that hold parts of several models; its value is the method that puts the models together.
PARTS_OF = "parts_of"
SEVERAL_MODELS = "holds several models merged into one; `hf-ext extract` writes one of them."
MAX_CHAIN = 64  # limit of compressed checkpoints that are opened to read one
MOVED = (
    'If the base has moved, set "base" under "quantization_config" in config.json to its folder or Hub id '
    "(on the command line: --base)."
)


class DeltaCheckpoint(TensorSource):
    """The tensors of compressed files, each decoded on request.

    Attributes:
        base: the base, plain or compressed, checked against the fingerprint that the files record; `NoBase` if they record
            none.
        digest: a hash of the names and contents of all tensors.

    Args:
        opened: the checkpoint that the files were found by; defaults to their folder.
    """

    def __init__(self, files: Sequence[CompressedFile], base: TensorSource, opened: Checkpoint | None = None):
        # Under the name on the Hub, not that of the cache, other files may record this checkpoint as their base.
        self.name, self.revision = (opened.name, opened.revision) if opened else (str(files[0].path.parent), None)
        self.paths = [*(file.path for file in files), *base.paths]
        self.base = base
        self.files = files
        self.digest = files[0].digest
        self._recorded_fingerprint = files[0].fingerprint
        self._file_of = {name: file for file in files for name in file.original}

    def names(self) -> list[str]:
        return list(self._file_of)

    def entry(self, name: str) -> Entry:
        return self._file_of[name].original[name]

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        return decode_tensor(self._file_of[name], self.base, name, out)

    def identity(self, name: str) -> Hashable:
        return self._file_of[name].headers[name].checksum

    def require_whole(self) -> None:
        for file in self.files:
            file.file.require_whole()
        self.base.require_whole()

    @cached_property
    def fingerprint(self) -> str:
        return self._recorded_fingerprint


class RestoredFile:
    """The original file of a compressed one. Its tensors are decoded on request."""

    def __init__(self, file: CompressedFile, base: TensorSource):
        self.path = file.path
        self.metadata = file.original_metadata
        self.entries = file.original
        self.header_bytes = file.original_header
        self._file = file
        self._base = base

    def __getitem__(self, name: str) -> RawTensor:
        return decode_tensor(self._file, self._base, name)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Does nothing: a decoded tensor is freed with its last reference."""


def open_delta(
    paths: Sequence[Path],
    base: str | os.PathLike | None = None,
    revision: str | None = None,
    hub: Hub = HUB,
    opened: Checkpoint | None = None,
) -> DeltaCheckpoint:
    """Opens the compressed files of one checkpoint.

    Args:
        paths: all files that are read together.
        base, revision: folder or Hub id of the base, if it is no longer where config.json or the files say.
        hub: access settings for the base.
        opened: the checkpoint that the files were found by; defaults to their folder.

    Raises:
        BaseModelError: the base is missing, or is not the one that the files were written against.
        CorruptFileError: a file is damaged, missing, or from another save.
    """
    files = [CompressedFile(path) for path in paths]
    check_shards(files)
    folder = files[0].path.parent
    if base is None:
        base, revision = base_of(files[0], folder)
    return DeltaCheckpoint(files, matching_base(files, base, revision, folder, hub=hub), opened)


def open_files(src: Path) -> list[CompressedFile]:
    """Opens the compressed files of a model or an adapter, variants included (or one file). Their tensors are not decoded.

    Raises:
        CheckpointError: there are no weights.
        CorruptFileError: a file is damaged, missing, or from another save.
    """
    if not src.exists():
        raise CheckpointError(f"{src} does not exist; give the folder of a compressed model.")
    paths = weights_or_adapter(src) if src.is_dir() else [src]
    if not paths:
        raise no_weights(src)
    files = [CompressedFile(path) for path in paths]
    if src.is_dir():
        for shards in shard_sets(paths):
            check_shards([file for file in files if file.path in shards])
    return files


def open_base(files: Sequence[CompressedFile], src: Path, base: str | os.PathLike | None = None) -> TensorSource:
    """Opens the base of compressed files: `base`, else the one that config.json names, else the one that the files record.

    Raises:
        BaseModelError: it cannot be read, or its fingerprint differs from the recorded one.
    """
    folder = src if src.is_dir() else src.parent
    name, revision = base_of(files[0], folder) if base is None else (absolute(base), None)
    return matching_base(files, name, revision, folder)


def base_of(file: CompressedFile, folder: Path | None) -> tuple[str | None, str | None]:
    """Returns the name and revision of a file's base, from the folder's config.json, else from the file. Both are None without
    a base."""
    settings = storage_settings(folder) if folder else {}
    if "base" in settings:
        return settings["base"], settings.get("revision")
    return (None, None) if file.base is None else (file.base.name, file.base.revision)


def matching_base(
    needing: Sequence[CompressedFile],
    name: str | os.PathLike | None,
    revision: str | None,
    beside: Path,
    readers: Sequence[Path] = (),
    hub: Hub = HUB,
) -> TensorSource:
    """Opens `name`, which may be compressed itself, and checks that it is the recorded base. Before a download, compares the
    names, types and sizes of its tensors; then its fingerprint.

    Args:
        needing: the compressed files.
        beside: folder of the checkpoint that needs the base. A relative folder is looked up from here first, so that both can
            move together.
        readers: folders of the compressed checkpoints that need `beside`.
        hub: access settings. By default, the base is cached where the checkpoint is.
    """
    recorded = needing[0].base
    if recorded is None:
        return no_base(name, beside)
    name, hub = place_of_base(recorded, name, revision, beside, hub)
    try:
        base: TensorSource = (checkpoint := Checkpoint(name, revision, hub, partial(_require_fitting, needing)))
    except BaseModelError as error:
        raise BaseModelError(needed(recorded, beside, error)) from error
    if checkpoint.has_metadata(KEY) and not checkpoint.has_metadata(PARTS_OF):
        files = [CompressedFile(file) for file in checkpoint.files]
        check_shards(files)
        folder, readers = files[0].path.parent, [*readers, beside]
        if len(readers) > MAX_CHAIN:
            raise BaseModelError(f"{readers[0]} needs more than {MAX_CHAIN} other checkpoints, each to read the one before.")
        if any(folder.samefile(reader) for reader in readers):
            chain = " → ".join(map(str, [*readers, folder]))
            raise BaseModelError(f"These checkpoints need each other, so none can be read: {chain}. {MOVED}")
        base = DeltaCheckpoint(files, matching_base(files, *base_of(files[0], folder), folder, readers, hub), checkpoint)
    require_fingerprint(base, recorded, beside)
    return base


def require_depth(base: TensorSource, more: int = 1) -> None:
    """Raises CheckpointError if `more` checkpoints, each compressed against the one before and the first against this base,
    could not be opened: too many others would have to be opened to read the last."""
    depth, inner = 0, base
    while isinstance(inner, DeltaCheckpoint):
        depth, inner = depth + 1, inner.base
    if depth + more - 1 > MAX_CHAIN:
        raise CheckpointError(
            f"The base {base} needs {depth - 1} other compressed checkpoints, each to read the one before; "
            f"{MAX_CHAIN - more + 1} are the limit. Give one of the first as the base, or decompress the base."
        )


def no_base(name: str | os.PathLike | None, reader: object) -> NoBase:
    """Returns `NoBase`, for weights that record no base.

    Raises:
        BaseModelError: a base is given by name.
    """
    if name is not None:
        raise BaseModelError(
            f"{reader} was compressed without a base, but '{name}' is given as its base, as an argument or in config.json. "
            "Leave it out."
        )
    return NoBase()


def place_of_base(
    recorded: BaseInfo, name: str | os.PathLike | None, revision: str | None, beside: Path | None, hub: Hub
) -> tuple[str | os.PathLike, Hub]:
    """Returns where to read a base, and with which settings.

    Args:
        recorded: the base that the compressed files record.
        beside: folder of the checkpoint that needs the base, if there is one. A relative folder is looked up from here first.

    Raises:
        BaseModelError: the name is not valid.
    """
    if not isinstance(name, str | os.PathLike) or not isinstance(revision, str | None):
        raise BaseModelError(f"{name!r} at revision {revision!r} is not a valid name for the base {recorded}. {MOVED}")
    if beside is not None and os.path.isdir(beside / name):
        name = os.path.normpath(beside / name)
    if beside is not None and hub.cache_dir is None and (snapshot := snapshot_of(beside)) is not None:
        hub = hub._replace(cache_dir=snapshot.parents[2])
    return name, hub


def needed(recorded: BaseInfo, reader: object, error: BaseModelError) -> str:
    """Returns the message for a base that cannot be read."""
    return f"The base model {recorded} is needed to read this checkpoint, {reader}. {error} {MOVED}"


def require_fingerprint(base: TensorSource, recorded: BaseInfo, reader: object) -> None:
    """Raises BaseModelError unless a base has the recorded fingerprint."""
    if base.fingerprint != recorded.fingerprint:
        raise BaseModelError(
            f"This checkpoint, {reader}, was compressed against {recorded} (fingerprint {recorded.fingerprint}), but "
            f"{base} is another model or revision (fingerprint {base.fingerprint}). {MOVED}"
        )


def _require_fitting(needing: Sequence[CompressedFile], headers: Sequence[SafetensorsFileMetadata]) -> None:
    """Raises BaseModelError unless weights with these headers can be the base of the compressed files."""
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    if any({KEY, PARTS_OF} & header.metadata.keys() for header in headers):
        return  # the base is compressed itself: small, and its own record has the fingerprint
    for payload in (payload for file in needing for payload in file.headers.values() if payload.base_values):
        twin = tensors.get(payload.base_name)
        if twin is None:
            raise BaseModelError(f"It has no tensor '{payload.base_name}', so it is another model, and was not downloaded.")
        try:
            payload.require_base(twin.dtype, twin.shape)
        except BaseModelError as error:
            raise BaseModelError(f"{error} It was not downloaded.") from None


def original_size(file: CompressedFile) -> int:
    """Returns the size in bytes of a compressed file's original."""
    return 8 + len(file.original_header) + sum(entry.nbytes for entry in file.original.values())


def require_one_model(files: Sequence[CompressedFile], src: Path) -> None:
    """Raises CheckpointError if the files hold parts of several models."""
    if any(PARTS_OF in file.original_metadata for file in files):
        raise CheckpointError(f"{src} {SEVERAL_MODELS}")


def decoded(file: CompressedFile, base: TensorSource, names: Iterable[str]) -> Iterator[tuple[str, RawTensor]]:
    """Returns an iterator over the tensors of a file and their names. Decodes them on all cores, some ahead of the reader."""
    sizes = {name: file.original[name].nbytes for name in names}
    return iter(Prefetcher(lambda name: decode_tensor(file, base, name), sizes))


def decode_tensor(
    file: CompressedFile,
    base: TensorSource,
    name: str,
    out: np.ndarray | None = None,
    checked: tuple[np.ndarray, Header] | None = None,
) -> RawTensor:
    """Returns one tensor of a file. If the base is not the recorded one, the error names both.

    Args:
        checked: the tensor's payload and its header, if `CompressedFile.check` was called before. By default all payloads of
            the file are checked once.
    """
    payload, header = checked or (file.payload(name), file.headers[name])
    twin = base_tensor(base, header.base_name)
    try:
        return decode_raw(payload, twin, header, threads_for(file.size(name)), out)
    except BaseModelError as error:
        raise BaseModelError(f"{error} Compressed against {file.base}, read with {base}.") from error
    finally:
        if twin is not None:
            base.release(header.base_name)


def payload_name(payload: torch.Tensor) -> str | None:
    """Returns the name of the tensor encoded in this tensor of bytes; None if it is not a payload."""
    return peek_header(payload.reshape(-1).cpu().numpy()).name if is_payload(payload) else None


def base_tensor(base: TensorSource, name: str) -> RawTensor | None:
    """Returns the base tensor that predicts a tensor; None if no tensor does or the base has none of that name."""
    return base.read(name) if name in base else None
