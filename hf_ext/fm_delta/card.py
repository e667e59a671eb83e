"""The model card of a compressed checkpoint, with its sizes, and what becomes of cards that are there already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from hf_ext.integration.model_cards import CARD, class_of, is_free, is_ours, model_card, name_in_text, task_of
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.delta.file import METHOD, BaseInfo
from hf_ext.storage.layout import CONFIG, read_config

ORIGINAL = "original"  # of a card that looks as if it came with the compression, but was among the files already


def compressed_card(sets: Sequence[Sequence[Any]], out: Path, root: Checkpoint, info: BaseInfo, chain: bool) -> ModelCard:
    """The card of what `out` holds of these files.

    Args:
        root: what was fine-tuned.
        info: the base that they are stored against; it is itself stored against another if there is a `chain`.
    """
    files, config = [file for shards in sets for file in shards], read_config(out / CONFIG)
    entries = [entry for file in files for entry in file.entries.values()]
    original = sum(8 + len(file.header_bytes) for file in files) + sum(entry.end - entry.begin for entry in entries)
    compressed = sum((out / file.path.name).stat().st_size for file in files)
    parameters = sum(math.prod(entry.shape) for entry in entries)
    return model_card(
        METHOD,
        [root.name],
        "finetune",
        tags=["fm-delta"],
        task=task_of(config),
        root=name_in_text(root.name),
        base=name_in_text(info.name),
        revision=info.revision,
        chain=chain,
        model_class=class_of(config),
        original=f"{original / 1e6:.2f} MB",
        compressed=f"{compressed / 1e6:.2f} MB",
        ratio=f"{100 * compressed / max(original, 1):.1f} %",
        parameters=f"{parameters:,}",
        bits=f"{8 * compressed / max(parameters, 1):.2f}",
    )


def came_with_compression(card: Path) -> bool:
    """Whether the card of a compressed folder is none of the original files."""
    settings = read_config(card.parent / CONFIG).get("quantization_config")
    return is_ours(card, METHOD) and isinstance(settings, dict) and settings.get("card") != ORIGINAL


def without_free_card(paths: list[Path], src: Path, out: Path) -> list[Path]:
    """Leaves out the card of `src`, if nobody wrote it and the user wrote the one that is in `out`."""
    return [path for path in paths if path != src / CARD or is_free(out / CARD) or not is_free(path)]
