"""The files of weights in a model folder: their names, and which of them are read together."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Set
from pathlib import Path

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage.config_file import read_config

OWN_FOLDER = re.compile(r"\w[\w.-]*")  # names that lead into no other folder
GENERATION = "generation_config.json"
ADAPTER = "adapter_model.safetensors"  # the weights of a PEFT adapter
ADAPTER_CONFIG = "adapter_config.json"
DIFFUSERS_LORA = "pytorch_lora_weights.safetensors"  # the adapters of a pipeline's components
PIPELINE = "model_index.json"  # lists the components of a diffusers pipeline, each in a folder of its own
SINGLE, DIFFUSERS_SINGLE = SINGLES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
INDEX, DIFFUSERS_INDEX = INDICES = tuple(f"{single}.index.json" for single in SINGLES)
OURS = ".hf_ext-"  # in the names of temporary files and folders of this package
MOVING = f"{OURS}moving"  # a folder whose files are moving into the one that it lies in
WEIGHTS = re.compile(r"(diffusion_pytorch_)?model(\.[\w-]+)?(-\d{5}-of-\d{5}(\.[\w-]+)?)?\.safetensors")
SHARD = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})")  # in a name of weights
INDEX_OF = re.compile(r"((?:diffusion_pytorch_)?model)\.safetensors\.index(\.[\w-]+)?\.json")  # of a variant, if group 2 is one


def select_weights(folder: Path) -> list[Path]:
    """Returns the safetensors files that `from_pretrained` reads: the single file, else the shards. Raises CheckpointError if
    there are no weights, or an interrupted command left some of them elsewhere."""
    _require_complete(folder)
    for single, index in zip(SINGLES, INDICES):
        if (folder / single).exists():
            return [folder / single]
        if (folder / index).exists():
            return [folder / shard for shard in shards_in(folder / index)]
    files = all_weights(folder)
    if not files:
        raise no_weights(folder)
    return files


def all_weights(folder: Path) -> list[Path]:
    """Returns every file of weights in a folder: those with a name of weights, variants included, and those that an index
    lists, even missing ones unless a single file is read instead. Raises CheckpointError if an interrupted command left some of
    them elsewhere, or the folder cannot be listed."""
    _require_complete(folder)
    files = {folder / name for name in _listing(folder) if WEIGHTS.fullmatch(name)}
    for index in indices_in(folder):
        shards = {folder / shard for shard in shards_in(index)}
        files |= {path for path in shards if path.exists()} if folder / f"{save_of(index)}.safetensors" in files else shards
    return sorted(files)


def indices_in(folder: Path) -> list[Path]:
    """Returns the indices of shards in a folder, those of variants included."""
    return [folder / name for name in _listing(folder) if INDEX_OF.fullmatch(name)]


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} could not be listed: {error.strerror}.") from error


def models_in(folder: Path) -> list[str]:
    """Returns the folders of models in a folder, relative to it: the components with weights of a diffusers pipeline, or '' for
    one model. Leaves out links to components of another pipeline, which stay links. Raises CheckpointError if no component has
    safetensors weights, and CorruptFileError if the list of components is damaged."""
    if not os.path.lexists(folder / PIPELINE):
        return [""]
    _require_complete(folder)
    listed = read_config(folder / PIPELINE).items()
    names = sorted(name for name, kind in listed if OWN_FOLDER.fullmatch(name) and kind != [None, None])
    folders = [name for name in names if os.path.isdir(folder / name) and not os.path.islink(folder / name)]
    if models := [name for name in folders if all_weights(folder / name)]:
        return models
    raise CheckpointError(f"{folder} is a diffusers pipeline, and none of its components holds safetensors weights.")


def _require_complete(folder: Path) -> None:
    if os.path.lexists(folder / MOVING):
        raise CheckpointError(f"{folder} is incomplete: a command that wrote to it was interrupted. Run that command again.")


def no_weights(folder: Path) -> CheckpointError:
    """Returns the error for a folder without safetensors weights. It says what the folder holds instead, and what to do."""
    contents = weights_instead(folder)
    return CheckpointError(
        f"{folder} {contents}" if contents else f"{folder} holds no safetensors weights (model.safetensors or shards of it)."
    )


def weights_instead(folder: Path) -> str | None:
    """Returns what a folder without safetensors weights holds instead of them, with advice; None if it holds no weights."""
    if (folder / ADAPTER_CONFIG).exists():
        return (
            f"holds a PEFT adapter ({ADAPTER_CONFIG}), not a model. Adapters stay as they are. To compress the model that "
            "one makes, merge it into its base (merge_and_unload), save that, and give its folder."
        )
    if (folder / PIPELINE).exists():
        return "holds a diffusers pipeline. Give the folder of one component."
    if any(folder.glob("*.gguf")):
        return (
            "holds GGUF weights, not safetensors. Load it with from_pretrained(folder, gguf_file=…), save the model again, and "
            "give that folder."
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return "holds PyTorch files (.bin, .pt), not safetensors. Load the model with Transformers and save it again."
    return None


def shards_in(index: Path) -> list[str]:
    """Returns the names of the shards that an index lists. See `read_index`."""
    return sorted({*read_index(index).values()})


def read_index(path: Path) -> dict[str, str]:
    """Returns the tensors that an index lists, each with the name of its shard. Raises CorruptFileError if the file is not an
    index."""
    if not path.is_file():
        raise CorruptFileError(f"{path} is not a file.")
    try:
        listed = {name: Path(shard).name for name, shard in json.loads(path.read_bytes())["weight_map"].items()}
        if not listed:
            raise ValueError("it lists no tensors")
        return listed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not an index of shards.") from error


def save_of(path: Path) -> str:
    """Returns the common part of the names of a checkpoint's shards, single file and index: `model`, or `model.fp16` for a
    variant."""
    if index := INDEX_OF.fullmatch(path.name):
        return index[1] + (index[2] or "")
    return SHARD.sub("", path.name).removesuffix(".safetensors")


def replaced_weights(files: Set[Path], target: Path) -> set[Path]:
    """Returns the weights of `target` that belong to the same save as weights in `files`, and their indices. All paths are
    relative. Looks into folders below only for a pipeline."""
    depth = 2 if Path(PIPELINE) in files else 1
    saves = {path.with_name(save_of(path)) for path in files if WEIGHTS.fullmatch(path.name) and len(path.parts) <= depth}
    names = ((save.parent, *save.name.partition(".")) for save in saves)
    indices = {folder / f"{stem}.safetensors.index{dot}{variant}.json" for folder, stem, dot, variant in names}
    listed = [path.relative_to(target) for save in saves for path in (target / save.parent).glob("*.safetensors")]
    weights = {path for path in listed if WEIGHTS.fullmatch(path.name) and path.with_name(save_of(path)) in saves}
    return weights | {path for path in indices if (target / path).exists()}


def shard_sets(paths: list[Path]) -> list[list[Path]]:
    """Groups the weights of one folder into the sets that are read together. The set that `from_pretrained` reads comes first.
    A folder may hold a model whole and in shards, and variants of it. A set is what the index lists, or the files whose names
    differ only by their number."""
    listed = {shard: index.name for index in indices_in(paths[0].parent) for shard in shards_in(index)}
    sets: dict[str, list[Path]] = {}
    for path in paths:
        key = listed.get(path.name) or re.sub(r"-\d{5}(-of-\d{5})", r"\1", path.name)
        sets.setdefault(key, []).append(path)
    first = [*SINGLES, *INDICES]
    return [sets[key] for key in sorted(sets, key=lambda key: first.index(key) if key in first else len(first))]
