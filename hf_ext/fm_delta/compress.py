"""Compressing and restoring folders of checkpoints, with their model cards."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from hf_ext.fm_delta.card import ORIGINAL, came_with_compression, compressed_card, without_free_card
from hf_ext.integration.model_cards import CARD, is_ours, outdated, write_card
from hf_ext.storage.atomic import locked
from hf_ext.storage.delta.codec import DEFAULT_LEVEL
from hf_ext.storage.delta.folder import (
    METHOD,
    Sets,
    compress_folder,
    decompress_folder,
    open_restored,
    restore_others,
    verify_folder,
    write_model,
)
from hf_ext.storage.delta.source import DeltaCheckpoint, RestoredFile
from hf_ext.storage.hub import downloaded, local_copy
from hf_ext.storage.layout import CONFIG, other_files, require_deletable
from hf_ext.storage.open import open_checkpoint, open_files
from hf_ext.storage.source import NoBase, TensorSource
from hf_ext.storage.tree import delete_folder, finish_deletion, flush_folder, stamp

verify = verify_folder


def compress_checkpoint(
    src: str | os.PathLike,
    base: str | os.PathLike | None,
    out: str | os.PathLike,
    revision: str | None = None,
    verify: bool = False,
    delete_source: bool = False,
    level: int = DEFAULT_LEVEL,
    base_id: str | None = None,
) -> None:
    """Writes a model's folder with its weights as lossless differences from a base model (FM-Delta, NeurIPS 2024).

    All files that hold no weights are copied. config.json gets a `quantization_config` entry, by which `from_pretrained` finds
    the base. A folder without a model card gets one; a card that a user wrote in `out` stays, unless a user wrote that of `src`
    too. Memory: a few tensors.

    Args:
        src: folder or Hub id of a model with safetensors weights; without a base, also of a PEFT adapter.
        base: folder or Hub id of the model that `src` was fine-tuned from, plain or compressed itself; or None to compress the
            weights without a base.
        out: folder to write. On failure it is unchanged.
        revision: branch, tag or commit of the base on the Hub; config.json records the commit. With
            `base_id`, records it as it is.
        verify: decode everything and compare it with `src`, byte for byte, before `out` is written.
        delete_source: verify the result, then delete `src`.
        level: 1 is fast. 2 also searches for a low-rank part of every matrix's change, and 3 searches longer. The level hardly
            changes the time to read.
        base_id: Hub id to record for the base if `base` is a local copy of it, so that others can load the result.

    Raises:
        CheckpointError: `src` has no safetensors weights, or is already quantized or compressed; `out` is `src` or the base; or
            `src` cannot be deleted, because `out` or the base is a folder in it.
        BaseModelError: the base cannot be read.
        CorruptFileError: a decoded file differs from the source; `out` and `src` are unchanged.
        ValueError: `revision` or `base_id` is given without a base.
    """
    if base is None and (revision or base_id):
        raise ValueError("revision and base_id describe the base, but base is None")
    src, out = Path(src) if delete_source else downloaded(src), Path(out)
    with locked(out):
        if delete_source and finish_deletion(src):  # a kill interrupted the last step of an earlier call
            open_files(out)  # raises an error unless that call's result is here
            return
        source = NoBase() if base is None else open_checkpoint(base, revision)
        if delete_source:
            require_deletable(src, out, places_of(source))
        seen = stamp(src) if delete_source else None
        compress_folder(
            src,
            source,
            out,
            verify=verify or delete_source,
            leave=without_free_card(src, out),
            write=partial(write_with_card, name=base_id, level=level, target=out, revision=revision),
        )
        if delete_source:
            flush_folder(out)
            delete_folder(src, seen, places_of(source))


def write_with_card(
    sets: Sets,
    base: TensorSource,
    out: Path,
    name: str | None = None,
    level: int = DEFAULT_LEVEL,
    target: Path | None = None,
    root: TensorSource | None = None,
    revision: str | None = None,
) -> None:
    """Compresses the weights of a model into a folder, and writes a model card if the folder has none.

    Args:
        sets, base, out, name, level, revision: see `write_model`.
        target: folder that the files of `out` will go to, if elsewhere.
        root: the model that was fine-tuned, if it is not the base.
    """
    carried = is_ours(out / CARD, METHOD)
    write_model(sets, base, out, name, level, {"card": ORIGINAL} if carried else None, revision)
    if (out / CONFIG).exists() and not (out / CARD).exists():
        root = root or base
        chain = root is not base or isinstance(base, DeltaCheckpoint)
        write_card(out, compressed_card(sets, out, root, name, chain), target)


def decompress_checkpoint(src: str | os.PathLike, out: str | os.PathLike, base: str | os.PathLike | None = None) -> None:
    """Restores the original folder of a compressed one: safetensors and all other files, byte for byte.

    Leaves out the model card that the compression added, unless it was changed since.

    Args:
        src: compressed folder, or its id on the Hub.
        out: folder to write. On failure it is unchanged.
        base: folder or Hub id of the base, if it has moved. Defaults to the base in config.json.

    Raises:
        CorruptFileError: a file is damaged or from a newer version.
        BaseModelError: the base is missing or is another model.
    """
    src, out = local_copy(src), Path(out)
    decompress_folder(src, out, base, leave=without_free_card(src, out) | _added(src), stale=outdated(out))


def restored_files(src: Path, out: Path, base: str | os.PathLike | None = None) -> list[RestoredFile]:
    """Returns the weights that `decompress_checkpoint` would write, decoded when they are read. Writes all other files into
    `out`."""
    files, _ = open_restored(src, base)
    restore_others(src, out, [path for path in other_files(src, out) if path not in _added(src)])
    return files


def _added(src: Path) -> set[Path]:
    """Returns the files that were added by compressing."""
    return {Path(CARD)} if came_with_compression(src / CARD) else set()


def places_of(base: TensorSource) -> list[str | Path]:
    """Returns the folder and the files that reading a base needs."""
    return [*([base.name] if os.path.isdir(base.name) else []), *base.paths]
