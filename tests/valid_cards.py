"""What every card and every other text of this package must be."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from transformers.modelcard import TASK_MAPPING

from hf_ext.integration.card_marks import is_ours
from hf_ext.storage.installation import plugin

KINDS = {path.stem for path in (Path(__file__).parents[1] / "model_cards").glob("*.md")}
RELATIONS = {"finetune", "adapter", "merge", "quantized"}
TASKS = {*TASK_MAPPING, "feature-extraction"} - {"text2text-generation"}

COMMAND = re.compile(
    r"\b(?:(?:pip3?|pipx|uv|conda)\s(?:[\w-]+\s)*?(?:install|add|download|wheel)|uvx|pipx run)\s"
    r"(.*?)(?=[`;,()]|(?<=[\w'\"])\.\s|$)",
    re.MULTILINE,
)
OURS = re.compile(r"(?<![\w./:@-])hf[-_.]*ext\b(?!/)(\[[^]]*\])?+(?!\s*@)", re.IGNORECASE)


def from_an_index(text: str) -> list[str]:
    """The commands of a text that install this package by its name, which is nobody's on package indexes."""
    return [command for command in COMMAND.findall(text) if OURS.search(command)]


def valid_card(folder: Path, kind: str) -> tuple[ModelCardData, str]:
    """Metadata and text of a folder's card, as it was written: with metadata that the Hub takes, nothing left of the template,
    and no path of this machine."""
    assert kind in KINDS and is_ours(folder / "README.md", kind)
    card = ModelCard.load(folder / "README.md")
    data, text = card.data, card.text
    bases = data.base_model if isinstance(data.base_model, list) else [data.base_model] if data.base_model else []
    for base in bases:
        validate_repo_id(base)
    assert (data.get("base_model_relation") in RELATIONS) == bool(bases)
    assert data.library_name in ("transformers", "peft") and data.pipeline_tag in {*TASKS, None}
    assert data.tags == sorted({*data.tags}) and all(isinstance(tag, str) and "/tmp" not in tag for tag in data.tags)
    assert not re.search(r"\{\{|\{%|%\}|\}\}|None\b|More Information", text)
    assert str(folder.parent) not in str(card) and str(folder.parent.parent) not in str(card)
    assert all(len(line) <= 128 for line in text.splitlines() if line[:1] not in ("|", "#", "<", "!"))
    assert (plugin() in text or "Run `pip install peft`" in text) and not from_an_index(text)
    assert re.search(r"^# \S", text, re.MULTILINE) and "\n\n\n" not in text
    return data, text
