"""Restores the original folders of compressed checkpoints, and checks what they decode to."""

from __future__ import annotations

import os
from pathlib import Path

from hf_ext.fm_delta.folder import ModelFolder, card_record
from hf_ext.integration.cards import CARD
from hf_ext.storage.checkpoint import holds_weights
from hf_ext.storage.config_file import CONFIG, read_config, remove_settings
from hf_ext.storage.delta.source import decode_all
from hf_ext.storage.files import copy_entries, require_another_folder, rewrite, scan, staged_folder
from hf_ext.storage.guards import require_new
from hf_ext.storage.hub import local_copy
from hf_ext.storage.open import open_files
from hf_ext.storage.plain_writer import write_files


def decompress_checkpoint(
    src: str | os.PathLike, out: str | os.PathLike, base: str | os.PathLike | None = None, overwrite: bool = False
) -> None:
    """Restores the original folder of a compressed one: safetensors and all other files, byte for byte.

    Leaves out the model card that the compression added.

    Args:
        src: compressed folder, or its id on the Hub.
        out: folder to write. On failure it is unchanged.
        base: folder or Hub id of the base, if it has moved. Defaults to the base in config.json.
        overwrite: replace files of a folder that holds something else than these weights.

    Raises:
        CheckpointError: `out` holds something else.
        CorruptFileError: a file is damaged or from a newer version.
        BaseModelError: the base is missing or is another model.
    """
    path, out = local_copy(src), Path(out)
    folder = ModelFolder.open_compressed(path, base)
    require_another_folder(out, [path, *(file for model in folder.models for file in model.base.paths)])

    def is_restored() -> bool:
        opened = [(out / model.place, open_files(path / model.place)) for model in folder.models]
        return all(any(holds_weights(place, file.fingerprint) for file in files) for place, files in opened)

    with staged_folder(out, overwrite=overwrite or is_restored) as stage:
        if path.is_dir():
            cards = [Path(model.place, CARD) for model in folder.models if card_record(path / model.place)]  # that were added
            copy_entries(path, [entry for entry in folder.others(out) if entry not in cards], stage)
            for config in (stage / model.place / CONFIG for model in folder.models):
                read_config(config)  # raises if it is damaged
                rewrite(config, remove_settings)
        if not overwrite:
            require_new(scan(stage), stage, out)
        for model in folder.models:
            write_files(model.files, stage / model.place, "Decompressing")
        folder.copy_modes(stage)


def verify(src: str | os.PathLike, base: str | os.PathLike | None = None) -> int:
    """Decodes every tensor of a compressed folder (or file) and compares it with its checksum.

    Args:
        src: compressed folder or file, or the id of a repository on the Hub.
        base: folder or Hub id of the base, if it is no longer where config.json says.

    Returns:
        The number of tensors.

    Raises:
        CorruptFileError, BaseModelError: names the first tensor that differs from the saved one.
    """
    return decode_all(ModelFolder.open_compressed(local_copy(src), base).files)
