"""A model's folder, read once and handed on: its weights, plain or compressed, and everything else in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import FM_DELTA, storage_settings
from hf_ext.storage.delta.source import RestoredFile
from hf_ext.storage.files import scan
from hf_ext.storage.hub import absolute, within
from hf_ext.storage.layout import all_weights, models_in, shard_sets
from hf_ext.storage.open import open_base, open_files
from hf_ext.storage.safetensors_file import SafetensorsFile, TensorFile
from hf_ext.storage.source import NoBase, TensorSource
from hf_ext.storage.weights import Kind, kind_of, open_weights

ADDED_CARD = {"card": "added"}  # in the `quantization_config` of a folder whose README.md compression has added


@dataclass(frozen=True)
class Model:
    """The weights of one model in a folder."""

    place: str  # in the folder: '', or the name of a component of a diffusers pipeline
    files: Sequence[TensorFile]  # as they were before compression; those of compressed weights decode tensors when read
    base: TensorSource  # of compressed weights; `NoBase` if they have none or are plain

    @property
    def sets(self) -> list[list[TensorFile]]:
        """The files in sets that are read together, such as the shards of one checkpoint."""
        sets = shard_sets([file.path for file in self.files])
        return [[file for file in self.files if file.path in paths] for paths in sets]


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a model or a diffusers pipeline."""

    path: Path
    models: Sequence[Model]  # one, or the components of the pipeline that have weights

    @classmethod
    def open_plain(cls, path: Path) -> ModelFolder:
        """Opens a folder with plain weights. Raises CheckpointError if there are none, or they are compressed."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder; give the folder of a saved model.")
        models = []
        for place in models_in(path):
            files = open_weights(path / place, variants=True)
            if (kind := kind_of(file.metadata for file in files)) is not Kind.PLAIN:
                raise CheckpointError(f"{path / place} {kind.value}{' Decompress it first.' * (kind is Kind.COMPRESSED)}")
            models.append(Model(place, files, NoBase()))
        return cls(path, models)

    @classmethod
    def open_compressed(cls, path: Path, base: str | os.PathLike | None = None) -> ModelFolder:
        """Opens a compressed folder, or one compressed file, and checks all payloads. `base` is the folder or Hub id of the
        base, if it is no longer where config.json says. Raises CheckpointError or CorruptFileError if there are no weights, or
        they are damaged or hold several models, and BaseModelError if the base is missing or is another model."""
        models = []
        for place in compressed_in(path):
            files = open_files(path / place)
            if kind_of(file.file.metadata for file in files) is Kind.MERGE:
                raise CheckpointError(f"{path / place} {Kind.MERGE.value}")
            for file in files:
                file.require_intact()
            source = open_base(files, None if base is None else within(absolute(base), place))
            source.require_intact()
            models.append(Model(place, [RestoredFile(file, source) for file in files], source))
        return cls(path if path.is_dir() else path.parent, models)

    @property
    def files(self) -> list[TensorFile]:
        """The files of all weights."""
        return [file for model in self.models for file in model.files]

    def others(self, out: Path) -> list[Path]:
        """Returns everything below the folder except its weights and what lies in `out`, relative to the folder: files,
        folders, links."""
        weights, out = {file.path for file in self.files}, Path(os.path.realpath(out))
        around = Path(os.path.realpath(self.path)).is_relative_to(out)

        def is_other(path: Path) -> bool:
            places = (Path(os.path.realpath(path)), Path(os.path.realpath(path.parent)))
            return path not in weights and (around or not any(place.is_relative_to(out) for place in places))

        return [path for path in scan(self.path) if is_other(self.path / path)]

    def copy_modes(self, out: Path) -> None:
        """Copies the permissions of the weights to the files of the same names in `out`."""
        for file in self.files:
            shutil.copymode(file.path, out / file.path.relative_to(self.path))


def compressed_in(path: Path) -> list[str]:
    """Returns the compressed models in a folder, as `models_in` does: those of a pipeline's components that are not plain."""
    return [place for place in models_in(path) if not place or is_compressed(path / place)] or models_in(path)


def is_compressed(path: Path) -> bool:
    """Checks whether a folder holds a compressed model, even a damaged one that its config.json tells, and nothing else."""
    if storage_settings(path).get("quant_method") == FM_DELTA:
        return True
    return {kind_of([SafetensorsFile(file).metadata]) for file in all_weights(path)} == {Kind.COMPRESSED}


def card_record(folder: Path) -> dict[str, str]:
    """Returns `ADDED_CARD` if compression has added the model card of a folder, which is then not one of the original files;
    else an empty dict."""
    return ADDED_CARD if ADDED_CARD.items() <= storage_settings(folder).items() else {}
