"""Writes tensors as differences from a base: files, and the weights of a model with the entry in its config.json."""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import CONFIG, FM_DELTA, HINT, add_settings
from hf_ext.storage.delta import DEFAULT_LEVEL, LEVELS
from hf_ext.storage.delta.codec import encode_raw
from hf_ext.storage.delta.file import MAX_USES, BaseInfo, CompressedWriter, digest_of
from hf_ext.storage.files import rewrite
from hf_ext.storage.hub import absolute, name_from
from hf_ext.storage.prefetch import Prefetcher, progress, threads_for
from hf_ext.storage.safetensors_file import SafetensorsFile, TensorFile, float_name
from hf_ext.storage.source import NoBase, TensorSource, fingerprint_of, sample

logger = logging.getLogger(__name__)

Sets: TypeAlias = Sequence[Sequence[TensorFile]]


def write_delta(
    sets: Sets,
    base: TensorSource,
    out: str | os.PathLike,
    name: str | None = None,
    level: int = DEFAULT_LEVEL,
    revision: str | None = None,
) -> tuple[BaseInfo | None, list[str]]:
    """Compresses files of tensors into files of the same names. Memory: a few tensors. Returns what the files record: the base
    if there is one, and a digest of the tensors of each set of files.

    Args:
        sets: files that are read together, such as the shards of one checkpoint.
        base: the model that predicts the tensors, or `NoBase`.
        out: folder to write into.
        name: the base's name to record, instead of its own.
        revision: the base's commit to record with `name`, if it has none itself.
        level: 1 is fast; 2 looks for a low-rank part of every matrix's change, and 3 longer.
    """
    alone = isinstance(base, NoBase)
    if level != LEVELS[0] and not alone:
        importlib.import_module("hf_ext.storage.delta.low_rank")  # imports PyTorch before threads limit their number of threads
    files = [file for shards in sets for file in shards]
    base_names = {file.path: names for shards in sets for file, names in zip(shards, _base_names(shards, base))}
    recorded = base.revision or (revision if name else None)
    info = None if alone else BaseInfo(name or absolute(base.name), recorded, base.fingerprint)
    writers: dict[str, CompressedWriter] = {}
    samples: dict[Path, dict[str, bytes]] = {file.path: {} for file in files}
    with progress("Compressing", sum(len(file.entries) for file in files)) as bar:
        for file in files:
            writer = writers[file.path.name] = CompressedWriter(Path(out, file.path.name), file, info)
            # Memory, roughly: a payload with a base is rarely larger than a quarter of its tensor, which counts if not mapped.
            mapped, names = isinstance(file, SafetensorsFile), base_names[file.path]
            sizes = {name: entry.nbytes // (4 if mapped and names[name] else 1) for name, entry in file.entries.items()}

            def encode(name: str, file: TensorFile = file) -> bytes:
                base_name, tensor = base_names[file.path][name], file[name]
                samples[file.path][name] = sample(name, tensor)
                base_tensor, threads = None if base_name is None else base.read(base_name), threads_for(tensor.data.size)
                payload = encode_raw(tensor, base_tensor, name, base_name or "", threads, level)
                if base_name is not None:
                    base.release(base_name)
                file.release(name)
                return payload

            with closing(writer):
                for name, payload in Prefetcher(encode, sizes):
                    writer.add(name, payload)
                    bar.update()
    digests = []
    for shards in sets:
        fingerprint = fingerprint_of({name: part for file in shards for name, part in samples[file.path].items()})
        group = [writers[file.path.name] for file in shards]
        digests.append(digest_of((header.name, header.checksum) for writer in group for header in writer.headers))
        for writer in group:
            writer.finish(digests[-1], fingerprint)
    if not alone and not any(header.base_name for writer in writers.values() for header in writer.headers):
        logger.warning(f"No tensor of these weights matches one of the base {base}; is this the right base?")
    return info, digests


def write_model(
    sets: Sets,
    base: TensorSource,
    out: Path,
    name: str | None = None,
    level: int = DEFAULT_LEVEL,
    settings: dict | None = None,
    revision: str | None = None,
    target: Path | None = None,
) -> BaseInfo | None:
    """Compresses the weights of a model into a folder, where its config.json is already, and adds the `quantization_config`
    entry to that. Returns what is recorded of the base. Raises CheckpointError if the base lies in these files.

    Args:
        sets, base, out, name, level, revision: see `write_delta`. The set that `from_pretrained` reads comes first.
        settings: more values for the entry.
        target: the folder that the files of `out` will go to. Its config.json names a base beside it by a relative path.
    """
    src = sets[0][0].path.parent
    if any(path.parent.samefile(src) for path in base.paths):
        raise CheckpointError(f"{src} is the base model itself, or the base needs it; give the folder of a fine-tune of it.")
    entries = sets[0][0].entries
    info, _ = write_delta(sets, base, out, name, level, revision)
    dtype = float_name(entries[key].dtype for key in sorted(entries))
    name, revision = (None, None) if info is None else (name_from(target or out, info.name), info.revision)
    entry = {"quant_method": FM_DELTA, "hint": HINT, "base": name, "revision": revision, "dtype": dtype}
    rewrite(out / CONFIG, lambda text: add_settings(text, entry | (settings or {})))
    return info


def _base_names(shards: Sequence[TensorFile], base: TensorSource) -> list[dict[str, str | None]]:
    """Returns, for each file, the name of the base's tensor that predicts each of its tensors."""
    uses: Counter[str | None] = Counter()

    def base_name_of(name: str) -> str | None:
        base_name = base.twin_of(name)
        uses[base_name] += 1
        return base_name if uses[base_name] <= MAX_USES else None

    return [{name: base_name_of(name) for name in file.entries} for file in shards]
