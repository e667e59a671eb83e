"""Model cards: a README.md with metadata for the Hub, written where a folder has none.

A card is a template of model_cards/ with figures filled in. A card that exists is never changed: delete README.md before a save
to get a new one. PEFT writes a card itself whenever it saves an adapter. That card names the base and the library, so adapters
of PiSSA, QPiSSA and CMoE, and discriminators, need no other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load, try_to_load_from_cache

from hf_ext.storage.config_file import CONFIG, read_config
from hf_ext.storage.files import write_atomically
from hf_ext.storage.hub import hub_id, repository_of, snapshot_of, split_id
from hf_ext.storage.installation import plugin

CARD = "README.md"
MAX_BYTES = 1_000_000  # of a card whose metadata are read
LICENSE = ("license", "license_name", "license_link")
UNSAFE = re.compile(r"[^\w.+=@#() -]")  # in a name that a card shows


def has_card(folder: Path) -> bool:
    """Checks whether a folder has a card, even one that cannot be read."""
    return os.path.lexists(folder / CARD)


def write_card(
    folder: Path,
    template: str,
    bases: Sequence[str | os.PathLike],
    relation: str,
    *,
    target: Path | None = None,
    tags: Iterable[str] = (),
    library: str = "transformers",
    **figures: Any,
) -> bool:
    """Writes the card of a folder, unless it has one. Returns true if it did.

    Args:
        folder: the folder to write into.
        template: name of the template.
        bases: folders or Hub ids of the models that this one is made from. The metadata name those with a Hub id, and
            the license if all their cards name the same one.
        relation: to the bases, in the Hub's words: "finetune", "adapter" or "merge".
        target: the folder that the files of `folder` will go to. If it has a card, none is written.
        tags, library: for the metadata; the library is the one that loads the artifact.
        figures: values for the template. `base` is the name of the first base.
    """
    if has_card(folder) or target is not None and has_card(target):
        return False
    ids = list(dict.fromkeys(origin for base in bases if (origin := _origin_of(base))))
    metadata: dict[str, Any] = {
        "base_model": ids[0] if len(ids) == 1 else ids or None,
        "base_model_relation": relation if ids else None,
        "library_name": library,
        "tags": sorted({*tags}),
        **_license_of(bases),
    }
    data = ModelCardData(**metadata)
    figures = {"plugin": plugin(), "library": library, "base": name_in_text(bases[0]) if bases else None} | figures
    card = ModelCard.from_template(data, template_str=_template(template), **figures)
    write_atomically(folder / CARD, card.save)
    return True


def drop_card_for(target: Path, folder: Path) -> None:
    """Deletes the card of a folder whose files go to `target` if that has one, which must not be replaced."""
    if has_card(target):
        (folder / CARD).unlink(missing_ok=True)


def add_tags(folder: Path, tags: Iterable[str]) -> None:
    """Adds tags to the metadata of a folder's card."""
    card = ModelCard.load(folder / CARD)
    card.data.tags = sorted({*(card.data.tags or []), *tags})
    write_atomically(folder / CARD, card.save)


def metadata_of(model: str | os.PathLike) -> dict[str, Any]:
    """Returns the metadata of a model's card; empty if neither the folder nor the Hub's cache has one that can be read."""
    is_folder = os.path.isdir(model)
    path = Path(model, CARD) if is_folder else (name := hub_id(model)) and try_to_load_from_cache(split_id(name)[0], CARD)
    try:
        # Reading a pipe would wait forever.
        if isinstance(path, str | Path) and os.path.isfile(path) and os.path.getsize(path) <= MAX_BYTES:
            return metadata_load(path) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        pass
    return {}


def name_in_text(name: str | os.PathLike) -> str:
    """Returns the name of a model for the text of a card: its Hub id, or its folder's name without the path. Leaves out
    characters of a folder's name that have a meaning in Markdown or Python: a stranger may have written the name."""
    return f"`{hub_id(name) or UNSAFE.sub('', os.path.basename(os.path.normpath(name)))}`"


def class_of(folder: Path) -> str:
    """Returns the name of the class that loads a folder's model, according to its config.json."""
    config = read_config(folder / CONFIG)
    names = config.get("architectures") or [config.get("_class_name", "AutoModel")]  # diffusers has the latter
    return names[0] if isinstance(names, list) and str(names[0]).isidentifier() else "AutoModel"


def _origin_of(name: str | os.PathLike) -> str | None:
    """Returns the Hub id of a model, or that of the repository a folder was downloaded from; None for other folders."""
    snapshot = snapshot_of(Path(name).absolute()) if name and os.path.isdir(name) else None
    return repository_of(snapshot) if snapshot else (model := hub_id(name)) and split_id(model)[0]


def _license_of(models: Iterable[str | os.PathLike]) -> dict[str, str]:
    """Returns the license that the cards of all these models name, as metadata; empty if they do not agree."""
    cards = [metadata_of(model) for model in models]
    licenses = [{key: card[key] for key in LICENSE if isinstance(card.get(key), str)} for card in cards]
    return licenses[0] if licenses and all(license == licenses[0] for license in licenses) else {}


def _template(name: str) -> str:
    """Returns a template, from the installed package or from the folder model_cards of a checkout."""
    installed = files("hf_ext").joinpath("model_cards", f"{name}.md")
    return (installed if installed.is_file() else Path(__file__).parents[2] / "model_cards" / f"{name}.md").read_text("utf-8")
