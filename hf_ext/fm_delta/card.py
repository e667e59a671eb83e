"""The model card of a compressed checkpoint, and the rules for cards that are there already."""

from __future__ import annotations

import math
from pathlib import Path

from huggingface_hub import ModelCard

from hf_ext.display import megabytes, percent
from hf_ext.integration.card_marks import CARD, is_free, is_ours
from hf_ext.integration.model_cards import model_card
from hf_ext.integration.origins import class_of, name_in_text, task_of
from hf_ext.storage.config_file import CONFIG, read_config, storage_settings
from hf_ext.storage.delta.writer import METHOD, Sets
from hf_ext.storage.source import NoBase, TensorSource

ORIGINAL = "original"  # marks a card that looks like one the compression adds, but belongs to the original files


def compressed_card(sets: Sets, out: Path, root: TensorSource, name: str | None, chain: bool) -> ModelCard:
    """Returns the card of a compressed folder.

    Args:
        sets: the files before compression.
        out: the folder, its weights and config.json written.
        root: the model that was fine-tuned, or `NoBase`.
        name: Hub id of `root`, if it is recorded instead of its own name.
        chain: whether the base is stored against another base itself.
    """
    files, config, settings = [file for shards in sets for file in shards], read_config(out / CONFIG), storage_settings(out)
    entries = [entry for file in files for entry in file.entries.values()]
    original = sum(8 + len(file.header_bytes) for file in files) + sum(entry.nbytes for entry in entries)
    compressed = sum((out / file.path.name).stat().st_size for file in files)
    parameters = sum(math.prod(entry.shape) for entry in entries)
    root_name = root.name if chain else name or root.name
    return model_card(
        METHOD,
        [root_name],
        "finetune",
        tags=["fm-delta"],
        task=task_of(config),
        root=name_in_text(root_name),
        base=name_in_text(settings["base"] or ""),
        revision=settings["revision"],
        alone=isinstance(root, NoBase),
        chain=chain,
        model_class=class_of(config),
        original=megabytes(original),
        compressed=megabytes(compressed),
        ratio=percent(compressed / max(original, 1)),
        parameters=f"{parameters:,}",
        bits=f"{8 * compressed / max(parameters, 1):.2f}",
    )


def came_with_compression(card: Path) -> bool:
    """Checks whether the card of a compressed folder was added by the compression."""
    settings = storage_settings(card.parent)
    return bool(settings) and is_ours(card, METHOD) and settings.get("card") != ORIGINAL


def without_free_card(src: Path, out: Path) -> set[Path]:
    """Returns the card of `src` as a file not to copy, if it is generated and a user wrote the one in `out`."""
    return {Path(CARD)} if (src / CARD).exists() and not is_free(out / CARD) and is_free(src / CARD) else set()
