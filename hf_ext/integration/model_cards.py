"""Model cards: the README.md of an artifact, with the metadata of the Hub and the artifact's own figures.

A card is written from the template of its kind in model_cards/ and ends in a mark with a checksum. One that still has it is
written anew at the next save; one that anybody has changed is theirs, and stays.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import xxhash
import yaml
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RevisionNotFoundError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id

from hf_ext.errors import CorruptFileError
from hf_ext.storage.atomic import write_atomically
from hf_ext.storage.hub import snapshot_of
from hf_ext.storage.layout import CONFIG, read_config

CARD = "README.md"
MARK = re.compile(r"<!-- hf_ext (?P<kind>\w+) (?P<checksum>[0-9a-f]{16}): [^<>]*-->")
LICENCE = ("license", "license_name", "license_link")
# What Transformers and PEFT put into cards by themselves: PEFT at every save, also into cards that it finds.
PEFT_METADATA = {"base_model", "library_name", "tags"}
THEIR_LINES = re.compile(
    r"### Framework versions|- PEFT \d[\w.+]*|This is the model card of a 🤗 transformers model that has been pushed on "
    r"the Hub\. This model card has been automatically generated\."
)
NO_TASKS = {"text2text-generation"}  # which the Hub has given up
ADAPTER_TASKS = {  # of PEFT: the Hub's, and the class that loads the base
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
    """A card, with its mark.

    Args:
        kind: name of the template.
        bases: folders or Hub ids of the models that this one is made of. Only ids get into the metadata, as the Hub takes no
            others.
        relation: to these, as the Hub has it: "finetune", "adapter", "merge" or "quantized".
        task: the Hub's `pipeline_tag`.
        licensed_by: whose cards say the licence, if not the bases'.
        figures: what the template shows.
    """
    ids = list(dict.fromkeys(origin for base in bases if (origin := origin_of(base))))
    data = ModelCardData(
        base_model=ids[0] if len(ids) == 1 else ids or None,
        base_model_relation=relation if ids else None,
        library_name=library,
        pipeline_tag=task,
        tags=sorted({*tags}),
        **licence(bases if licensed_by is None else licensed_by),
    )
    card = ModelCard.from_template(data, template_str=_template(kind), **figures)
    return _marked(card, kind)


def write_card(folder: Path, card: ModelCard, target: Path | None = None) -> bool:
    """Writes a folder's card, unless one of the user's is there; returns whether it did.

    Args:
        target: where the folder's files are to go, if elsewhere. If one of the user's is there, the folder is left without.
    """
    if not is_free(folder / CARD):
        return False
    if target is not None and not is_free(target / CARD):
        (folder / CARD).unlink(missing_ok=True)
        return False
    peft = card.data.library_name == "peft"  # whose card has the tags of the model, and that of the base, be it a folder
    for place in (folder, target):  # tags of a card that nobody has filled in may be the user's all the same
        if place is not None and (peft and place is folder or is_bare(place / CARD)):
            tags = _tags(metadata_of(place) or {})
            kept = [tag for tag in tags if not tag.startswith("base_model:") or peft and hub_id(tag.split(":", 2)[-1])]
            card = _tagged(card, kept)
    write_atomically(folder / CARD, card.save)
    return True


def tag_card(folder: Path, tags: Iterable[str]) -> None:
    """Adds tags to a folder's card, if it is one of this package's."""
    if is_ours(folder / CARD):
        card = _tagged(ModelCard.load(folder / CARD), tags)
        write_atomically(folder / CARD, card.save)


def outdated(folder: Path) -> list[Path]:
    """The card of a folder into which something without one is written, if it is one of this package's; relative to it."""
    return [Path(CARD)] if is_ours(folder / CARD) else []


def is_free(path: Path) -> bool:
    """Whether nothing of the user's is lost when a card is written over: there is none, or it is one of this package's as
    it was written, or one of Transformers' or PEFT's in which nothing was filled in."""
    return not os.path.lexists(path) or is_ours(path) or is_bare(path)


