"""Model cards: the README.md of an artifact, with metadata for the Hub and the artifact's own figures.

A card is made from a template in model_cards/ and ends in a mark with a checksum. A save replaces a card whose checksum still
matches. A card that anybody changed is a user's card, and is never overwritten.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
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
from hf_ext.storage.config_file import CONFIG, read_config
from hf_ext.storage.hub import snapshot_of
from hf_ext.storage.installation import plugin

CARD = "README.md"
MARK = re.compile(r"<!-- hf_ext (?P<kind>\w+) (?P<checksum>[0-9a-f]{16}): [^<>]*-->")
MAX_METADATA = 200_000  # characters; those of large cards have about 100,000
UNSAFE = re.compile(r"[^\w.+=@#() -]")  # in a name that a card shows
LICENSE = ("license", "license_name", "license_link")
# Transformers and PEFT write these into cards by themselves. PEFT does so at every save, into existing cards too.
PEFT_METADATA = {"base_model", "library_name", "tags"}
THEIR_LINES = re.compile(
    r"### Framework versions|- PEFT \d[\w.+]*|This is the model card of a 🤗 transformers model that has been pushed on "
    r"the Hub\. This model card has been automatically generated\."
)
#: The Hub's `pipeline_tag`: the tables of classes in `transformers.models.auto.modeling_auto` (`MODEL_FOR_…_MAPPING_NAMES`).
TASKS = {
    "text-generation": ["CAUSAL_LM"],
    "image-classification": ["IMAGE_CLASSIFICATION"],
    "image-segmentation": ["IMAGE_SEGMENTATION"],
    "fill-mask": ["MASKED_LM"],
    "object-detection": ["OBJECT_DETECTION"],
    "question-answering": ["QUESTION_ANSWERING"],
    "text-classification": ["SEQUENCE_CLASSIFICATION"],
    "table-question-answering": ["TABLE_QUESTION_ANSWERING"],
    "token-classification": ["TOKEN_CLASSIFICATION"],
    "audio-classification": ["AUDIO_CLASSIFICATION"],
    "automatic-speech-recognition": ["CTC", "SPEECH_SEQ_2_SEQ"],
    "zero-shot-image-classification": ["ZERO_SHOT_IMAGE_CLASSIFICATION"],
    "image-text-to-text": ["IMAGE_TEXT_TO_TEXT"],
}
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
    return _marked(card, kind)


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
            tags = _tags(metadata_of(place) or {})
            kept = [tag for tag in tags if not tag.startswith("base_model:") or peft and hub_id(tag.split(":", 2)[-1])]
            card = _tagged(card, kept)
    write_atomically(folder / CARD, card.save)
    return True


def tag_card(folder: Path, tags: Iterable[str]) -> None:
    """Adds tags to a folder's card if it is a generated one."""
    if is_ours(folder / CARD):
        card = _tagged(ModelCard.load(folder / CARD), tags)
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
        write_atomically(folder / CARD, _marked(card, _kind(card)).save)


def outdated(folder: Path) -> list[Path]:
    """Returns the generated card to remove when other files replace those of a folder, relative to it."""
    return [Path(CARD)] if is_ours(folder / CARD) else []


def is_free(path: Path) -> bool:
    """Checks whether a card may be overwritten: there is none, or it is a generated one, or an empty one of Transformers or
    PEFT."""
    return not os.path.lexists(path) or is_ours(path) or is_bare(path)


def may_be_pushed(folder: Path, repo_id: str, revision: str | None = None, token: str | bool | None = None) -> bool:
    """Checks whether a folder's card may replace the one in a repository, which must not be a user's. Copies its tags."""
    try:
        remote = Path(hf_hub_download(repo_id, CARD, revision=revision, token=token))
    except (EntryNotFoundError, RevisionNotFoundError):
        return True
    if is_free(remote):
        tag_card(folder, _tags(metadata_of(remote.parent) or {}))
    return is_free(remote)


def is_ours(path: Path, kind: str | None = None) -> bool:
    """Checks whether a card was generated by this package, of this kind if one is given, and not changed since."""
    metadata, text = _read(path) or ({}, "")
    mark = MARK.search(text)
    return mark is not None and mark["checksum"] == _checksum(metadata, text) and kind in (None, mark["kind"])


def is_bare(path: Path) -> bool:
    """Checks whether a card is an unchanged template of Transformers or PEFT, apart from tags, or has no content."""
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
        if f"base_model:adapter:{theirs['base_model']}" not in _tags(metadata):  # PEFT adds this tag with the base
            del theirs["base_model"]
        filled = {key: value for key, value in filled.items() if (key, value) not in theirs.items()}
    return not filled and _lines(text) == _lines(ModelCard.from_template(ModelCardData()).text)


def metadata_of(name: str | os.PathLike | None) -> dict[str, Any] | None:
    """Returns the metadata of a model's card; None if neither the folder nor the Hub's cache has the card."""
    path: object = None
    if name and os.path.isdir(name):
        path = Path(name, CARD)
    elif repository := hub_id(name):
        path = try_to_load_from_cache(repository, CARD)
    card = _read(Path(path)) if isinstance(path, str | Path) else None
    return None if card is None else card[0]


