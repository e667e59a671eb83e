"""The report of a compressed checkpoint: the sizes of its tensors as numbers, a table and a picture."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_ext.display import COLORS, PALE, label, legend, megabytes, new_figure, percent, save_figure, table
from hf_ext.fm_delta.folder import compressed_in
from hf_ext.storage.delta.codec import stored_factors
from hf_ext.storage.delta.file import CompressedFile
from hf_ext.storage.delta.payload import STORED, Header
from hf_ext.storage.delta.source import original_size
from hf_ext.storage.hub import local_copy
from hf_ext.storage.open import base_of, open_files

KINDS = {
    "embedding": r"embed|wte|wpe",
    "norm": r"norm|\bln_",
    "attention": r"attn|attention|query|key|value|[qkvo]_proj|c_attn",
    "mlp": r"mlp|intermediate|output\.dense|fc\d?|gate|up_proj|down_proj|experts|ffn",
}


@dataclass(frozen=True)
class TensorReport:
    """One tensor; sizes are in bytes. `how` is "delta" (predicted by the base), "resized" (its first rows are predicted),
    "alone" (coded without the base), or "stored". `rank` is that of the low-rank part of the change, 0 where such a part would
    not have made the file smaller."""

    name: str
    kind: str
    how: str
    dtype: str
    shape: tuple[int, ...]
    parameters: int
    original_bytes: int
    compressed_bytes: int
    rank: int = 0

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.compressed_bytes / max(self.parameters, 1)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of weights in bytes, before and after compression."""

    original_bytes: int = 0
    compressed_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Compressed size as a share of the original."""
        return self.compressed_bytes / max(self.original_bytes, 1)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON holds it."""
        return asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True)
class CheckpointReport(Sizes):
    """The report of a compressed checkpoint. `str()` gives a table. Sizes are those of whole files, headers included.

    `base` is None if the checkpoint was compressed without one.
    """

    base: str | None
    revision: str | None
    tensors: list[TensorReport]

    def __str__(self) -> str:
        return "\n\n".join((self.tensor_table(), self.kind_table(), self.summary()))

    def summary(self) -> str:
        if self.base is None:
            return f"{self.sizes()}, without a base"
        return f"{self.sizes()}, base {self.base}" + (f" at {self.revision}" if self.revision else "")

    def sizes(self) -> str:
        return f"{megabytes(self.compressed_bytes)} of {megabytes(self.original_bytes)} ({percent(self.ratio)})"

    def tensor_table(self) -> str:
        rows = [
            (t.name, t.kind, t.how, str(t.rank or ""), t.dtype, "×".join(map(str, t.shape)) or "1", *_sizes([t]))
            for t in self.tensors
        ]
        return table(("tensor", "kind", "how", "rank", "type", "shape", "bits/parameter", "size", "of original"), rows)

    def kind_table(self) -> str:
        rows = [
            (kind, f"{sum(t.parameters for t in group):,}", *_sizes(group))
            for kind, group in self._groups(lambda t: t.kind).items()
        ]
        return table(
            ("kind", "parameters", "bits/parameter", "size", "of original"),
            [*rows, ("all", f"{sum(t.parameters for t in self.tensors):,}", *_sizes(self.tensors))],
        )

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the size of each layer, compressed by kind on top of the original, to an image file.

        Raises:
            HfExtError: matplotlib is not installed, or the file cannot be written.
        """
        layers = self._groups(lambda t: _layer(t.name))
        figure = new_figure(max(6.0, 0.35 * len(layers) + 3), 4.5)
        axes = figure.subplots()
        positions = range(len(layers))
        axes.bar(positions, [_mb(t.original_bytes for t in group) for group in layers.values()], color=PALE, label="original")
        below = [0.0] * len(layers)
        for kind, color in zip([*KINDS, "other"], COLORS):
            sizes = [_mb(t.compressed_bytes for t in group if t.kind == kind) for group in layers.values()]
            if any(sizes):
                axes.bar(positions, sizes, bottom=below, color=color, label=f"{kind}, compressed")
                below = [a + b for a, b in zip(below, sizes)]
        axes.set_xticks(
            list(positions), list(layers), rotation=45 if len(layers) > 8 else 0, ha="right" if len(layers) > 8 else "center"
        )
        label(axes, f"Size of each layer: {self.sizes()}", "layer", "MB")
        legend(axes, outside=True)
        save_figure(figure, path)

    def _groups(self, key: Callable[[TensorReport], str]) -> dict[str, list[TensorReport]]:
        groups: dict[str, list[TensorReport]] = {}
        for tensor in self.tensors:
            groups.setdefault(key(tensor), []).append(tensor)
        return groups


def inspect(src: str | os.PathLike) -> CheckpointReport:
    """Returns the report of a compressed folder, file or Hub repository, without decoding it and without its base.

    Raises:
        CheckpointError: `src` does not exist.
        CorruptFileError: a file is not compressed, damaged or from a newer version.
    """
    folder = local_copy(src)
    return report_of([(place, file) for place in compressed_in(folder) for file in open_files(folder / place)])


def report_of(opened: Sequence[tuple[str, CompressedFile]]) -> CheckpointReport:
    """Returns the report of compressed files, each with the component of a pipeline that it belongs to, or ''."""
    tensors = [
        TensorReport(
            f"{place}/{name}" if place else name,
            _kind(name),
            _how(header),
            header.dtype,
            header.shape,
            header.values,
            file.original[name].nbytes,
            file.payload(name).size,
            _rank(file, name),
        )
        for place, file in opened
        for name, header in sorted(file.headers.items(), key=lambda item: _natural(item[0]))
    ]
    place, first = next((pair for pair in opened if pair[1].base), opened[0])
    files, (base, revision) = [file for _, file in opened], base_of(first, first.path.parent)
    if base and place:  # a component: names the base of the pipeline, as seen from the pipeline's folder
        base = base.removesuffix(f"/{place}").removeprefix("../" if base.startswith(os.pardir) else "")
    return CheckpointReport(
        base,
        revision,
        tensors,
        original_bytes=sum(map(original_size, files)),
        compressed_bytes=sum(file.path.stat().st_size for file in files),
    )


def _rank(file: CompressedFile, name: str) -> int:
    factors = stored_factors(file.payload(name), file.headers[name])
    return 0 if factors is None else len(factors.columns)


def _how(header: Header) -> str:
    if header.mode == STORED:
        return "stored"
    if not header.base_values:
        return "alone"
    return "delta" if header.base_values == header.values else "resized"


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def _layer(name: str) -> str:
    """Returns the first number in a name. Without a number, returns the module's name, apart from `dense`."""
    if number := re.search(r"\.(\d+)\.", name):
        return number[1]
    return "embedding" if _kind(name) == "embedding" else re.sub(r"(?<=.)(\.dense)?\.\w+$", "", name).split(".")[-1]


def _natural(name: str) -> list:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _sizes(tensors: Iterable[TensorReport]) -> tuple[str, str, str]:
    tensors = list(tensors)
    size, original = sum(t.compressed_bytes for t in tensors), sum(t.original_bytes for t in tensors)
    bits = 8 * size / max(sum(t.parameters for t in tensors), 1)
    return f"{bits:.2f}", f"{size:,}", percent(size / original) if original else "–"


def _mb(sizes: Iterable[int]) -> float:
    return sum(sizes) / 1e6
