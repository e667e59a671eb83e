"""An estimate of a checkpoint's compressed size, from a few of its tensors."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from hf_ext.display import megabytes, percent
from hf_ext.fm_delta.folder import ModelFolder
from hf_ext.fm_delta.sizes import Sizes
from hf_ext.storage.delta import DEFAULT_LEVEL
from hf_ext.storage.delta.codec import encode_raw
from hf_ext.storage.hub import downloaded
from hf_ext.storage.open import open_checkpoint
from hf_ext.storage.prefetch import progress, threads_for
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.storage.source import NoBase, TensorSource

SAMPLES = 2  # of the tensors that differ only in the numbers of their names, as those of equal layers do


@dataclass(frozen=True)
class SizeEstimate(Sizes):
    """An estimate of a checkpoint's compressed size. Sizes are in bytes, without the headers of files.

    Attributes:
        base: None without a base.
        sampled_bytes: size of the tensors that were compressed for the estimate.
    """

    base: str | None
    sampled_bytes: int

    def summary(self) -> str:
        """Returns the estimate in one line."""
        base = "without a base" if self.base is None else f"base {self.base}"
        sizes = f"about {megabytes(self.compressed_bytes)} of {megabytes(self.original_bytes)}"
        sampled = 100 * self.sampled_bytes / max(self.original_bytes, 1)
        return f"{sizes} ({percent(self.ratio)}), {base}; estimated from {sampled:.0f} % of the weights"


def estimate(
    src: str | os.PathLike, base: str | os.PathLike | None, revision: str | None = None, level: int = DEFAULT_LEVEL
) -> SizeEstimate:
    """Estimates the size that `compress_checkpoint` would give. Writes nothing.

    Takes two tensors of each kind, such as the query projections of all layers, and compresses those.

    Args:
        src, base, revision, level: as in `compress_checkpoint`.

    Raises:
        CheckpointError, BaseModelError: as in `compress_checkpoint`.
    """
    src = downloaded(src)
    ModelFolder.open_plain(src)  # raises what compressing would raise
    return estimate_size(open_checkpoint(src), NoBase() if base is None else open_checkpoint(base, revision), level)


def estimate_size(source: TensorSource, base: TensorSource, level: int = DEFAULT_LEVEL) -> SizeEstimate:
    """Estimates the size of a checkpoint that is compressed against a base, or `NoBase`."""
    kinds: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name in source.names():
        entry = source.entry(name)
        kinds[re.sub(r"\d+", "#", name), entry.dtype, entry.shape].append(name)
    original = compressed = sampled = 0
    with progress("Compressing some", len(kinds)) as bar:
        for names in kinds.values():
            chosen = sorted({names[len(names) * (2 * i + 1) // (2 * SAMPLES)] for i in range(SAMPLES)})
            tensors = [source.read(name) for name in chosen]
            total, sample = (sum(source.entry(name).nbytes for name in group) for group in (names, chosen))
            sizes = [len(_compressed(name, tensor, base, level)) for name, tensor in zip(chosen, tensors)]
            original, sampled = original + total, sampled + sample
            compressed += round(sum(sizes) * total / sample) if sample else sum(sizes)
            bar.update()
    base_name = None if isinstance(base, NoBase) else str(base.name)
    return SizeEstimate(base_name, sampled, original_bytes=original, compressed_bytes=compressed)


def _compressed(name: str, tensor: RawTensor, base: TensorSource, level: int) -> bytes:
    twin = base.twin_of(name)
    prior = None if twin is None else base.read(twin)
    return encode_raw(tensor, prior, name, twin or "", threads_for(tensor.data.size), level)
