"""The checkpoints of a training run, each stored as its difference from the base or from the next newer checkpoint.

Older checkpoints depend on newer ones, because a Trainer deletes the oldest first. After resuming, it may also overwrite newer
checkpoints; `secure` removes such dependencies. A checkpoint changes as a whole folder, in one step.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hf_ext.display import percent, table
from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.fm_delta.card import came_with_compression
from hf_ext.fm_delta.compress import write_with_card
from hf_ext.fm_delta.folder import ModelFolder
from hf_ext.fm_delta.restore import decode_all
from hf_ext.fm_delta.size_estimate import estimate_size
from hf_ext.fm_delta.sizes import Sizes
from hf_ext.integration.card_marks import CARD
from hf_ext.storage.config_file import CONFIG, remove_settings
from hf_ext.storage.delta.file import KEY, CompressedFile
from hf_ext.storage.delta.source import (
    DeltaCheckpoint,
    original_size,
)
from hf_ext.storage.files import copy, locked, rewrite, staged_folder
from hf_ext.storage.hub import absolute
from hf_ext.storage.layout import all_weights
from hf_ext.storage.open import base_of, open_checkpoint, open_files, require_depth
from hf_ext.storage.safetensors_file import SafetensorsFile
from hf_ext.storage.source import NoBase, TensorSource
from hf_ext.storage.tree import delete_folder, finish_deletion, link, recover

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
LONGEST_CHAIN = 8  # checkpoints that are decoded to read one; each costs as much time as the first


@dataclass(frozen=True)
class StoredCheckpoint(Sizes):
    """A checkpoint of a run. `base` is what it is stored against, None if it is plain or was compressed without a base."""

    name: str
    base: str | None

    @property
    def stored_against(self) -> str:
        """The base, for a table."""
        return self.base or ("(plain)" if self.compressed_bytes == self.original_bytes else "(no base)")


@dataclass(frozen=True)
class SeriesReport(Sizes):
    """The checkpoints of a run, oldest first, and the sums of their sizes. `str()` gives a table."""

    checkpoints: list[StoredCheckpoint]

    def __str__(self) -> str:
        rows = [(c.name, c.stored_against, c.original_bytes, c.compressed_bytes) for c in self.checkpoints]
        rows.append(("all", "", self.original_bytes, self.compressed_bytes))
        return table(
            ("checkpoint", "stored against", "original", "size", "of original"),
            [(name, base, f"{old:,}", f"{new:,}", percent(new / max(old, 1))) for name, base, old, new in rows],
        )


def compress_series(
    run: str | os.PathLike,
    base: str | os.PathLike,
    revision: str | None = None,
    keep: Collection[str] = (),
    until: int | None = None,
) -> SeriesReport:
    """Compresses the weights of a run's `checkpoint-N` folders in place, each against the base or the next newer checkpoint,
    whichever is estimated to make it smaller. All other files stay as they are.

    A checkpoint is decoded and checked before its plain weights are deleted. After a kill, each checkpoint is plain or
    compressed, and the next call resumes. Skips checkpoints that are compressed already or have no safetensors weights (only an
    adapter).

    Args:
        run: the `output_dir` of a Trainer, which must not be saving there.
        base: folder or Hub id of the model that the run started from.
        revision: branch, tag or commit of the base on the Hub; the commit it leads to is recorded.
        keep: names of checkpoints that stay plain.
        until: the last step to compress.

    Raises:
        BaseModelError: the base, or a checkpoint that one depends on, cannot be read.
        CheckpointError: there is no checkpoint with weights, one is quantized, the base is one of them, or the base is at the
            end of a long chain of compressed checkpoints.
    """
    run = Path(run)
    root = open_root(run, base, revision)
    with locked(run):
        recover(run)
        folders = checkpoints(run, until)
        if not folders:
            raise CheckpointError(f"{run} holds no checkpoint-N with safetensors weights; give the output_dir of a training.")
        for folder in folders:
            if folder.name not in keep and not is_compressed(folder):
                store(folder, root, newer_than(folder, folders))
        return inspect_series(run)


def inspect_series(run: str | os.PathLike) -> SeriesReport:
    """Returns how the checkpoints of a run are stored, without decoding them.

    Raises:
        CheckpointError: a checkpoint disappeared meanwhile.
        CorruptFileError: the header of a file is damaged or from a newer version.
    """
    try:
        stored = [_stored(folder) for folder in checkpoints(Path(run))]
    except OSError as error:
        raise CheckpointError(f"{run} changed while it was read: {error}") from error
    return SeriesReport(
        stored,
        original_bytes=sum(checkpoint.original_bytes for checkpoint in stored),
        compressed_bytes=sum(checkpoint.compressed_bytes for checkpoint in stored),
    )


def _stored(folder: Path) -> StoredCheckpoint:
    paths = all_weights(folder)
    size = original = sum(path.stat().st_size for path in paths)
    base = None
    if is_compressed(folder):
        files = [CompressedFile(path) for path in paths]
        original = sum(map(original_size, files))
        needed = needed_by(folder)
        base = needed.name if needed else base_of(files[0], folder)[0]
    return StoredCheckpoint(folder.name, base, original_bytes=original, compressed_bytes=size)


def remove_checkpoint(folder: str | os.PathLike, rebase: bool = False) -> None:
    """Deletes a checkpoint of a run.

    Args:
        folder: the folder `checkpoint-N`.
        rebase: if other checkpoints need this one, store them against another base first.

    Raises:
        CheckpointError: other checkpoints need it and `rebase` is off, or it is not a checkpoint.
        BaseModelError: `rebase` is on, but a base that the other checkpoints need is missing.
    """
    folder = Path(folder).absolute()
    run = folder.parent
    with locked(run):
        if CHECKPOINT.fullmatch(folder.name) and finish_deletion(folder):  # a kill interrupted an earlier call
            return
        if not CHECKPOINT.fullmatch(folder.name) or not folder.is_dir() or folder.is_symlink():
            raise CheckpointError(f"{folder} is not a checkpoint of a run; give a folder checkpoint-N.")
        recover(run)
        others = [other for other in checkpoints(run) if other != folder]
        needing = [other for other in others if needed_by(other) == folder]
        if needing and not rebase:
            raise CheckpointError(
                f"{folder} is needed to read {', '.join(other.name for other in needing)}. To delete it, store these "
                "against another base first: rebase=True (on the command line: --rebase)."
            )
        for other in needing:
            store(other, root_of(other), newer_than(other, others))
        delete_folder(folder)


def secure(run: Path, step: int, best: str | None = None) -> None:
    """Prepares a run for resuming from a step: no checkpoint may need another that a Trainer overwrites or deletes before it.

    Such checkpoints are later than the step, or older by the folder's time, which determines the order of deletion. The
    best checkpoint is kept longest. All that depend on these in the wrong order are stored against the base alone.
    """
    with locked(run):
        recover(run)
        for folder in checkpoints(run):
            try:
                needed = needed_by(folder)
            except HfExtError as error:  # a damaged checkpoint does not stop the training
                logger.warning(
                    f"{folder} cannot be read and is not changed. It may need a checkpoint that the training replaces: {error}"
                )
                continue
            if needed is None or not needed.exists():
                continue
            ordered = step_of(folder) < step_of(needed) <= step and in_order(folder, needed)
            if folder.name == best or not ordered:
                store(folder, root_of(folder))


def store(folder: Path, root: TensorSource, newer: Path | None = None) -> None:
    """Rewrites the weights of a checkpoint against the base `root` or the checkpoint `newer`, whichever is estimated to make
    them smaller."""
    bases = {None: root} | ({f"../{newer.name}": open_checkpoint(newer)} if newer else {})
    model = ModelFolder.open_compressed(folder) if is_compressed(folder) else ModelFolder.open_plain(folder)
    name = None
    if newer:
        weights = open_checkpoint(folder)
        name = min(bases, key=lambda name: estimate_size(weights, bases[name]).compressed_bytes)
    times = folder.stat()
    with staged_folder(folder) as stage:
        for path in model.others(stage):
            if path == Path(CONFIG):
                copy(folder / CONFIG, stage / CONFIG)
                rewrite(stage / CONFIG, remove_settings)
            elif (folder / path).is_file() and not (path == Path(CARD) and came_with_compression(folder / CARD)):
                link(folder / path, stage / path)
        write_with_card(model.sets, bases[name], stage, name, root=root)
        decode_all(open_files(stage), bases[name])  # before the plain weights are deleted
        model.copy_modes(stage)
    os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))  # a Trainer deletes checkpoints in the order of these times


def checkpoints(run: Path, until: int | None = None) -> list[Path]:
    """Returns the checkpoints of a run that have safetensors weights, up to a step, oldest first."""
    if not run.is_dir():
        return []
    folders = [path for path in run.iterdir() if CHECKPOINT.fullmatch(path.name) and path.is_dir() and all_weights(path)]
    return sorted((path for path in folders if until is None or step_of(path) <= until), key=step_of)


def step_of(folder: Path) -> int:
    """Returns the step of a checkpoint, from its name."""
    return int(folder.name.rpartition("-")[2])


def is_compressed(folder: Path) -> bool:
    """Checks whether the weights of a folder are compressed."""
    return any(KEY in SafetensorsFile(path).metadata for path in all_weights(folder)[:1])


def needed_by(folder: Path) -> Path | None:
    """Returns the checkpoint of the same run that this one is stored against; None if there is none."""
    if not is_compressed(folder):
        return None
    name, _ = base_of(CompressedFile(all_weights(folder)[0]), folder)
    needed = Path(os.path.abspath(folder / str(name)))
    return folder.parent / needed.name if needed.parent.resolve() == folder.parent.resolve() else None


def newer_than(folder: Path, folders: list[Path]) -> Path | None:
    """Returns the next of `folders`, to store this one against; None if there is none or the chain would become too long."""
    newer = next((other for other in folders if step_of(other) > step_of(folder)), None)
    if newer is None or not in_order(folder, newer):
        return None
    needs = {other: needed_by(other) for other in folders}

    def chain(checkpoint: Path) -> list[Path]:
        links = [checkpoint]
        while (needed := needs.get(links[-1])) and needed not in links:
            links.append(needed)
        return links

    before = max(links.index(folder) + 1 for links in map(chain, folders) if folder in links)
    after = chain(newer)
    return newer if folder not in after and before + len(after) <= LONGEST_CHAIN else None


def in_order(older: Path, newer: Path) -> bool:
    """Checks whether a Trainer deletes `older` first. It sorts by time, and by name if the times are equal."""
    return (os.path.getmtime(older), older.name) < (os.path.getmtime(newer), newer.name)


def open_root(run: Path, base: str | os.PathLike, revision: str | None = None) -> TensorSource:
    """Opens the base of a run."""
    root = open_checkpoint(absolute(base), revision)
    require_depth(root, LONGEST_CHAIN)
    for folder in {path.resolve().parent for path in root.paths}:
        if CHECKPOINT.fullmatch(folder.name) and folder.parent == run.resolve():
            raise CheckpointError(
                f"The base {base} is read from {folder}, which is a checkpoint of the run itself and may be deleted. Give the "
                "model that was fine-tuned."
            )
    return root


def root_of(folder: Path) -> TensorSource:
    """Returns the base at the end of a compressed checkpoint's chain: a plain one, or one compressed without a base."""
    checkpoint: TensorSource = open_checkpoint(folder)
    while isinstance(checkpoint, DeltaCheckpoint) and not isinstance(checkpoint.base, NoBase):
        checkpoint = checkpoint.base
    return checkpoint
