"""Finds a model's origin, license, class and task by its files, for its card."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_ext.errors import CorruptFileError
from hf_ext.integration.card_marks import metadata_of
from hf_ext.storage.config_file import CONFIG, read_config
from hf_ext.storage.hub import hub_id, repository_of, snapshot_of

UNSAFE = re.compile(r"[^\w.+=@#() -]")  # in a name that a card shows
LICENSE = ("license", "license_name", "license_link")
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


def origin_of(name: str | os.PathLike | None) -> str | None:
    """Returns the Hub id of a model. For a folder, that is the repository it was downloaded from, else the model that its
    config.json (`_name_or_path`) or its card (`base_model`) names; None if there is none."""
    if not name or not os.path.isdir(name):
        return hub_id(name)
    if snapshot := snapshot_of(Path(name).absolute()):
        return repository_of(snapshot)
    try:
        loaded_from = read_config(Path(name, CONFIG)).get("_name_or_path")
    except CorruptFileError:
        loaded_from = None
    named = [loaded_from, (metadata_of(name) or {}).get("base_model")]
    # A name without an organization may just as well be that of a folder.
    return next((origin for origin in named if isinstance(origin, str) and "/" in origin and hub_id(origin)), None)


def license_of(models: Iterable[str | os.PathLike | None]) -> dict[str, Any]:
    """Returns the license that the cards of all these models name, as metadata; an empty dict if they do not agree."""
    cards = [metadata_of(name) or {} for name in models]
    licenses = [{key: data[key] for key in LICENSE if data.get(key)} for data in cards]
    return licenses[0] if licenses and all(license == licenses[0] for license in licenses) else {}


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


def class_of(config: dict[str, Any]) -> str:
    """Returns the class of Transformers that loads a model with this config.json."""
    kinds = config.get("architectures") or []
    known = set().union(*auto_classes().values())
    if known and not known.issuperset(kinds):
        import transformers

        known = set(transformers.__all__)  # `hasattr` would import the class
    return next((name for name in kinds if name in known), "AutoModel")


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
