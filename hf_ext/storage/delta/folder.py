"""Model folders compressed and restored: weights tensor by tensor, all other files copied, config.json updated."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage.atomic import rewrite, staged_folder
from hf_ext.storage.delta.codec import DEFAULT_LEVEL
from hf_ext.storage.delta.file import KEY, CompressedFile
from hf_ext.storage.delta.source import (
    PARTS_OF,
    SEVERAL_MODELS,
    RestoredFile,
    decoded,
    require_one_model,
)
from hf_ext.storage.delta.writer import write_delta
from hf_ext.storage.hub import local_copy
from hf_ext.storage.layout import (
    ADAPTER,
    CONFIG,
    ENCODINGS,
    HINT,
    add_settings,
    all_weights,
    no_weights,
    other_files,
    read_config,
    remove_settings,
    require_another_folder,
    select_weights,
    shard_sets,
    weights_or_adapter,
)
from hf_ext.storage.open import open_base, open_checkpoint, open_files, require_depth
from hf_ext.storage.plain_writer import write_files
from hf_ext.storage.prefetch import progress
from hf_ext.storage.safetensors_file import SafetensorsFile, TensorFile, float_name
from hf_ext.storage.source import NoBase, TensorSource
from hf_ext.storage.tree import copy_entries

METHOD = "fm_delta"  # `quant_method` in config.json

Sets = Sequence[Sequence[TensorFile]]


def compress_folder(
    src: str | os.PathLike,
    base: str | os.PathLike | TensorSource | None,
    out: str | os.PathLike,
    revision: str | None = None,
    *,
    verify: bool = False,
    level: int = DEFAULT_LEVEL,
    base_id: str | None = None,
    leave: Collection[Path] = (),
    write: Callable[[Sets, TensorSource, Path], None] | None = None,
) -> None:
    """Writes a model's folder with its weights as lossless differences from a base model (FM-Delta, NeurIPS 2024).

    All files that hold no weights are copied. config.json gets a `quantization_config` entry, by which `from_pretrained` finds
    the base. Memory: a few tensors.

    Args:
        src: folder with safetensors weights; without a base, also that of a PEFT adapter.
        base: folder or Hub id of the model that `src` was fine-tuned from, plain or compressed itself; or that model, open; or
            None to compress the weights without a base.
        out: folder to write. On failure it is unchanged.
        revision: branch, tag or commit of the base on the Hub; config.json records the commit.
        verify: decode everything and compare it with `src`, byte for byte, before `out` gets it.
        level: 1 is fast. 2 also searches for a low-rank part of every matrix's change, and 3 searches longer. The level hardly
            changes the time to read.
        base_id: Hub id to record for the base if `base` is a local copy of it, with `revision`.
        leave: files of `src` not to copy, relative to it.
        write: writes the compressed weights into a folder, instead of `write_model`.

    Raises:
        CheckpointError: `src` has no safetensors weights, is quantized or compressed already, or `out` is `src` or the base; or
            one of `src` and `out` is a model and the other an adapter.
        BaseModelError: the base cannot be read.
        CorruptFileError: a decoded file differs from the source; `out` and `src` are unchanged.
    """
    src, out = Path(src), Path(out)
    if not src.is_dir():
        raise CheckpointError(f"{src} is not a folder; give the folder of a saved model.")
    if base is None:
        base = NoBase()
    source = base if isinstance(base, TensorSource) else open_checkpoint(base, revision)
    require_another_folder(out, [src, *source.paths])
    require_depth(source)
    write = write or partial(write_model, name=base_id, level=level, revision=revision)
    with staged_folder(out) as stage:
        _require_one_kind(src, out)
        others = [path for path in other_files(src, out) if path not in leave]
        copy_entries(src, others, stage, like=source.paths[0].parent if source.paths else None)
        write(plain_files(src), source, stage)
        copy_modes(src, stage)
        if verify:
            compare_with_source(src, stage, others, source)


def decompress_folder(
    src: str | os.PathLike,
    out: str | os.PathLike,
    base: str | os.PathLike | None = None,
    leave: Collection[Path] = (),
    stale: Iterable[Path] = (),
) -> None:
    """Restores the original folder of a compressed one: safetensors and all other files, byte for byte.

    Args:
        src: compressed folder.
        out: folder to write. On failure it is unchanged.
        base: folder or Hub id of the base, if it is no longer where config.json says.
        leave: files of `src` not to copy, relative to it.
        stale: files of `out` to remove unless `src` has them, relative to it.

    Raises:
        CorruptFileError: a file is damaged or from a newer version.
        BaseModelError: the base is missing or is another model.
    """
    src, out = Path(src), Path(out)
    files, source = open_restored(src, base)
    require_another_folder(out, [src, *source.paths])
    with staged_folder(out, stale) as stage:
        restore_others(src, stage, [path for path in other_files(src, out) if path not in leave])
        write_files(files, stage, "Decompressing")
        copy_modes(src if src.is_dir() else src.parent, stage)


def open_restored(src: Path, base: str | os.PathLike | None = None) -> tuple[list[RestoredFile], TensorSource]:
    """Returns the original files of a compressed folder, decoded when they are read, and the base."""
    files = open_files(src)
    require_one_model(files, src)
    source = open_base(files, src, base)
    return [RestoredFile(file, source) for file in files], source


def restore_others(src: Path, out: Path, others: Iterable[Path]) -> None:
    """Copies files of a compressed folder that hold no weights, as they were before the compression."""
    copy_entries(src, others, out)
    read_config(out / CONFIG)  # raises if it is damaged
    rewrite(out / CONFIG, remove_settings)


def _require_one_kind(src: Path, out: Path) -> None:
    """Raises CheckpointError if `out` would hold both a compressed model and a compressed adapter: only the model would be
    restored."""
    adapter = out / ADAPTER
    if all_weights(src):
        clash = adapter.exists() and not (src / ADAPTER).exists() and KEY in SafetensorsFile(adapter).metadata
    else:
        clash = out.is_dir() and bool(all_weights(out))
    if clash:
        raise CheckpointError(f"{out} holds a model and {src} an adapter, or the reverse; give another folder to write.")


def copy_modes(src: Path, out: Path) -> None:
    """Copies the permissions of the source files to the weights made from them."""
    for path in weights_or_adapter(out):
        shutil.copymode(src / path.name, path)


def verify_folder(src: str | os.PathLike, base: str | os.PathLike | None = None) -> int:
    """Decodes every tensor of a compressed folder (or file) and compares it with its checksum.

    Args:
        src: compressed folder or file, or the id of a repository on the Hub.
        base: folder or Hub id of the base, if it is no longer where config.json says.

    Returns:
        The number of tensors.

    Raises:
        CorruptFileError, BaseModelError: names the first tensor that differs from the saved one.
    """
    src = local_copy(src)
    files = open_files(src)
    decode_all(files, open_base(files, src, base))
    return sum(len(file.original) for file in files)


def decode_all(files: Sequence[CompressedFile], base: TensorSource) -> None:
    """Decodes every tensor of these files.

    Raises:
        CorruptFileError, BaseModelError: names the first tensor that differs from the saved one.
    """
    with progress("Verifying", sum(len(file.original) for file in files)) as bar:
        for file in files:
            for _ in decoded(file, base, file.original):
                bar.update()


def write_model(
    sets: Sets,
    base: TensorSource,
    out: Path,
    name: str | None = None,
    level: int = DEFAULT_LEVEL,
    settings: dict | None = None,
    revision: str | None = None,
) -> None:
    """Compresses the weights of a model into a folder and adds the `quantization_config` entry to its config.json.

    Args:
        sets: files that are read together, such as the shards of one checkpoint.
        base: the model that was fine-tuned, or `NoBase`.
        out: folder to write into; its config.json is in place already.
        name: the base's name to record, instead of its own.
        level: see `compress_folder`.
        settings: more values for the entry.
        revision: the commit to record with `name`.

    Raises:
        CheckpointError: the base lies in these files.
    """
    src = sets[0][0].path.parent
    if any(path.parent.samefile(src) for path in base.paths):
        raise CheckpointError(f"{src} is the base model itself, or the base needs it; give the folder of a fine-tune of it.")
    selected = select_weights(src, adapter=isinstance(base, NoBase))[0]
    entries = next(file.entries for shards in sets for file in shards if file.path == selected)
    info = write_delta(sets, base, out, name, level, revision).base
    dtype = float_name(entries[key].dtype for key in sorted(entries))
    name, revision = (None, None) if info is None else (info.name, info.revision)
    entry = {"quant_method": METHOD, "hint": HINT, "base": name, "revision": revision, "dtype": dtype}
    rewrite(out / CONFIG, lambda text: add_settings(text, entry | (settings or {})))


def plain_files(src: Path) -> list[list[SafetensorsFile]]:
    """Returns the plain weights of a model or an adapter, in the sets that are read together.

    Raises:
        CheckpointError: there are none, or they are quantized or compressed.
    """
    paths = weights_or_adapter(src)
    if not paths:
        raise no_weights(src)
    files = [SafetensorsFile(path) for path in paths]
    if any(PARTS_OF in file.metadata for file in files):
        raise CheckpointError(f"{src} {SEVERAL_MODELS}")
    if any(KEY in file.metadata for file in files):
        raise CheckpointError(f"{src} is compressed already; decompress it first.")
    config = read_config(src / CONFIG)
    if (settings := config.get("quantization_config")) is not None:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        if method not in ENCODINGS:  # which a configuration may have kept
            raise CheckpointError(f"{src} is quantized ({method}); only plain weights can be compressed.")
    return [[file for file in files if file.path in shards] for shards in shard_sets(paths)]


def compare_with_source(src: Path, out: Path, others: Iterable[Path], base: TensorSource) -> None:
    """Decodes the compressed weights in `out` and compares them with `src`, and all `others` too, byte for byte.

    Raises:
        CorruptFileError: names the first file or tensor that differs.
    """

    def require(same: bool, what: str) -> None:
        if not same:
            raise CorruptFileError(
                f"{what} of {src} does not come out of its compressed form as it was: it changed in the meantime, or memory or "
                "disk is at fault. Nothing was written; compress it again."
            )

    for path in others:
        source, copied = src / path, out / path
        if path == Path(CONFIG):
            require(remove_settings(copied.read_bytes().decode()).encode() == source.read_bytes(), CONFIG)
        elif not copied.is_dir() and not copied.is_symlink():
            require(filecmp.cmp(source, copied, shallow=False), str(path))
    originals = [SafetensorsFile(path) for path in weights_or_adapter(src)]
    with progress("Verifying", sum(len(file.entries) for file in originals)) as bar:
        for original in originals:
            file = CompressedFile(out / original.path.name)
            require(file.original_header == original.header_bytes, f"The header of {original.path.name}")
            for name, tensor in decoded(file, base, original.entries):
                require(np.array_equal(tensor.data, original[name].data), f"Tensor '{name}'")
                original.release(name)
                bar.update()
