"""The config.json of a model folder, and its entry that says how the weights are stored."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage.installation import plugin

CONFIG = "config.json"
SETTINGS = '\n  "quantization_config": '
#: Values of `quant_method` there for this package's checkpoints. Hosts that do not have this package print them.
FM_DELTA, EMR = ENCODINGS = ("hf_ext.fm_delta", "hf_ext.emr")
#: Tells users without this package how to load a checkpoint.
HINT = (
    "The weights are compressed, as differences from the base model if one is named. Loading them requires "
    f"{plugin()}: `import hf_ext` before from_pretrained. Without this entry they cannot be loaded."
)

UNQUANTIZED = "Give the model with its weights in 16 or 32 bits."


def read_config(path: Path) -> dict:
    """Returns the contents of a config.json; an empty dict if there is none. Raises CorruptFileError if it is not a JSON
    object."""
    if not path.exists():
        return {}
    if not path.is_file():
        raise CorruptFileError(f"{path} is not a file.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise CorruptFileError(f"{path} is not a JSON object.")
    return config


def storage_settings(folder: Path) -> dict:
    """Returns the `quantization_config` of a folder's config.json, which says how its weights are stored; empty if there is
    none."""
    settings = read_config(folder / CONFIG).get("quantization_config")
    return settings if isinstance(settings, dict) else {}


def is_merge(folder: str | os.PathLike) -> bool:
    """Checks whether a folder holds a merge, according to its config.json."""
    return storage_settings(Path(folder)).get("quant_method") == EMR


def original_config(config: dict) -> dict:
    """Returns the contents of a config.json as they were before this package stored the weights."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") not in ENCODINGS:
        return config
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    return config | ({"quantization_config": settings.get("quantization")} if "cut" in settings else {})


def quantization_of(config: dict) -> str | None:
    """Returns the method that the weights of a config.json are quantized by, and its format; None if they are not quantized.
    The entry may lie in a sub-configuration, such as `text_config`."""
    parts: list[object] = [original_config(config)]
    for part in parts:  # which grows
        if isinstance(part, dict):
            for entry in filter(None, map(part.get, ("quantization_config", "compression_config"))):
                method = entry.get("quant_method") if isinstance(entry, dict) else entry
                if method not in ENCODINGS:
                    form = entry.get("format") if isinstance(entry, dict) else None
                    return f"{getattr(method, 'value', method) or 'unknown method'}{f', {form}' if form else ''}"
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return None


def require_no_task(folder: Path) -> None:
    """Raises CheckpointError if a folder is that of one task of a merge."""
    settings = storage_settings(folder)
    if settings.get("quant_method") == EMR and "task" in settings:
        raise CheckpointError(
            f"{folder} holds task '{settings['task']}' of a merge, not a whole model. Give the merge, {folder.parent}; `hf-ext "
            "extract` writes one task as a plain model."
        )


def forget_encoding(config: object) -> None:
    """Removes the `quantization_config` of a compressed checkpoint or a merge from a model's configuration, because the weights
    in memory are the original ones. Puts back that of quantized weights."""
    settings = getattr(config, "quantization_config", None)
    if isinstance(settings, dict) and settings.get("quant_method") in ENCODINGS:
        del config.quantization_config  # type: ignore[attr-defined]
        if "cut" in settings:
            config.quantization_config = settings["quantization"]  # type: ignore[attr-defined]


def add_settings(text: str, settings: dict) -> str:
    """Returns the text of a config.json with `settings` as its `quantization_config`, which comes last. An entry of this name
    is cut out. `settings` then holds its contents as `quantization`, and its text, by which `remove_settings` puts it back."""
    config, cut = json.loads(text), []
    # Transformers loads by the settings of a text model if the model itself has none.
    parts = [config.get(name) for name in ("text_config", "decoder", "generator")]
    nested = [part.get("quantization_config") for part in parts if isinstance(part, dict)]
    if theirs := next(filter(None, nested), None):
        settings = settings | {"quantization": theirs}
    while place := _member(text, "quantization_config"):
        begin, end = place
        cut.append([begin, text[begin:end]])
        text = text[:begin] + text[end:]
    before, brace, after = text.rpartition("}")
    content = before.rstrip()
    comma = "" if content.endswith("{") else ","
    if cut:
        settings = settings | {"quantization": config["quantization_config"], "cut": cut}
    entry = SETTINGS + json.dumps(settings, indent=2).replace("\n", "\n  ")
    return content + comma + entry + before[len(content) :] + brace + after


def remove_settings(text: str) -> str:
    """Undoes `add_settings`. If another program has rewritten the file since, its contents are right, but its bytes may differ.
    Raises CorruptFileError if the entry is damaged."""
    config = json.loads(text)
    original = original_config(config)
    before, entry, rest = text.rpartition(SETTINGS)
    if entry:
        settings, end = json.JSONDecoder().raw_decode(rest)
        if isinstance(settings, dict) and rest[end:].strip() == "}":
            restored = before.removesuffix(",") + rest[end:]
            try:
                for begin, member in reversed(settings.get("cut", [])):
                    restored = restored[:begin] + member + restored[begin:]
                if json.loads(restored) == original:
                    return restored
            except (ValueError, TypeError) as error:
                raise CorruptFileError(f"config.json is damaged: {error}. Download or save the folder again.") from error
    return text if original is config else json.dumps(original, indent=2) + "\n"


def _member(text: str, name: str) -> tuple[int, int] | None:
    """Returns the place of a member in the text of a JSON object, with the comma after it, or before it if it is the last; None
    if there is no such member."""
    decoder, at = json.JSONDecoder(), text.index("{")
    while text[at] != "}":
        begin = _skip(text, at + 1)
        if text[begin] == "}":
            break
        key, end = decoder.raw_decode(text, begin)
        _, end = decoder.raw_decode(text, _skip(text, _skip(text, end) + 1))
        comma = _skip(text, end)
        if key == name:
            if text[comma] == ",":
                return begin, _skip(text, comma + 1)
            return (at if text[at] == "," else begin), end
        at = comma
    return None


def _skip(text: str, at: int) -> int:
    """Returns the place of the next character that is not white space."""
    return len(text) - len(text[at:].lstrip())