def may_be_pushed(folder: Path, repo_id: str, revision: str | None = None, token: str | bool | None = None) -> bool:
    """Whether the card of a folder may take the place of the one in a repository: unless that is the user's. One of this
    package's gets the other's tags."""
    try:
        there = Path(hf_hub_download(repo_id, CARD, revision=revision, token=token))
    except (EntryNotFoundError, RevisionNotFoundError):
        return True
    if is_free(there):
        tag_card(folder, _tags(metadata_of(there.parent) or {}))
    return is_free(there)


def is_ours(path: Path, kind: str | None = None) -> bool:
    """Whether a card is one of this package's (and of this kind), and as it was written."""
    metadata, text = _read(path) or ({}, "")
    mark = MARK.search(text)
    return mark is not None and mark["checksum"] == _checksum(metadata, text) and kind in (None, mark["kind"])


def is_bare(path: Path) -> bool:
    """Whether a card is one of Transformers' or PEFT's that nobody has filled in, but for tags; or has nothing in it at all."""
    metadata, text = _read(path) or ({"unreadable": True}, "")
    if MARK.search(text):
        return False
    filled = {key: value for key, value in metadata.items() if value}
    if filled.pop("library_name", "peft") not in ("peft", "transformers"):
        return False
    if not _lines(text):
        return not filled
    filled.pop("tags", None)
    if metadata.get("library_name") == "peft":
        theirs = {"pipeline_tag": "text-generation", "base_model": filled.get("base_model")}
        if f"base_model:adapter:{theirs['base_model']}" not in _tags(metadata):  # which PEFT adds when it fills in the base
            del theirs["base_model"]
        filled = {key: value for key, value in filled.items() if (key, value) not in theirs.items()}
    return not filled and _lines(text) == _lines(ModelCard.from_template(ModelCardData()).text)


def metadata_of(name: str | os.PathLike | None) -> dict[str, Any] | None:
    """The metadata of a model's card; None if none is at hand, in the folder or in the cache of the Hub."""
    path = None
    if name and os.path.isdir(name):
        path = Path(name, CARD)
    elif found := hub_id(name):
        path = try_to_load_from_cache(found, CARD)
    read = _read(Path(path)) if isinstance(path, str | Path) else None
    return None if read is None else read[0]


def licence(models: Iterable[str | os.PathLike | None]) -> dict[str, Any]:
    """The licence that the cards of all these models name, as metadata; nothing if one is not at hand or names another."""
    found = [{key: data[key] for key in LICENCE if data.get(key)} for data in (metadata_of(name) or {} for name in models)]
    return found[0] if found and all(one == found[0] for one in found) else {}


