"""The files of a model folder: weights, config.json and all others."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.installation import plugin
from hf_ext.storage.tree import JOURNAL, OURS, real_path, scan

CONFIG = "config.json"
ADAPTER = "adapter_model.safetensors"  # the weights of a PEFT adapter
ADAPTER_CONFIG = "adapter_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(\.[\w-]+)?(-\d{5}-of-\d{5})?\.safetensors")
SETTINGS = '\n  "quantization_config": '
ENCODINGS = ("fm_delta", "emr")  # values of `quant_method` there for this package's checkpoints
#: Tells users without this package how to load a checkpoint.
HINT = (
    "The weights are compressed, as differences from the base model if one is named. Loading them requires "
    f"{plugin()}: `import hf_ext` before from_pretrained. Without this entry they cannot be loaded."
)


def select_weights(folder: Path, adapter: bool = False) -> list[Path]:
    """Returns the safetensors files that `from_pretrained` reads: the single file, else the shards.

    Args:
        adapter: accept the weights of a PEFT adapter if the folder has no others.

    Raises:
        CheckpointError: there are no weights, or an interrupted command left some of them elsewhere.
    """
    _require_complete(folder)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        return [folder / shard for shard in read_index(folder / INDEX)]
    files = weights_or_adapter(folder) if adapter else all_weights(folder)
    if not files:
        raise no_weights(folder)
    return files


def all_weights(folder: Path) -> list[Path]:
    """Returns every file of weights in a folder: those with a name of weights, variants included, or listed in the index.

    Raises:
        CheckpointError: an interrupted command left some of them elsewhere, or the folder cannot be listed.
    """
    _require_complete(folder)
    listed = read_index(folder / INDEX) if (folder / INDEX).exists() else []
    try:
        return sorted(path for path in folder.iterdir() if WEIGHTS.fullmatch(path.name) or path.name in listed)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be listed: {error.strerror}.") from error


def weights_or_adapter(folder: Path) -> list[Path]:
    """Returns every file of weights in a folder, or the weights of a PEFT adapter if there are no others.

    Raises:
        CheckpointError: an interrupted command left some of them elsewhere.
    """
    return all_weights(folder) or [path for path in [folder / ADAPTER] if path.exists()]


def _require_complete(folder: Path) -> None:
    if os.path.lexists(folder / JOURNAL):
        raise CheckpointError(f"{folder} is incomplete: a command that wrote to it was interrupted. Run that command again.")


def no_weights(folder: Path) -> CheckpointError:
    """Returns the error for a folder without safetensors weights. It says what the folder holds instead, and what to do."""
    held = weights_instead(folder)
    return CheckpointError(
        f"{folder} {held}" if held else f"{folder} holds no safetensors weights (model.safetensors or shards of it)."
    )


def weights_instead(folder: Path) -> str | None:
    """Returns what a folder without safetensors weights holds instead of them, with advice; None if it holds no weights."""
    if (folder / ADAPTER_CONFIG).exists():
        return (
            f"holds a PEFT adapter ({ADAPTER_CONFIG}), not a model. `hf-ext compress --no-base` compresses its {ADAPTER}. To "
            "compress the model that the adapter makes, merge it into its base (merge_and_unload), save that, and give its "
            "folder."
        )
    if any(folder.glob("*.gguf")):
        return (
            "holds GGUF weights, not safetensors. Load it with from_pretrained(folder, gguf_file=…), save the model again, and "
            "give that folder."
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return "holds PyTorch files (.bin, .pt), not safetensors. Load the model with Transformers and save it again."
    return None


def read_index(path: Path) -> list[str]:
    """Returns the names of the shards that an index lists.

    Raises:
        CorruptFileError: the file is not an index.
    """
    if not path.is_file():
        raise CorruptFileError(f"{path} is not a file.")
    try:
        return sorted({Path(shard).name for shard in json.loads(path.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not an index of shards.") from error


def read_config(path: Path) -> dict:
    """Returns the contents of a config.json; an empty dict if there is none.

    Raises:
        CorruptFileError: it is not a JSON object.
    """
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


def forget_encoding(config: object) -> None:
    """Removes the `quantization_config` of a compressed checkpoint or a merge from a model's configuration, because the weights
    in memory are plain ones."""
    settings = getattr(config, "quantization_config", None)
    if isinstance(settings, dict) and settings.get("quant_method") in ENCODINGS:
        del config.quantization_config  # type: ignore[attr-defined]


def add_settings(text: str, settings: dict) -> str:
    """Returns the text of a config.json with `settings` as its `quantization_config`, otherwise unchanged.

    The entry comes last: where the text has an empty one, JSON parsers take the later of the two.
    """
    before, brace, after = text.rpartition("}")
    content = before.rstrip()
    comma = "" if content.endswith("{") else ","
    entry = SETTINGS + json.dumps(settings, indent=2).replace("\n", "\n  ")
    return content + comma + entry + before[len(content) :] + brace + after


def remove_settings(text: str) -> str:
    """Undoes `add_settings`. If another program has rewritten the file since, its contents are right, but its bytes may
    differ."""
    before, entry, rest = text.rpartition(SETTINGS)
    if entry:
        settings, end = json.JSONDecoder().raw_decode(rest)
        if isinstance(settings, dict) and rest[end:].strip() == "}":
            return before.removesuffix(",") + rest[end:]
    config = json.loads(text)
    return text if config.pop("quantization_config", None) is None else json.dumps(config, indent=2) + "\n"


def save_of(path: Path) -> str:
    """Returns the common start of the names of a checkpoint's shards and its single file: `model`, or `model.fp16` for a
    variant."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", path.name)


