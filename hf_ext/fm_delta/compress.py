"""Folders of checkpoints to compressed folders and back, tensor by tensor."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers.utils.logging import get_logger

from hf_ext.integration.model_cards import CARD, is_ours, outdated, write_card
from hf_ext.storage.checkpoint import (
    ENCODINGS,
    HUB,
    MERGE,
    TORCH_DTYPES,
    Checkpoint,
    ComputedFile,
    Encoding,
    Entry,
    Hub,
    RawTensor,
    SafetensorsFile,
    fingerprint_of,
    open_checkpoint,
    sample,
)
from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.fm_delta.card import ORIGINAL, came_with_compression, compressed_card, without_free_card
from hf_ext.storage.delta.codec import DEFAULT_LEVEL, decode_raw, encode_raw, is_payload, peek_header
from hf_ext.storage.delta.file import (
    KEY,
    METHOD,
    BaseInfo,
    CompressedFile,
    CompressedWriter,
    add_to_config,
    check_shards,
    digest_of,
    remove_from_config,
)
from hf_ext.storage.layout import (
    CONFIG,
    all_weights,
    copy,
    delete_folder,
    flush_folder,
    other_files,
    read_config,
    require_another_folder,
    require_deletable,
    rewrite,
    select_weights,
    shard_sets,
    snapshot_of,
    staged_folder,
)
from hf_ext.storage.native import FLOATS
from hf_ext.storage.prefetch import WorkAhead, progress, threads_for

logger = get_logger(__name__)


def compress_checkpoint(
    src: str | os.PathLike,
    base: str | os.PathLike,
    out: str | os.PathLike,
    revision: str | None = None,
    verify: bool = False,
    delete_source: bool = False,
    level: int = DEFAULT_LEVEL,
) -> None:
    """Writes a model's folder again with its weights as lossless differences from a base model (FM-Delta, NeurIPS 2024).

    Every file that holds no weights is copied; config.json gets a `quantization_config` entry, by which
    `from_pretrained` finds the base. Where there is no model card, one is written; one of the user's in `out` stays,
    unless somebody wrote that of `src` too. Memory: a few tensors.

    Args:
        src: folder with safetensors weights.
        base: folder or Hub id of the model that `src` was fine-tuned from, plain or compressed itself.
        out: folder to write. On failure it is left as it was.
        revision: of the base on the Hub; the commit it leads to is recorded.
        verify: decode everything and compare it with `src`, byte for byte, before `out` gets it.
        delete_source: after that (it implies `verify`), remove `src`.
        level: 1 is fast; 2 looks for a low-rank part of every matrix's change, and 3 longer. Reading takes about as long.

    Raises:
        CheckpointError: `src` has no safetensors weights, is quantised or compressed already, or `out` is `src` or the base;
            or `src` is to be deleted, but `out` or the base lies in it.
        BaseModelError: the base cannot be read.
        CorruptFileError: a file does not come out as it was; `out` and `src` are left as they were.
    """
    src, out = Path(src), Path(out)
    if not src.is_dir():
        raise CheckpointError(f"{src} is not a folder; give the folder of a saved model.")
    base_checkpoint = open_checkpoint(base, revision)
    require_another_folder(out, src, base)
    if delete_source:
        require_deletable(src, out, places_of(base_checkpoint))
    with staged_folder(out) as stage:
        others = without_free_card(other_files(src, out), src, out)
        for path in others:
            copy(path, stage / path.relative_to(src))
        compress_weights(src, base_checkpoint, stage, level, out)
        if verify or delete_source:
            compare_with_source(src, stage, others, base_checkpoint)
    if delete_source:
        flush_folder(out)
        delete_folder(src)


def compress_weights(src: Path, base: Checkpoint, out: Path, level: int = DEFAULT_LEVEL, target: Path | None = None) -> None:
    """Compresses the weights of a folder into `out`, which goes to `target`, then adds what `from_pretrained` must know to
    `out`/config.json."""
    compress_files(plain_files(src, read_config(out / CONFIG)), base, out, level=level, target=target)


def plain_files(src: Path, config: dict) -> list[list[SafetensorsFile]]:
    """The weights of a folder with this config.json, in the sets that are read together.

    Raises:
        CheckpointError: there are none, or they are quantised or compressed.
    """
    if "quantization_config" in config:
        settings = config["quantization_config"]
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        kinds = {
            METHOD: "is compressed already.",
            MERGE: "is a merge of several tasks, stored compressed already; `hf-ext extract` writes one task.",
        }
        other = f"is quantised ({method}); only plain weights can be compressed."
        raise CheckpointError(f"{src} {kinds.get(str(method), other)}")
    paths = all_weights(src)
    if not paths:
        raise CheckpointError(f"{src} holds no safetensors weights (model.safetensors, or shards of it).")
    originals = [SafetensorsFile(path) for path in paths]
    if any(KEY in file.metadata for file in originals):
        raise CheckpointError(f"The weights of {src} are compressed already; decompress them first.")
    return [[file for file in originals if file.path in shards] for shards in shard_sets(paths)]


def compress_files(
    sets: Sequence[Sequence[SafetensorsFile | OriginalFile]],
    base: Checkpoint,
    out: Path,
    name: str | None = None,
    level: int = DEFAULT_LEVEL,
    target: Path | None = None,
    root: Checkpoint | None = None,
) -> None:
    """Compresses files of tensors into `out`, which goes to `target`; its config.json is told, and it gets a card if it has
    none. `name` is the base's, if not its own is to be recorded; `root` is what was fine-tuned, if not the base."""
    src = sets[0][0].path.parent
    if any(file.path.parent.samefile(src) for file in base.files):
        raise CheckpointError(f"{src} is the base model itself; give the folder of a fine-tune of it.")
    selected = select_weights(src)[0]
    dtype = _float_type(next(file for shards in sets for file in shards if file.path == selected))
    info, _ = write_compressed(sets, base, out, name, level)
    settings = {"quant_method": METHOD, "base": info.name, "revision": info.revision, "dtype": dtype}
    if is_ours(out / CARD, METHOD):
        settings["card"] = ORIGINAL
    elif (out / CONFIG).exists() and not (out / CARD).exists():
        root = root or base
        chain = root is not base or isinstance(base, CompressedCheckpoint)
        write_card(out, compressed_card(sets, out, root, info, chain), target)
    rewrite(out / CONFIG, lambda text: add_to_config(text, settings))


