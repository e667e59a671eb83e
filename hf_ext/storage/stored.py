"""A stored model: decides what form it has (plain, compressed, merged, quantized), once, for all who use it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.config_file import CONFIG, UNQUANTIZED, original_config, quantization_of, read_config
from hf_ext.storage.delta.payload import is_payload
from hf_ext.storage.delta.source import DeltaCheckpoint
from hf_ext.storage.hub import HUB, Hub, absolute, is_local, reaching, within
from hf_ext.storage.open import open_base, open_shards
from hf_ext.storage.source import TensorSource
from hf_ext.storage.weights import AGAIN, Kind

OF_TASK = "#"  # in a name: between a merge and one of its tasks


@dataclass(frozen=True)
class Stored:
    """A model in a folder or in a repository on the Hub. Reads, or downloads, each of its parts once, when it is needed."""

    name: str  # the folder, or the id of the repository
    revision: str | None = None  # branch, tag or commit on the Hub
    hub: Hub = HUB  # access settings, for the base of a compressed model too

    @cached_property
    def folder(self) -> Path:
        """The folder; for a repository, the snapshot of one commit in the Hub's cache. Raises BaseModelError if there is none
        or it cannot be reached."""
        if is_local(self.name):
            return Path(self.name) if os.path.isdir(self.name) else self.checkpoint.paths[0].parent
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        with reaching(self.name, self.revision), self.hub.requiring(self.name, self.revision, [CONFIG]):
            try:
                return self.hub.download(self.name, CONFIG, self.revision).parent
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                return self.checkpoint.paths[0].parent

    def file(self, name: str) -> Path | None:
        """Returns a file of the folder; None if there is none of this name."""
        path = self.folder / name
        if not path.exists() and not is_local(self.name):
            from huggingface_hub.errors import EntryNotFoundError

            with reaching(self.name, self.revision), suppress(EntryNotFoundError):
                return self.hub.download(self.name, name, self.folder.name)
        return path if path.exists() else None

    @cached_property
    def full_config(self) -> dict:
        """The contents of config.json; empty if there is none. Raises CorruptFileError if it is damaged."""
        return read_config(self.folder / CONFIG)

    @property
    def settings(self) -> dict:
        """The `quantization_config` of config.json, which says how the weights are stored; empty if there is none."""
        settings = self.full_config.get("quantization_config")
        return settings if isinstance(settings, dict) else {}

    @property
    def config(self) -> dict:
        """config.json as it was before this package stored the weights."""
        return original_config(self.full_config)

    @property
    def quantization(self) -> str | None:
        """The method and the format of quantized weights; None for plain ones."""
        return quantization_of(self.full_config)

    def require_unquantized(self) -> None:
        """Raises CheckpointError if the weights are quantized."""
        if self.quantization:
            raise CheckpointError(f"{self.name} is quantized ({self.quantization}). {UNQUANTIZED}")

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights as they are in the files. Raises BaseModelError if there are none, or if some are damaged or missing."""
        return Checkpoint(self.name, self.revision, self.hub)

    def tensors(self, base: str | os.PathLike | None = None) -> Checkpoint | DeltaCheckpoint:
        """Returns the weights of the model, decoded when they are read. `base` is the folder or Hub id of the base, if it is no
        longer where config.json says. Raises BaseModelError if there are no weights of that name, or their base is missing or
        is another model, CheckpointError if the files hold several models merged into one, and CorruptFileError if they are
        damaged."""
        weights = self.checkpoint
        if weights.kind is Kind.MERGE:
            raise CheckpointError(f"{weights} {Kind.MERGE.value}")
        if weights.kind is Kind.COMPRESSED:
            files = open_shards(weights.files)
            return DeltaCheckpoint(files, open_base(files, base and absolute(base), None, self.hub, weights), weights)
        bytes_only = [name for name in weights.names() if weights.entry(name).dtype == "U8"]
        if any(is_payload(weights.read(name).data) for name in bytes_only):
            raise CorruptFileError(f"The header of {weights} is damaged: the record of its payloads is missing. {AGAIN}")
        return weights


def split_task(name: str) -> tuple[str, str | None]:
    """Splits the name MERGE#TASK into the merge and its task. The task is None for other names."""
    merge, of_task, task = name.partition(OF_TASK)
    return (merge, task) if of_task and not os.path.exists(name) else (name, None)


def open_checkpoint(
    name: str | os.PathLike, revision: str | None = None, hub: Hub = HUB, base: str | os.PathLike | None = None
) -> Checkpoint | DeltaCheckpoint:
    """Opens the weights of a model, plain or compressed. A repository on the Hub is downloaded, and so is the base of
    compressed weights. See `Stored` and `Stored.tensors`."""
    return Stored(os.fspath(name), revision, hub).tensors(base)


def open_counterpart(
    base: str | os.PathLike, place: str, revision: str | None = None, quantization: str | None = None
) -> Checkpoint | DeltaCheckpoint:
    """Opens a base, plain or compressed, or the component `place` of a base that is a diffusers pipeline, for a model of this
    `Stored.quantization`. Raises BaseModelError if the base cannot be read, or is quantized in another way than the model."""
    try:
        stored = Stored(within(base, place), revision)
        _require_form(stored, quantization)  # before weights are downloaded
        return stored.tensors()
    except BaseModelError as error:
        advice = f" It is the base of the component '{place}'. Without it, give the folders of other components, one by one."
        raise BaseModelError(f"{error}{advice if place and os.path.isdir(base) else ''}") from error


def plain_base(stored: Stored, quantization: str | None = None) -> Checkpoint:
    """Returns the weights of a base model, which must be uncompressed, for a model of this `Stored.quantization`. Raises
    BaseModelError if the base cannot be read, is quantized in another way than the model or compressed itself, or holds several
    models merged into one."""
    _require_form(stored, quantization)  # before weights are downloaded
    weights = stored.checkpoint
    if weights.kind is not Kind.PLAIN:
        advice = " Decompress it first and give the plain folder." if weights.kind is Kind.COMPRESSED else ""
        raise BaseModelError(f"The base {weights} {weights.kind.value}{advice}")
    return weights


def config_of(source: TensorSource) -> dict:
    """Returns the config.json beside the weights of a checkpoint, which is downloaded if necessary; empty if there is none."""
    folder = source.folder() if isinstance(source, Checkpoint) else source.paths[0].parent
    return read_config(folder / CONFIG) if folder else {}


def _require_form(base: Stored, quantization: str | None) -> None:
    """Raises BaseModelError unless a base is quantized as the model is, or neither is quantized."""
    if base.quantization == quantization:
        return
    form = f"is quantized ({base.quantization})" if base.quantization else "is not quantized"
    if quantization is None:
        raise BaseModelError(f"The base '{base.name}' {form}. {UNQUANTIZED}")
    raise BaseModelError(
        f"The base '{base.name}' {form}, but the model is quantized ({quantization}). Give a base that was quantized in "
        "the same way, or compress both before they are quantized."
    )
