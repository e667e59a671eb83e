"""Compresses the folders of checkpoints: weights tensor by tensor, all other files copied, config.json updated."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from hf_ext.fm_delta.folder import ADDED_CARD, ModelFolder, card_record, is_compressed
from hf_ext.fm_delta.reports import CheckpointReport, report_of
from hf_ext.integration.cards import CARD, class_of, has_card, write_card
from hf_ext.storage.config_file import CONFIG, read_config
from hf_ext.storage.delta import DEFAULT_LEVEL
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.delta.source import RestoredFile, decode_all
from hf_ext.storage.delta.writer import Sets, write_model
from hf_ext.storage.files import copy_entries, require_another_folder, staged_folder
from hf_ext.storage.guards import require_new
from hf_ext.storage.hub import downloaded, within
from hf_ext.storage.layout import models_in
from hf_ext.storage.open import open_files, require_depth
from hf_ext.storage.source import NoBase, TensorSource
from hf_ext.storage.stored import Stored, open_counterpart


def compress_checkpoint(
    src: str | os.PathLike,
    base: str | os.PathLike | None,
    out: str | os.PathLike,
    revision: str | None = None,
    verify: bool = False,
    level: int = DEFAULT_LEVEL,
    base_id: str | None = None,
    overwrite: bool = False,
) -> CheckpointReport:
    """Writes a model's folder with its weights as lossless differences from a base model (FM-Delta, NeurIPS 2024).

    All files that hold no weights are copied. config.json gets a `quantization_config` entry, by which `from_pretrained` finds
    the base. If neither `src` nor `out` has a model card (README.md), `out` gets one, unless it holds a pipeline of diffusers.
    Memory: a few tensors.

    Args:
        src: folder or Hub id of a model with safetensors weights.
        base: folder or Hub id of the model that `src` was fine-tuned from, plain or compressed itself; or None to compress the
            weights without a base.
        out: folder to write. On failure it is unchanged.
        revision: branch, tag or commit of the base on the Hub; config.json records the commit. With
            `base_id`, records it as it is.
        verify: decode every tensor and compare it with the checksum of the one in `src`, before `out` is written.
        level: 1 is fast. 2 also searches for a low-rank part of every matrix's change, and 3 searches longer. Level 1 also
            reads a little faster.
        base_id: Hub id to record for the base if `base` is a local copy of it, so that others can load the result.
        overwrite: replace files of a folder that holds something else than a compressed model.

    Returns:
        The report of the compressed weights, as `inspect` gives it.

    Raises:
        CheckpointError: `src` has no safetensors weights, or is already compressed; `out` is `src` or the base,
            or holds other files.
        BaseModelError: the base cannot be read, or is not quantized as `src` is.
        CorruptFileError: a decoded tensor differs from the source; `out` is unchanged.
        ValueError: `revision` or `base_id` is given without a base.
    """
    if base is None and (revision or base_id):
        raise ValueError("revision and base_id require a base, but base is None")
    out = Path(out)
    require_another_folder(out, [src, base])
    with staged_folder(out, overwrite=overwrite or partial(is_result, out)) as stage:
        folder = ModelFolder.open_plain(downloaded(src))
        sources = []
        for model in folder.models:
            quantization = Stored(str(folder.path / model.place)).quantization
            sources.append(NoBase() if base is None else open_counterpart(base, model.place, revision, quantization))
            require_depth(sources[-1])
            require_another_folder(out, sources[-1].paths)
        copy_entries(folder.path, folder.others(out), stage)
        if not overwrite:
            require_new([Path(CARD)], stage, out)  # users edit it in an earlier result, too
        written: list[tuple[str, CompressedFile]] = []
        for model, source in zip(folder.models, sources):
            name, place = base_id and within(base_id, model.place), stage / model.place
            target = None if model.place else out  # the card is that of the whole pipeline
            write_with_card(model.sets, source, place, target, name=name, level=level, revision=revision)
            files = open_files(place)
            if verify:
                restored = [RestoredFile(file, source) for file in files]
                decode_all(restored)
            written += [(model.place, file) for file in files]
        folder.copy_modes(stage)
        return report_of(written)


def write_with_card(sets: Sets, base: TensorSource, out: Path, target: Path | None, **options: Any) -> None:
    """Compresses the weights of a model as `write_model` does, and adds a model card if there is none, in `out` or in `target`,
    where the files of `out` will go; without a target, adds none."""
    record = {}
    if target and (out / CONFIG).exists() and not has_card(out):
        record = card_record(target) if has_card(target) else ADDED_CARD
    info = write_model(sets, base, out, settings=record, target=target, **options)
    if record:
        figures = {"alone": info is None, "revision": info and info.revision, "model_class": class_of(out)}
        bases = [] if info is None else [info.name]
        library = "diffusers" if "_class_name" in read_config(out / CONFIG) else "transformers"
        write_card(out, "fm_delta", bases, "finetune", target=target, tags=["fm-delta"], library=library, **figures)


def is_result(folder: Path) -> bool:
    """Checks whether a folder holds a compressed model or pipeline, none of whose components is plain."""
    return all(is_compressed(folder / place) for place in models_in(folder))
