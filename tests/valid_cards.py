"""Checks of a model card that this package has written."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id

from hf_ext.storage.installation import plugin

KINDS = {path.stem for path in (Path(__file__).parents[1] / "model_cards").glob("*.md")}


def valid_card(folder: Path) -> tuple[ModelCardData, str]:
    """Metadata and text of a card of this package: the Hub accepts the metadata, the template is filled in, and no path of this
    machine is in it."""
    card = ModelCard.load(folder / "README.md")
    data, text = card.data, card.text
    bases = data.base_model if isinstance(data.base_model, list) else [data.base_model] if data.base_model else []
    for base in bases:
        validate_repo_id(base)
    assert (data.get("base_model_relation") in {"finetune", "adapter", "merge"}) == bool(bases)
    assert data.library_name in ("transformers", "diffusers", "peft") and data.tags == sorted({*data.tags})
    assert not re.search(r"\{\{|\{%|%\}|\}\}|None\b|More Information", text)
    assert str(folder.parent) not in str(card) and str(folder.parent.parent) not in str(card)
    assert plugin() in text or "Run `pip install peft" in text
    assert re.search(r"^# \S", text, re.MULTILINE) and "\n\n\n" not in text
    return data, text