def write_compressed(
    sets: Sequence[Sequence[SafetensorsFile | OriginalFile | ComputedFile]],
    base: Checkpoint,
    out: Path,
    name: str | None = None,
    level: int = DEFAULT_LEVEL,
) -> tuple[BaseInfo, list[str]]:
    """Compresses files of tensors into files of the same names in `out`. The files of a set are read together; returns what is
    recorded of the base (under `name`, if not its own), and the digest of each set."""
    files = [file for shards in sets for file in shards]
    info = BaseInfo(name or _portable_name(base), base.revision, base.fingerprint)
    writers: dict[str, CompressedWriter] = {}
    samples: dict[Path, dict[str, bytes]] = {file.path: {} for file in files}
    try:
        with progress("Compressing", sum(len(file.entries) for file in files)) as bar:
            for file in files:
                writer = writers[file.path.name] = CompressedWriter(out / file.path.name, file, info)

                def encode(name: str, file: SafetensorsFile | OriginalFile | ComputedFile = file) -> bytes:
                    twin, tensor = base.twin_of(name), file[name]
                    samples[file.path][name] = sample(name, tensor)
                    prior = None if twin is None else base[twin]
                    payload = encode_raw(tensor, prior, name, twin or "", threads_for(tensor.data.size), level)
                    if prior is not None:
                        base.forget(twin, 0, prior.data.size)
                    if isinstance(file, SafetensorsFile):
                        file.forget(name, 0, tensor.data.size)
                    return payload

                sizes = {name: entry.end - entry.begin for name, entry in file.entries.items()}
                for name, payload in WorkAhead(encode, sizes):
                    writer.add(name, payload)
                    bar.update()
        groups = [[writers[file.path.name] for file in shards] for shards in sets]
        digests = [digest_of(header for writer in group for header in writer.headers) for group in groups]
        for shards, group, digest in zip(sets, groups, digests):
            fingerprint = fingerprint_of({name: part for file in shards for name, part in samples[file.path].items()})
            for writer in group:
                writer.finish(digest, fingerprint)
    finally:
        for writer in writers.values():
            writer.close()
    if not any(header.base_name for writer in writers.values() for header in writer.headers):
        logger.warning(f"The base {base} predicts no tensor of these weights: this is hardly the model they were tuned from.")
    return info, digests