def license_of(models: Iterable[str | os.PathLike | None]) -> dict[str, Any]:
    """Returns the license that the cards of all these models name, as metadata; an empty dict if they do not agree."""
    cards = [metadata_of(name) or {} for name in models]
    licenses = [{key: data[key] for key in LICENSE if data.get(key)} for data in cards]
    return licenses[0] if licenses and all(license == licenses[0] for license in licenses) else {}


def hub_id(name: str | os.PathLike | None) -> str | None:
    """Returns a name if it is valid for a repository on the Hub and no such folder exists; else None."""
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
    """Returns the name of a model for the text of a card: its Hub id, or its folder's name without the path.

    Leaves out characters of a folder's name that have a meaning in Markdown or Python: a stranger may have written the name.
    """
    return f"`{hub_id(name) or UNSAFE.sub('', os.path.basename(os.path.normpath(name)))}`"


def task_of(config: dict[str, Any]) -> str | None:
    """Returns the Hub's `pipeline_tag` for the class of a model with this config.json."""
    kinds = set(config.get("architectures") or [])
    for task, tables in TASKS.items():
        if any(kinds & auto_classes().get(f"MODEL_FOR_{table}_MAPPING_NAMES", set()) for table in tables):
            return task
    return None


@cache
def auto_classes() -> dict[str, set[str]]:
    """Returns the texts in each table of `transformers.models.auto.modeling_auto`: types of models, and their classes.

    Reads the source of the module, because importing it takes PyTorch and two seconds. Empty without Transformers.
    """
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:  # cards are written without Transformers too
        return {}
    source = Path(spec.origin).with_name("models") / "auto/modeling_auto.py"
    return {
        target.id: {str(part.value) for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
        for node in ast.parse(source.read_bytes()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("_MAPPING_NAMES")
    }


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


def class_of(config: dict[str, Any]) -> str:
    """Returns the class of Transformers that loads a model with this config.json."""
    kinds = config.get("architectures") or []
    known = set().union(*auto_classes().values())
    if known and not known.issuperset(kinds):
        import transformers

        known = set(transformers.__all__)  # `hasattr` would import the class
    return next((name for name in kinds if name in known), "AutoModel")


def _tagged(card: ModelCard, tags: Iterable[str]) -> ModelCard:
    """Returns a generated card with these tags added."""
    card.data["tags"] = sorted({*_tags(card.data.to_dict()), *tags})
    return _marked(card, _kind(card))


def _kind(card: ModelCard) -> str:
    """Returns the template of a generated card."""
    mark = MARK.search(card.text)
    assert mark is not None
    return mark["kind"]


def _marked(card: ModelCard, kind: str) -> ModelCard:
    """Returns a card with the mark of its contents at the end."""
    checksum = _checksum(card.data.to_dict(), card.text)
    mark = f"<!-- hf_ext {kind} {checksum}: every save replaces this card, unless you change it -->"
    card.text = f"\n{MARK.sub('', card.text).strip()}\n\n{mark}\n"
    return card


def _template(kind: str) -> str:
    """Returns a template, from the installed package or from the folder model_cards of a checkout."""
    installed = files("hf_ext").joinpath("model_cards", f"{kind}.md")
    return (installed if installed.is_file() else Path(__file__).parents[2] / "model_cards" / f"{kind}.md").read_text("utf-8")


class _Loader(yaml.SafeLoader):
    """Reads YAML without aliases, by which a few lines can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not supported")
        return super().compose_node(parent, index)


def _read(path: Path) -> tuple[dict[str, Any], str] | None:
    """Returns metadata and text of a card; None if it cannot be read."""
    if not os.path.isfile(path):  # reading a pipe would wait forever
        return None
    try:
        text = path.read_text("utf-8-sig")
        block = REGEX_YAML_BLOCK.search(text)
        if block and len(block[2]) > MAX_METADATA:
            return None
        metadata = (yaml.load(block[2], _Loader) if block else None) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return (metadata, text[block.end() if block else 0 :]) if isinstance(metadata, dict) else None


def _tags(metadata: dict[str, Any]) -> list[str]:
    """Returns the tags of a card as texts. In YAML, they may be a single text, or numbers."""
    tags = metadata.get("tags") or []
    return [str(tag) for tag in (tags if isinstance(tags, list) else [tags]) if tag is not None]


def _checksum(metadata: dict[str, Any], text: str) -> str:
    """Returns a checksum of a card, without the parts that PEFT changes, spaces at line ends, and blank lines."""
    own = {key: value for key, value in metadata.items() if metadata.get("library_name") != "peft" or key not in PEFT_METADATA}
    content = json.dumps([own, _lines(text)], sort_keys=True, default=str)
    return xxhash.xxh3_64_hexdigest(content.encode())


def _lines(text: str) -> list[str]:
    """Returns the lines of a card that are not blank, not the mark, and not written by PEFT or Transformers on their own."""
    lines = (line.rstrip() for line in text.splitlines())
    return [line for line in lines if line and not MARK.fullmatch(line) and not THEIR_LINES.fullmatch(line)]