def shard_sets(paths: list[Path]) -> list[list[Path]]:
    """Groups the weights of one folder into the sets that are read together.

    A folder may hold a model whole and in shards, and variants of it. A set is what the index lists, or the files whose names
    differ only by their number.
    """
    index = paths[0].parent / INDEX
    listed = read_index(index) if index.exists() else []
    sets: dict[str, list[Path]] = {}
    for path in paths:
        key = INDEX if path.name in listed else re.sub(r"-\d+(-of-\d+\.safetensors)$", r"\1", path.name)
        sets.setdefault(key, []).append(path)
    return list(sets.values())


def other_files(src: Path, out: Path) -> list[Path]:
    """Returns everything below `src` except its weights and what lies in `out`, relative to `src`: files, folders, links."""
    if not src.is_dir():
        return []
    weights, out = weights_or_adapter(src), real_path(out)
    around = real_path(src).is_relative_to(out)

    def is_other(path: Path) -> bool:
        places = (real_path(path), real_path(path.parent))
        return path not in weights and (around or not any(place.is_relative_to(out) for place in places))

    return [path for path in scan(src) if is_other(src / path)]


def require_another_folder(out: Path, needed: Iterable[Path]) -> None:
    """Raises CheckpointError if `out` is one of these folders, or holds one of these files."""
    for path in needed if os.path.exists(out) else ():
        if (folder := path if path.is_dir() else path.parent).exists() and out.samefile(folder):
            raise CheckpointError(f"{folder} cannot be overwritten, it is still needed; give another folder.")


def require_deletable(src: Path, out: Path, needed: Iterable[str | os.PathLike]) -> None:
    """Raises CheckpointError if one of `src` and `out` lies in the other, or if `src` holds a file or folder of `needed`, or
    temporary files of this package, which are not copied."""
    if src.is_symlink():
        raise CheckpointError(f"{src} is a link and is not deleted; give the folder that it leads to.")
    folder = real_path(src)
    if folder.is_relative_to(real_path(out)):
        raise CheckpointError(f"{src} cannot be deleted, it lies in {out}; give another folder to write.")
    for path in (out, *map(Path, needed)):
        if any(place.is_relative_to(folder) for place in (real_path(path), real_path(path.parent) / path.name)):
            raise CheckpointError(f"{src} cannot be deleted, {path} lies in it and is needed; move that first.")
    for left in src.rglob(f"*{OURS}*"):
        raise CheckpointError(f"{src} cannot be deleted, an interrupted command left {left} there; move or delete that first.")