def compare_with_source(src: Path, out: Path, others: Iterable[Path], base: Checkpoint) -> None:
    """Decodes what has been compressed into `out` and compares it with `src`, weights and all `others`, byte for byte.

    Raises:
        CorruptFileError: naming the first file or tensor that is not the same.
    """

    def require(same: bool, what: str) -> None:
        if not same:
            raise CorruptFileError(
                f"{what} of {src} does not come out of its compressed form as it is: it changed meanwhile, or memory or disk "
                "is at fault. Nothing was written; compress it again."
            )

    for path in others:
        name = path.relative_to(src)
        if name == Path(CONFIG):
            restored = remove_from_config((out / name).read_bytes().decode()).encode()
            require(restored == path.read_bytes(), CONFIG)
        else:
            require(filecmp.cmp(path, out / name, shallow=False), str(name))
    originals = [SafetensorsFile(path) for path in all_weights(src)]
    with progress("Verifying", sum(len(file.entries) for file in originals)) as bar:
        for original in originals:
            file = CompressedFile(out / original.path.name)
            require(file.original_header == original.header_bytes, f"The header of {original.path.name}")
            for name, tensor in decoded(file, base, original.entries):
                require(np.array_equal(tensor.data, original[name].data), f"Tensor '{name}'")
                original.forget(name, 0, tensor.data.size)
                bar.update()


def decompress_checkpoint(src: str | os.PathLike, out: str | os.PathLike, base: str | os.PathLike | None = None) -> None:
    """Writes the folder that was compressed: safetensors files and all others, byte for byte as they were. The card that came
    with the compression stays away, unless it was changed since.

    Args:
        src: compressed folder.
        out: folder to write. On failure it is left as it was.
        base: folder or Hub id of the base, if it is no longer where config.json says.

    Raises:
        CorruptFileError: a file is damaged or from a newer version.
        BaseModelError: the base is missing or is another model.
    """
    src, out = Path(src), Path(out)
    files = open_compressed(src)
    if any(MERGE in file.original_metadata for file in files):
        raise CheckpointError(f"{src} holds several models merged into one; `hf-ext extract` writes one of them.")
    base_checkpoint = open_base(files, src, base)
    require_another_folder(out, src, base_checkpoint.name)
    with staged_folder(out, outdated(out)) as stage:
        for path in without_free_card(other_files(src, out), src, out):
            if path != src / CARD or not came_with_compression(path):
                copy(path, stage / path.relative_to(src))
        read_config(stage / CONFIG)
        rewrite(stage / CONFIG, remove_from_config)
        with progress("Decompressing", sum(len(file.original) for file in files)) as bar:
            for file in files:
                with open(stage / file.path.name, "wb") as target:
                    target.write(len(file.original_header).to_bytes(8, "little") + file.original_header)
                    for _, tensor in decoded(file, base_checkpoint, file.original):
                        target.write(tensor.data)
                        bar.update()


def verify(src: str | os.PathLike, base: str | os.PathLike | None = None) -> int:
    """Decodes every tensor of a compressed folder and checks it; returns how many there are.

    Raises:
        CorruptFileError, BaseModelError: naming the first tensor that does not come out as it was saved.
    """
    files = open_compressed(Path(src))
    base_checkpoint = open_base(files, Path(src), base)
    with progress("Verifying", sum(len(file.original) for file in files)) as bar:
        for file in files:
            for _ in decoded(file, base_checkpoint, file.file.entries):
                bar.update()
    return sum(len(file.original) for file in files)


