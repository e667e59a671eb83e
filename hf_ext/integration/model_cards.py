"""Model cards: the README.md of an artifact, with metadata for the Hub and the artifact's own figures.

A card is made from a template in model_cards/ and ends in a mark with a checksum. A save replaces a card whose checksum still
matches. A card that anybody changed is a user's card, and is never overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

from hf_ext.integration.card_marks import CARD, is_bare, is_free, is_ours, kind_of, marked, metadata_of, tagged, tags_of
from hf_ext.integration.origins import UNSAFE, class_of, license_of, name_in_text, origin_of, task_of
from hf_ext.storage.files import write_atomically
from hf_ext.storage.hub import hub_id
from hf_ext.storage.installation import plugin

#: PEFT's types of task: the Hub's `pipeline_tag`, and the class that loads the base.
ADAPTER_TASKS: dict[str | None, tuple[str | None, str]] = {
    "CAUSAL_LM": ("text-generation", "AutoModelForCausalLM"),
    "SEQ_2_SEQ_LM": (None, "AutoModelForSeq2SeqLM"),
    "SEQ_CLS": ("text-classification", "AutoModelForSequenceClassification"),
    "TOKEN_CLS": ("token-classification", "AutoModelForTokenClassification"),
    "QUESTION_ANS": ("question-answering", "AutoModelForQuestionAnswering"),
    "FEATURE_EXTRACTION": ("feature-extraction", "AutoModel"),
}


def model_card(
    kind: str,
    bases: Sequence[str | os.PathLike | None],
    relation: str,
    library: str = "transformers",
    tags: Iterable[str] = (),
    task: str | None = None,
    licensed_by: Sequence[str | os.PathLike | None] | None = None,
    **figures: Any,
) -> ModelCard:
    """Returns a card with its mark.

    Args:
        kind: name of the template.
        bases: folders or Hub ids of the models that this one is made from. The metadata name those with a Hub id.
        relation: to the bases, in the Hub's words: "finetune", "adapter", "merge" or "quantized".
        library: name of the library that loads the artifact.
        tags: for the metadata.
        task: the Hub's `pipeline_tag`.
        licensed_by: models whose cards name the license; by default the bases.
        figures: values for the template.
    """
    ids = list(dict.fromkeys(origin for base in bases if (origin := origin_of(base))))
    data = ModelCardData(
        base_model=ids[0] if len(ids) == 1 else ids or None,
        base_model_relation=relation if ids else None,
        library_name=library,
        pipeline_tag=task,
        tags=sorted({*tags}),
        **license_of(bases if licensed_by is None else licensed_by),
    )
    if UNSAFE.search(figures.get("revision") or ""):
        figures["revision"] = None
    card = ModelCard.from_template(data, template_str=_template(kind), plugin=plugin(), **figures)
    return marked(card, kind)


def write_card(folder: Path, card: ModelCard, target: Path | None = None) -> bool:
    """Writes a folder's card unless the folder has a user's card. Returns true if it did.

    Args:
        folder: the folder to write into.
        card: the card.
        target: the folder that the files of `folder` will go to, if it is another one. If it has a user's card, no card is
            written.
    """
    if not is_free(folder / CARD):
        return False
    if target is not None and not is_free(target / CARD):
        (folder / CARD).unlink(missing_ok=True)
        return False
    peft = card.data.get("library_name") == "peft"  # PEFT's card has the model's tags, and one of the base, even of a folder
    for place in (folder, target):  # the tags of an empty card may still be the user's
        if place is not None and (peft and place is folder or is_bare(place / CARD)):
            tags = tags_of(metadata_of(place) or {})
            kept = [tag for tag in tags if not tag.startswith("base_model:") or peft and hub_id(tag.split(":", 2)[-1])]
            card = tagged(card, kept)
    write_atomically(folder / CARD, card.save)
    return True


def tag_card(folder: Path, tags: Iterable[str]) -> None:
    """Adds tags to a folder's card if it is a generated one."""
    if is_ours(folder / CARD):
        card = tagged(ModelCard.load(folder / CARD), tags)
        write_atomically(folder / CARD, card.save)


def add_picture(folder: Path, name: str, text: str) -> None:
    """Shows a picture that lies in a folder in the folder's card, before the first section, if the card is a generated one.

    Args:
        folder: with the card and the picture.
        name: of the picture's file.
        text: description of the picture.
    """
    if is_ours(folder / CARD):
        card = ModelCard.load(folder / CARD)
        introduction, heading, sections = card.text.partition("\n## ")
        card.text = f"{introduction}\n![{text}]({name})\n{heading}{sections}"
        write_atomically(folder / CARD, marked(card, kind_of(card)).save)


def outdated(folder: Path) -> list[Path]:
    """Returns the generated card to remove when other files replace those of a folder, relative to it."""
    return [Path(CARD)] if is_ours(folder / CARD) else []


def may_be_pushed(folder: Path, repo_id: str, revision: str | None = None, token: str | bool | None = None) -> bool:
    """Checks whether a folder's card may replace the one in a repository, which must not be a user's. Copies its tags."""
    try:
        remote = Path(hf_hub_download(repo_id, CARD, revision=revision, token=token))
    except (EntryNotFoundError, RevisionNotFoundError):
        return True
    if is_free(remote):
        tag_card(folder, tags_of(metadata_of(remote.parent) or {}))
    return is_free(remote)


def adapter_card(
    kind: str,
    base: str | None,
    task_type: str | None,
    tags: Iterable[str],
    trained_class: str | None = None,
    **figures: Any,
) -> ModelCard:
    """Returns the card of an adapter. Its template shows how to load the base and the adapter.

    Args:
        kind, tags, figures: as in `model_card`.
        base: folder or Hub id of the base.
        task_type: PEFT's type of task, which determines the class that loads the base.
        trained_class: class of the model that was trained, used if there is no `task_type`.
    """
    trained = {"architectures": [trained_class] if trained_class else []}
    task, base_class = ADAPTER_TASKS.get(task_type) or (task_of(trained), class_of(trained))
    text = name_in_text(base) if base else "its base"
    figures |= {"base": text, "base_name": text.strip("`") if base else "…", "base_class": base_class}
    return model_card(kind, [base], "adapter", "peft", tags, task, **figures)


def _template(kind: str) -> str:
    """Returns a template, from the installed package or from the folder model_cards of a checkout."""
    installed = files("hf_ext").joinpath("model_cards", f"{kind}.md")
    return (installed if installed.is_file() else Path(__file__).parents[2] / "model_cards" / f"{kind}.md").read_text("utf-8")
