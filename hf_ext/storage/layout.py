"""Folders of checkpoints: which files are weights, which are not, and writing a folder whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hf_ext.errors import CheckpointError, CorruptFileError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(\.[\w-]+)?(-\d{5}-of-\d{5})?\.safetensors")
STAGE = ".hf_ext-partial"  # one fixed name, so that what a killed process left is cleared by the next save


def select_weights(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder that `from_pretrained` reads: the single file or else the shards.

    Raises:
        CheckpointError: there are none.
    """
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if (folder / INDEX).exists():
        return [folder / shard for shard in read_index(folder / INDEX)]
    files = all_weights(folder)
    if not files:
        raise CheckpointError(
            f"{folder} holds no safetensors weights (model.safetensors or shards of it). If its weights are .bin files, "
            "load the model with Transformers and save it again."
        )
    return files


def read_index(path: Path) -> list[str]:
    """The names of the shards that an index lists."""
    try:
        return sorted({Path(shard).name for shard in json.loads(path.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not an index of shards.") from error


def read_config(path: Path) -> dict:
    """What a config.json says; nothing if there is none.

    Raises:
        CorruptFileError: it is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise CorruptFileError(f"{path} is not a JSON object.")
    return config


def snapshot_of(folder: Path) -> Path | None:
    """The snapshot of a repository in a cache of the Hub that a folder is, or lies in; None if it does not."""
    return next((path for path in (folder, *folder.parents) if path.match("models--*/snapshots/*")), None)


def all_weights(folder: Path) -> list[Path]:
    """Every file of weights in a folder: by its name, variants included, or because the index lists it."""
    listed = read_index(folder / INDEX) if (folder / INDEX).exists() else []
    return sorted(path for path in folder.iterdir() if WEIGHTS.fullmatch(path.name) or path.name in listed)


@contextlib.contextmanager
def staged_folder(target: str | os.PathLike, stale: Iterable[Path] = ()) -> Iterator[Path]:
    """A folder to write a checkpoint into; when the block ends well its files move into `target`, weights first, config.json
    last, each in one step. When it does not, `target` stays as it was.

    Weights in `target` that the new checkpoint replaces by others (shards of another count) are removed before config.json
    comes, so that whoever finds it finds the weights it belongs to; so is what the new one lacks of the
    files `stale`, named relative to `target`.
    """
    target = Path(target)
    created = not os.path.exists(target)
    above = next((path for path in (target, *target.parents) if os.path.exists(path)), None)
    if above is not None and not os.path.isdir(above):
        raise CheckpointError(f"{above} is a file; give a folder to write the checkpoint into.")
    stage = target / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir(parents=True)
        yield stage
        _move_into(stage, target, stale)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if created and os.path.exists(target) and not any(target.iterdir()):
            target.rmdir()


def _move_into(stage: Path, target: Path, stale: Iterable[Path]) -> None:
    def move(path: Path) -> None:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / path, target / path)

    files = {path.relative_to(stage) for path in stage.rglob("*") if path.is_file()}
    weights = {path for path in files if WEIGHTS.fullmatch(str(path))}
    config = files & {Path(CONFIG)}
    saves = {save_of(path) for path in weights}
    indices = [target / INDEX.replace(".json", save.removeprefix("model") + ".json") for save in saves]
    for path in [*sorted(weights), *sorted(files - weights - config)]:
        move(path)
    for old in [*target.glob("*.safetensors"), *indices]:
        replaced = old in indices or WEIGHTS.fullmatch(old.name) and save_of(old) in saves
        if replaced and old.relative_to(target) not in files:
            old.unlink(missing_ok=True)
    for path in set(stale) - files - config:
        (target / path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # of what is not empty, and of `target` itself
            if path.parent != Path():
                (target / path.parent).rmdir()
    for path in config:
        move(path)


def save_of(path: Path) -> str:
    """What the shards of one checkpoint and its single file have in common: `model`, or `model.fp16` of a variant."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", path.name)


def shard_sets(paths: list[Path]) -> list[list[Path]]:
    """The weights of one folder as the sets that are read together: those that the index lists, and those whose names differ
    only by their number. A folder may hold a model whole and in shards, and variants of it."""
    index = paths[0].parent / INDEX
    listed = read_index(index) if index.exists() else []
    sets: dict[str, list[Path]] = {}
    for path in paths:
        key = INDEX if path.name in listed else re.sub(r"-\d+(-of-\d+\.safetensors)$", r"\1", path.name)
        sets.setdefault(key, []).append(path)
    return list(sets.values())


def write_atomically(path: str | os.PathLike, write: Callable[[Path], None]) -> None:
    """Calls `write` with a path beside `path`, then renames it."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.partial")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def require_another_folder(out: Path, src: Path, base: str | os.PathLike) -> None:
    for folder in (src if src.is_dir() else src.parent, Path(base)):
        if os.path.exists(out) and os.path.exists(folder) and out.samefile(folder):
            raise CheckpointError(f"{folder} cannot be written over, it is still needed; give another folder.")


def require_deletable(src: Path, out: Path, needed: Iterable[str | os.PathLike]) -> None:
    """Raises CheckpointError if `src` and `out` lie one in the other, or one of the files and folders `needed` in `src`."""
    if src.is_symlink():
        raise CheckpointError(f"{src} is a link and is not deleted; give the folder that it leads to.")
    folder = src.resolve()
    if folder.is_relative_to(out.resolve()):
        raise CheckpointError(f"{src} cannot be deleted, it lies in {out}; give another folder to write.")
    for path in (out, *map(Path, needed)):
        if any(place.is_relative_to(folder) for place in (path.resolve(), path.parent.resolve() / path.name)):
            raise CheckpointError(f"{src} cannot be deleted, {path} lies in it and is needed; move that first.")


def delete_folder(folder: Path) -> None:
    """Deletes a folder in one step as seen by others: it is renamed first. Called again, it removes what a kill left of that.

    Raises:
        CheckpointError: it could not be deleted.
    """
    folder = folder.resolve()
    grave = folder.with_name(f".{folder.name}{STAGE}")
    try:
        if grave.exists():
            shutil.rmtree(grave)
        if folder.exists():
            os.rename(folder, grave)
            shutil.rmtree(grave)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be deleted: {error}") from error


def flush_folder(folder: Path) -> None:
    """Waits until the files of a folder are on the disk, so that they outlive a loss of power."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        for path in (*folder.rglob("*"), folder, folder.absolute().parent):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def other_files(src: Path, out: Path) -> list[Path]:
    """All files below `src` but its weights, what a killed save left, and `out`."""
    weights, out = all_weights(src) if src.is_dir() else [], out.resolve()
    around = src.resolve().is_relative_to(out)

    def is_other(path: Path) -> bool:
        left = STAGE in path.relative_to(src).parts or not around and path.parent.resolve().is_relative_to(out)
        return path.is_file() and path not in weights and not left

    # A link to a folder is followed, as one to a file is, unless it leads back into a folder that it stands in.
    found = []
    for folder, folders, names in os.walk(src, followlinks=True):
        parents = {os.path.realpath(path) for path in (folder, *Path(folder).absolute().parents)}
        folders[:] = [name for name in folders if os.path.realpath(os.path.join(folder, name)) not in parents]
        found += [Path(folder, name) for name in names]
    return [path for path in found if is_other(path)]


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Changes the text of a file, if there is one, whatever its line ends, and be it read-only."""
    if path.exists():
        text = change(path.read_bytes().decode())
        write_atomically(path, lambda beside: beside.write_bytes(text.encode()))


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