def open_compressed(src: Path) -> list[CompressedFile]:
    """The compressed files of a folder (or one file), checked but for the tensors' content."""
    paths = all_weights(src) if src.is_dir() else [src]
    if not paths or not paths[0].exists():
        raise CheckpointError(f"{src} holds no safetensors weights.")
    files = [CompressedFile(path) for path in paths]
    if src.is_dir():
        for shards in shard_sets(paths):
            check_shards([file for file in files if file.path in shards])
    return files


def open_base(files: list[CompressedFile], src: Path, base: str | os.PathLike | None = None) -> Checkpoint:
    """Opens the base of compressed files: `base`, or where config.json says, or what the files themselves say.

    Raises:
        BaseModelError: it cannot be read, or its fingerprint is another than when the files were written.
    """
    folder = src if src.is_dir() else src.parent
    name, revision = base_of(files[0], folder) if base is None else (from_here(base), None)
    return matching_base(files[0].base, name, revision, folder)


def base_of(file: CompressedFile, folder: Path) -> tuple[str, str | None]:
    """Name and revision of the base: as config.json in the folder has them, or else the file."""
    settings = read_config(folder / CONFIG).get("quantization_config")
    if isinstance(settings, dict) and "base" in settings:
        return settings["base"], settings.get("revision")
    return file.base.name, file.base.revision


def from_here(name: str | os.PathLike) -> str | os.PathLike:
    """A folder that is named as seen from the working directory, so that it is meant from nowhere else."""
    return os.path.abspath(name) if os.path.isdir(name) else name


def matching_base(
    recorded: BaseInfo,
    name: str | os.PathLike,
    revision: str | None,
    beside: Path,
    readers: Sequence[Path] = (),
    hub: Hub = HUB,
) -> Checkpoint:
    """Opens `name`, which may be compressed itself, and makes sure that it is the recorded base.

    Args:
        beside: folder of the checkpoint that needs the base. A relative folder may be meant from here, so that the two can be
            moved together.
        readers: folders of the compressed checkpoints that this one is opened for.
        hub: how it is asked for the base. By default the base is kept in the cache that the checkpoint lies in.
    """
    advice = (
        'If the base has moved, set "base" under "quantization_config" in config.json to its folder or Hub id '
        "(on the command line: --base)."
    )
    if not isinstance(name, str | os.PathLike) or not isinstance(revision, str | None):
        raise BaseModelError(f"{name!r} at revision {revision!r} cannot be the name of the base {recorded}. {advice}")
    if os.path.isdir(beside / name):
        name = os.path.normpath(beside / name)
    if hub.cache_dir is None and (snapshot := snapshot_of(beside)) is not None:
        hub = hub._replace(cache_dir=snapshot.parents[2])
    try:
        checkpoint = Checkpoint(name, revision, hub)
    except BaseModelError as error:
        raise BaseModelError(
            f"The base model {recorded} is needed to read this checkpoint, {beside}. {error} {advice}"
        ) from error
    if any(KEY in file.metadata and MERGE not in file.metadata for file in checkpoint.files):
        files = [CompressedFile(file.path) for file in checkpoint.files]
        check_shards(files)
        folder, readers = files[0].path.parent, [*readers, beside]
        if any(folder.samefile(reader) for reader in readers):
            chain = " → ".join(map(str, [*readers, folder]))
            raise BaseModelError(f"These checkpoints need each other, so none can be read: {chain}. {advice}")
        checkpoint = CompressedCheckpoint(files, matching_base(files[0].base, *base_of(files[0], folder), folder, readers, hub))
    if checkpoint.fingerprint != recorded.fingerprint:
        raise BaseModelError(
            f"This checkpoint, {beside}, was compressed against {recorded} (fingerprint {recorded.fingerprint}), but "
            f"{checkpoint} is another model or revision (fingerprint {checkpoint.fingerprint}). {advice}"
        )
    return checkpoint