def hub_id(name: str | os.PathLike | None) -> str | None:
    """A name, if it can be that of a repository on the Hub; None of a folder."""
    if not isinstance(name, str) or not name or os.path.exists(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def origin_of(name: str | os.PathLike | None) -> str | None:
    """Returns the Hub id of a model. For a folder, that is the repository it was downloaded from, else the model that its
    config.json (`_name_or_path`) or its card (`base_model`) names; None if there is none."""
    if not name or not os.path.isdir(name):
        return hub_id(name)
    if snapshot := snapshot_of(Path(name).absolute()):
        return snapshot.parents[1].name.removeprefix("models--").replace("--", "/")
    try:
        loaded_from = read_config(Path(name, CONFIG)).get("_name_or_path")
    except CorruptFileError:
        loaded_from = None
    named = [loaded_from, (metadata_of(name) or {}).get("base_model")]
    # A name without an organization may just as well be that of a folder.
    return next((origin for origin in named if isinstance(origin, str) and "/" in origin and hub_id(origin)), None)


def name_in_text(name: str | os.PathLike) -> str:
    """How a card calls a model: by its id, or by the name of its folder, without the way there."""
    return f"`{hub_id(name) or os.path.basename(os.path.normpath(name))}`"


def task_of(config: dict[str, Any]) -> str | None:
    """The Hub's `pipeline_tag` of a model with this config.json, by its class."""
    try:
        from transformers.modelcard import TASK_MAPPING
    except ImportError:  # cards are written without Transformers too
        return None
    kinds = set(config.get("architectures") or [])
    for task, classes in TASK_MAPPING.items():
        names = {name for entry in classes.values() for name in (entry if isinstance(entry, tuple | list) else [entry])}
        if kinds & names and task not in NO_TASKS:
            return task
    return None


def adapter_card(
    kind: str,
    base: str | None,
    task_type: str | None,
    tags: Iterable[str],
    trained_class: str | None = None,
    **figures: Any,
) -> ModelCard:
    """A card of an adapter of this PEFT type of task, whose template shows the base and how to load both. Without a type, the
    class of the model that was trained says how."""
    trained = {"architectures": [trained_class] if trained_class else []}
    task, base_class = ADAPTER_TASKS.get(task_type) or (task_of(trained), class_of(trained))
    text = name_in_text(base) if base else "its base"
    figures |= {"base": text, "base_name": text.strip("`") if base else "…", "base_class": base_class}
    return model_card(kind, [base], "adapter", "peft", tags, task, **figures)


def class_of(config: dict[str, Any]) -> str:
    """The class of Transformers that loads a model with this config.json."""
    try:
        import transformers
    except ImportError:
        return "AutoModel"
    return next((name for name in config.get("architectures") or [] if hasattr(transformers, name)), "AutoModel")


def _tagged(card: ModelCard, tags: Iterable[str]) -> ModelCard:
    """One of this package's cards, with these tags too."""
    card.data.tags = sorted({*_tags(card.data.to_dict()), *tags})
    return _marked(card, MARK.search(card.text)["kind"])


def _marked(card: ModelCard, kind: str) -> ModelCard:
    checksum = _checksum(card.data.to_dict(), card.text)
    mark = f"<!-- hf_ext {kind} {checksum}: written anew at every save, until somebody changes this card -->"
    card.text = f"\n{MARK.sub('', card.text).strip()}\n\n{mark}\n"
    return card


def _template(kind: str) -> str:
    """Of an installed package, or of a checkout, where the templates stand at the top."""
    installed = files("hf_ext").joinpath("model_cards", f"{kind}.md")
    return (installed if installed.is_file() else Path(__file__).parents[2] / "model_cards" / f"{kind}.md").read_text("utf-8")


def _read(path: Path) -> tuple[dict[str, Any], str] | None:
    """Metadata and text of a card; None if there is none that can be read."""
    try:
        text = path.read_text("utf-8-sig")
        block = REGEX_YAML_BLOCK.search(text)
        metadata = (yaml.safe_load(block[2]) if block else None) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return (metadata, text[block.end() if block else 0 :]) if isinstance(metadata, dict) else None


def _tags(metadata: dict[str, Any]) -> list[str]:
    """Which YAML may have made a single text, or numbers."""
    tags = metadata.get("tags") or []
    return [str(tag) for tag in (tags if isinstance(tags, list) else [tags]) if tag is not None]


def _checksum(metadata: dict[str, Any], text: str) -> str:
    """Of what is the writer's in a card: not of what PEFT changes, nor of spaces at line ends and blank lines."""
    own = {key: value for key, value in metadata.items() if metadata.get("library_name") != "peft" or key not in PEFT_METADATA}
    content = json.dumps([own, _lines(text)], sort_keys=True, default=str)
    return xxhash.xxh3_64_hexdigest(content.encode())


def _lines(text: str) -> list[str]:
    lines = (line.rstrip() for line in text.splitlines())
    return [line for line in lines if line and not MARK.fullmatch(line) and not THEIR_LINES.fullmatch(line)]
