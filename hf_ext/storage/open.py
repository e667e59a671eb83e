"""Opens the files of compressed checkpoints, and their bases."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hf_ext.errors import BaseModelError, CheckpointError, HfExtError
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.config_file import CONFIG, ENCODINGS, add_settings, remove_settings, storage_settings
from hf_ext.storage.delta.file import BaseInfo, CompressedFile, check_shards
from hf_ext.storage.delta.source import DeltaCheckpoint
from hf_ext.storage.files import locked, rewrite
from hf_ext.storage.hub import HUB, Hub, absolute, absolute_path, name_from, snapshot_of, within
from hf_ext.storage.layout import models_in, shard_sets
from hf_ext.storage.safetensors_file import SafetensorsFile
from hf_ext.storage.source import NoBase, TensorSource
from hf_ext.storage.weights import Kind, kind_of, open_weights, require_all

if TYPE_CHECKING:
    from huggingface_hub.utils import SafetensorsFileMetadata

MAX_CHAIN = 64  # limit of compressed checkpoints that are opened to read one
BASES = "HF_EXT_BASES"  # environment variable: folders of bases, separated as in PATH
MOVED = (
    "If the base has moved, record its folder or Hub id with `hf-ext rebase` (for one command: --base), or list the folder "
    f"that it is in in {BASES}."
)


def open_delta(
    paths: Sequence[Path], base: str | os.PathLike | None = None, revision: str | None = None, hub: Hub = HUB
) -> DeltaCheckpoint:
    """Opens the compressed files of one checkpoint that are read together, of which all tensors will be read. Checks all
    payloads. `base`, `revision` and `hub` are those of `open_base`. Raises BaseModelError if the base is missing, or is not the
    one that the files were written against, and CorruptFileError if a file is damaged, missing, or from another save."""
    files = open_shards(paths)
    for file in files:
        file.require_intact()
    source = open_base(files, base, revision, hub)
    source.require_intact()
    return DeltaCheckpoint(files, source)


def open_files(src: Path) -> list[CompressedFile]:
    """Opens the compressed files of a model, variants included (or one file). Their tensors are not decoded. Raises
    CheckpointError if there are no weights, and CorruptFileError if a file is damaged, missing, or from another save."""
    if not src.exists():
        raise CheckpointError(f"{src} does not exist; give the folder of a compressed model.")
    files = [CompressedFile(file) for file in (open_weights(src, variants=True) if src.is_dir() else [src])]
    if src.is_dir():
        for shards in shard_sets([file.path for file in files]):
            check_shards([file for file in files if file.path in shards])
    return files


def open_base(
    files: Sequence[CompressedFile],
    base: str | os.PathLike | None = None,
    revision: str | None = None,
    hub: Hub = HUB,
    opened: Checkpoint | None = None,
    readers: Sequence[Checkpoint | Path] = (),
) -> TensorSource:
    """Opens the base of compressed files, which may be compressed itself, and checks that it is the recorded one. Before a
    download, compares the names, types and sizes of its tensors; then its fingerprint.

    Args:
        base, revision: the base, if not the one that `base_of` returns. A relative folder is looked up from the files' folder
            first, so that both can move together.
        hub: access settings. By default, the base is cached where the files are.
        opened: the checkpoint that consists of the files; defaults to their folder.
        readers: the compressed checkpoints that need the files.

    Raises:
        BaseModelError: it cannot be read, or its fingerprint differs from the recorded one.
    """
    folder = (opened.folder() if opened else None) or files[0].path.parent  # a repository may have no config.json
    this, recorded = opened or f"'{folder}'", files[0].base
    named = base_of(files[0], folder)
    name, revision = named if base is None else (base, revision)
    is_named, is_beside = name == named[0], str(name).startswith(os.pardir)
    if recorded is None:
        if name is not None:
            raise BaseModelError(
                f"{this} was compressed without a base, but '{name}' is given as its base, as an argument or in config.json. "
                "Leave it out."
            )
        return NoBase()
    if not isinstance(name, str | os.PathLike) or not isinstance(revision, str | None):
        raise BaseModelError(f"{name!r} at revision {revision!r} is not a valid name for the base {recorded}. {MOVED}")
    if is_beside or os.path.isdir(folder / name):
        name = absolute_path(folder / name)
    if hub.cache_dir is None and (snapshot := snapshot_of(folder)) is not None:
        hub = hub._replace(cache_dir=snapshot.parents[2])
    try:
        weights = Checkpoint(name, revision, hub, partial(_require_fitting, files))
    except BaseModelError as error:
        # One that is there but damaged stays an error, and so does another one that the caller names.
        moved = None if os.path.isdir(name) or not is_named else _moved_base(recorded, is_beside)
        if moved is None:
            advice = f" {MOVED}" if is_named else ""
            message = f"The base model {recorded} is needed to read this checkpoint, {this}. {error}{advice}"
            raise BaseModelError(message) from error
        weights = moved
    if weights.kind is Kind.MERGE:
        raise BaseModelError(f"The base {weights} of {this} {Kind.MERGE.value}")
    source: TensorSource = weights
    if weights.kind is Kind.COMPRESSED:
        readers = [*readers, opened or folder]
        _require_no_cycle(readers, weights)
        shards = open_shards(weights.files)
        source = DeltaCheckpoint(shards, open_base(shards, hub=hub, opened=weights, readers=readers), weights)
    if source.fingerprint != recorded.fingerprint:
        advice = MOVED if is_named else "Give a folder or Hub id of that base."
        raise BaseModelError(
            f"This checkpoint, {this}, was compressed against {recorded} (fingerprint {recorded.fingerprint}), but "
            f"{source} is another model or revision (fingerprint {source.fingerprint}). {advice}"
        )
    return source


def base_of(file: CompressedFile, folder: Path | None) -> tuple[str | None, str | None]:
    """Returns the name and revision of a file's base, from the folder's config.json, else from the file. Both are None without
    a base."""
    settings = storage_settings(folder) if folder else {}
    if "base" in settings:
        return settings["base"], settings.get("revision")
    return (None, None) if file.base is None else (file.base.name, file.base.revision)


def rebase(folder: Path, base: str | os.PathLike) -> None:
    """Records another folder or Hub id of the base of a compressed model, pipeline or merge. Changes config.json alone. Raises
    CheckpointError if the folder holds none of these, and BaseModelError if the base cannot be read or is another model."""
    with locked(folder):
        places = [place for place in models_in(folder) if storage_settings(folder / place).get("quant_method") in ENCODINGS]
        if not places:
            raise CheckpointError(f"{folder} holds no compressed model and no merge, or its {CONFIG} does not say so.")
        places = [place for place in places if storage_settings(folder / place).get("base")] or places
        bases = {place: open_base(open_files(folder / place), within(absolute(base), place)) for place in places}
        for place, source in bases.items():
            if source.name != within(absolute(base), place):  # it was found in a folder of BASES
                raise BaseModelError(f"There is no base '{base}' that can be read, but the same model is in {source}.")
            record_base(folder / place, name_from(folder / place, source.name), source.revision)


def record_base(folder: Path, name: str, revision: str | None) -> None:
    """Makes the config.json of a compressed model or a merge name this base."""
    before = storage_settings(folder)
    settings = before | {"base": name, "revision": revision}
    if settings != before:
        rewrite(folder / CONFIG, lambda text: add_settings(remove_settings(text), settings))


def _moved_base(recorded: BaseInfo, is_beside: bool) -> Checkpoint | None:
    """Returns the checkpoint with the fingerprint of a base that is not where config.json says: one in the folders of
    `BASES`, or, if config.json names it by its place beside the folder, that at the absolute path in the weights' files.
    Prefers a plain one to one that needs a base in turn. Merges record the fingerprint of their base, so they do not count."""
    listed = [Path(place).absolute() for place in os.environ.get(BASES, "").split(os.pathsep) if place]
    places = [Path(recorded.name)] if is_beside and os.path.isabs(recorded.name) else []
    for folder in listed:  # the last are components of pipelines
        models = sorted(folder.glob("*"))
        places += [folder, *models, *(model / Path(recorded.name).name for model in models)]
    compressed = None
    for place in places:
        with contextlib.suppress(HfExtError, OSError):  # it holds no model, or one that cannot be read
            weights = Checkpoint(place)
            source = weights if weights.kind is Kind.PLAIN else open_shards(weights.files)[0]
            if source.fingerprint == recorded.fingerprint and weights.kind is Kind.PLAIN:
                return weights
            if source.fingerprint == recorded.fingerprint and weights.kind is Kind.COMPRESSED:
                compressed = compressed or weights
    return compressed


def require_depth(base: TensorSource) -> None:
    """Raises CheckpointError if a checkpoint compressed against this base could not be opened: too many others would have to be
    opened to read it."""
    depth, inner = 0, base
    while isinstance(inner, DeltaCheckpoint):
        depth, inner = depth + 1, inner.base
    if depth > MAX_CHAIN:
        raise CheckpointError(
            f"The base {base} needs {depth - 1} other compressed checkpoints, each to read the one before; "
            f"{MAX_CHAIN} are the limit. Give one of the first as the base, or decompress the base."
        )


def open_shards(files: Iterable[Path | SafetensorsFile]) -> list[CompressedFile]:
    """Opens the compressed files of one save. Payloads are checked when they are read. Raises CheckpointError if a file is
    missing, and CorruptFileError if a header is damaged, or a file is from another save."""
    shards = [CompressedFile(file) for file in files]
    require_all([shard.file for shard in shards])
    check_shards(shards)
    return shards


def _require_no_cycle(readers: Sequence[Checkpoint | Path], base: Checkpoint) -> None:
    """Raises BaseModelError if one of the checkpoints that need this base is the base itself, or if they are too many."""
    if len(readers) > MAX_CHAIN:
        raise BaseModelError(f"{readers[0]} needs more than {MAX_CHAIN} other checkpoints, each to read the one before.")
    chain = [_place(checkpoint) for checkpoint in (*readers, base)]
    if chain[-1] in chain[:-1]:
        names = " → ".join(name for name, _ in chain)
        raise BaseModelError(f"These checkpoints need each other, so none can be read: {names}. {MOVED}")


def _place(checkpoint: Checkpoint | Path) -> tuple[str, str | None]:
    """Returns the resolved path of a folder, or the name and commit of a repository."""
    name = checkpoint.name if isinstance(checkpoint, Checkpoint) else str(checkpoint)
    if os.path.isdir(name):
        return os.path.realpath(name), None
    return name, getattr(checkpoint, "revision", None)


def _require_fitting(needing: Sequence[CompressedFile], headers: Sequence[SafetensorsFileMetadata]) -> None:
    """Raises BaseModelError unless weights with these headers can be the base of the compressed files."""
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    if kind_of(header.metadata for header in headers) is not Kind.PLAIN:
        return  # the base is compressed itself: small, and its own record has the fingerprint
    payloads = [(file, header) for file in needing for header in file.headers.values() if header.base_values]
    for file, payload in payloads:
        tensor = tensors.get(payload.base_name)
        try:
            if tensor is None:
                raise BaseModelError(f"It has no tensor '{payload.base_name}', so it is another model.")
            payload.require_base(tensor.dtype, tensor.shape)
        except BaseModelError as error:
            file.require_intact()  # else its headers may be wrong
            raise BaseModelError(f"{error} It was not downloaded.") from None