class CompressedCheckpoint(Checkpoint):
    """The tensors of compressed files, each decoded when it is asked for.

    Attributes:
        base: the base, plain or compressed, checked against the fingerprint that the files record.
        digest: a hash of the names and contents of all tensors.
    """

    def __init__(self, files: Sequence[CompressedFile], base: Checkpoint):
        self.name = str(files[0].path.parent)
        self.revision = None
        self.files = list(files)
        self.base = base
        self.digest = files[0].digest
        self._file_of = {name: file for file in files for name in file.headers}

    def __getitem__(self, name: str) -> RawTensor:
        return decode_tensor(self._file_of[name], self.base, name)

    def read(self, name: str, out: np.ndarray) -> RawTensor:
        return decode_tensor(self._file_of[name], self.base, name, out)

    def entry(self, name: str) -> Entry:
        return self._file_of[name].original[name]

    def forget(self, name: str, begin: int, end: int) -> None:
        """Nothing: a decoded tensor is its owner's."""

    @cached_property
    def fingerprint(self) -> str:
        return self.files[0].fingerprint or super().fingerprint


class OriginalFile:
    """The safetensors file that a compressed one stands for, its tensors decoded when they are asked for."""

    def __init__(self, file: CompressedFile, base: Checkpoint):
        self.path = file.path
        self.metadata = file.original_metadata
        self.entries = file.original
        self.header_bytes = file.original_header
        self._file = file
        self._base = base

    def __getitem__(self, name: str) -> RawTensor:
        return decode_tensor(self._file, self._base, name)


def open_files(
    paths: Sequence[Path], base: str | os.PathLike | None = None, revision: str | None = None, hub: Hub = HUB
) -> CompressedCheckpoint:
    """Opens the compressed files of one checkpoint; `base` (at `revision`) is the base's place, if not that on record."""
    files = [CompressedFile(path) for path in paths]
    check_shards(files)
    folder = files[0].path.parent
    if base is None:
        base, revision = base_of(files[0], folder)
    checkpoint = matching_base(files[0].base, base, revision, folder, hub=hub)
    return CompressedCheckpoint(files, checkpoint)


def name_of(payload: torch.Tensor) -> str | None:
    """The name of the tensor that a payload stands for; None of what is no payload."""
    return peek_header(payload.reshape(-1).cpu().numpy()).name if is_payload(payload) else None


ENCODINGS[KEY] = Encoding(open_files, write_compressed, name_of)


def decoded(file: CompressedFile, base: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, RawTensor]]:
    """The tensors of a file, decoded on all cores, some ahead of the reader."""
    sizes = {name: file.size(name) for name in names}
    return iter(WorkAhead(lambda name: decode_tensor(file, base, name), sizes))


def decode_tensor(file: CompressedFile, base: Checkpoint, name: str, out: np.ndarray | None = None) -> RawTensor:
    """One tensor of a file; where the base is not the recorded one, the error names both."""
    header = file.headers[name]
    twin = base_tensor(base, header.base_name)
    try:
        return decode_raw(file.payload(name), twin, header, threads_for(file.size(name)), out)
    except BaseModelError as error:
        raise BaseModelError(f"{error} Compressed against {file.base}, read with {base}.") from error
    finally:
        if twin is not None:
            base.forget(header.base_name, 0, twin.data.size)


def base_tensor(base: Checkpoint, name: str) -> RawTensor | None:
    """The tensor that predicts another; None where none does or the base has none of that name."""
    return base[name] if name in base else None


def places_of(base: Checkpoint) -> list[str | Path]:
    """The folder and the files that reading a base needs."""
    return [*([base.name] if os.path.isdir(base.name) else []), *(file.path for file in base.files)]


def _portable_name(base: Checkpoint) -> str:
    """A folder by its absolute path, so that the checkpoint loads from any working directory; a Hub id as it is."""
    return os.path.abspath(base.name) if os.path.isdir(base.name) else base.name


def _float_type(file: SafetensorsFile | OriginalFile) -> str | None:
    """torch's name of the type of the first float tensor by name: what Transformers takes for dtype="auto"."""
    dtypes = (file.entries[name].dtype for name in sorted(file.entries))
    return next((str(TORCH_DTYPES[dtype]).removeprefix("torch.") for dtype in dtypes if dtype in FLOATS), None)
