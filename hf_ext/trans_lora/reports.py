"""The report of a transfer: counts, variety, distance to seeds and real inputs, and agreement with the teacher."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import get_logger

from hf_ext.display import COLORS, label, legend, new_figure, percent, save_figure, table
from hf_ext.errors import HfExtError
from hf_ext.storage.files import write_atomically
from hf_ext.trans_lora.duplicates import words_of
from hf_ext.trans_lora.statistics import distinct, mmd, nearest, plane

logger = get_logger(__name__)

COLOR_OF = {"seeds": "black", "kept": COLORS[0], "dropped": COLORS[1]}


@dataclass(frozen=True)
class Nearest:
    """The synthetic input that is nearest to a seed, by the Jaccard index of their three-word runs: 1 says the same."""

    seed: str
    input: str
    similarity: float


@dataclass(frozen=True)
class TransferReport:
    """The report of a transfer. `str()` gives a table.

    Attributes:
        source, target: the models.
        prompt: the prompt that the student was trained with, with {input} in place of an input.
        filter: the filter of the inputs.
        counts: numbers of kept inputs, and of dropped ones by reason.
        trained, held_out, unlabelled: numbers of kept inputs that were trained on, held out, or left without a complete label.
        distinct: distinct-1 to distinct-3 of kept inputs and of seeds.
        lengths: number of words of each seed, each kept and each dropped input.
        mmd: maximum mean discrepancy between kept or dropped inputs and the seeds, for unit embeddings under
            a Gaussian kernel whose width is the median of all distances between these three.
        mmd_to_real: the same between kept or dropped inputs and real inputs, with the same kernel; empty without real inputs.
        nearest: the nearest synthetic input of each seed.
        agreement: share of the held-out inputs that the student answers word for word as the teacher; None without such inputs.
        encoder: name of the model that computed the embeddings.
        map: the two principal components of the embeddings of seeds, kept and dropped inputs.
    """

    source: str
    target: str
    prompt: str
    filter: str
    counts: dict[str, int]
    trained: int
    held_out: int
    unlabelled: int
    distinct: dict[str, list[float]]
    lengths: dict[str, list[int]]
    mmd: dict[str, float]
    mmd_to_real: dict[str, float]
    nearest: list[Nearest]
    agreement: float | None
    encoder: str
    map: dict[str, list[tuple[float, float]]]

    @property
    def attempts(self) -> int:
        return sum(self.counts.values())

    @property
    def acceptance_rate(self) -> float:
        """Returns the share of kept inputs among all written inputs."""
        return self.counts.get("kept", 0) / max(self.attempts, 1)

    def to_dict(self) -> dict:
        return asdict(self) | {"attempts": self.attempts, "acceptance_rate": self.acceptance_rate}

    def rows(self) -> list[tuple[str, str]]:
        """Returns the figures with their names."""
        rows = [("inputs written", f"{self.attempts:,}")]
        rows += [(f"  {name}", f"{count:,} ({percent(count / self.attempts)})") for name, count in self.counts.items()]
        rows.append(
            ("trained on / held out / without a whole label", f"{self.trained:,} / {self.held_out:,} / {self.unlabelled:,}")
        )
        for name, values in self.distinct.items():
            rows.append((f"distinct 1-, 2-, 3-grams, {name}", " / ".join(f"{value:.3f}" for value in values)))
        rows += [(f"words, {name}", _spread(values)) for name, values in self.lengths.items() if values]
        rows += [(f"MMD to the seeds, {name}", f"{value:.3f}") for name, value in self.mmd.items()]
        rows += [(f"MMD to the real inputs, {name}", f"{value:.3f}") for name, value in self.mmd_to_real.items()]
        if self.nearest:
            closest = max(self.nearest, key=lambda one: one.similarity)
            rows.append(("likeness of the input nearest to a seed", f"{closest.similarity:.2f} (1 is the same)"))
        if self.agreement is not None:
            rows.append((f"student answers as the teacher ({self.held_out:,} held-out inputs)", percent(self.agreement)))
        return rows

    def __str__(self) -> str:
        return f"{table(('transfer', ''), self.rows())}\n\n{self.summary()}"

    def summary(self) -> str:
        text = f"{self.source} → {self.target}: {self.counts.get('kept', 0):,} of {self.attempts:,} inputs kept ({self.filter})"
        return text if self.agreement is None else f"{text}, the student answers as the teacher on {percent(self.agreement)}"

    def save(self, folder: str | os.PathLike) -> None:
        """Writes report.json, and report.png where matplotlib is installed."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
        write_atomically(Path(folder, "report.json"), lambda beside: beside.write_text(text, encoding="utf-8"))
        try:
            self.plot(Path(folder, "report.png"))
        except HfExtError as error:
            logger.warning(f"The report was not drawn: {error}")

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the numbers of kept and dropped inputs, their lengths, and a map of them.

        Raises:
            HfExtError: matplotlib is not installed, or the file cannot be written.
        """
        figure = new_figure(12, 3.8)
        bars, lengths, points = figure.subplots(1, 3, width_ratios=(1.1, 1, 1.2))
        names = list(self.counts)
        colors = [COLOR_OF["kept" if name == "kept" else "dropped"] for name in names]
        bars.bar_label(bars.barh(names, list(self.counts.values()), color=colors), fontsize="x-small", padding=2)
        bars.margins(x=0.15)
        bars.invert_yaxis()
        longest = max((max(values) for values in self.lengths.values() if values), default=1)
        edges = [longest * i / 24 for i in range(25)]
        for name in ("kept", "dropped"):
            lengths.hist(self.lengths[name], edges, color=COLOR_OF[name], alpha=0.6, label=name)
        for i, value in enumerate(self.lengths["seeds"]):
            style = {"linewidth": 0.8, "linestyle": ":", "label": "" if i else "seeds"}
            lengths.axvline(value, color=COLOR_OF["seeds"], **style)
        for name in ("dropped", "kept", "seeds"):
            if self.map.get(name):
                x, y = zip(*self.map[name])
                style = {"marker": "*", "s": 70} if name == "seeds" else {"marker": "o", "s": 9, "alpha": 0.5}
                points.scatter(x, y, color=COLOR_OF[name], label=name, linewidths=0, **style)
        points.set_xticks([])
        points.set_yticks([])
        label(bars, f"{self.attempts:,} inputs written", "inputs")
        label(lengths, "Length of the inputs", "words", "inputs")
        label(points, "Map of the embeddings", "first principal component", "second")
        legend(lengths)
        legend(points)
        save_figure(figure, path)


def describe(texts: Mapping[str, Sequence[str]], embeddings: Mapping[str, torch.Tensor], real: torch.Tensor) -> dict[str, Any]:
    """Returns the part of a report that depends only on the texts.

    Args:
        texts: "seeds", "kept" and "dropped" inputs.
        embeddings: of these texts, or of some of them, (n, d) each.
        real: embeddings of real inputs, (n, d), if there are any. They change neither the kernel nor the map.
    """
    seeds, kept = texts["seeds"], texts["kept"]
    points = plane(torch.cat(list(embeddings.values())))
    spots = points.split([len(part) for part in embeddings.values()])
    written = {name: part for name, part in embeddings.items() if name != "seeds" and len(part)}
    width = _width(embeddings)
    return {
        "distinct": {name: [distinct(texts[name], n) for n in (1, 2, 3)] for name in ("seeds", "kept")},
        "lengths": {name: [len(words_of(text)) for text in part] for name, part in texts.items()},
        "mmd": {name: mmd(embeddings["seeds"], part, width) for name, part in written.items() if seeds},
        "mmd_to_real": {name: mmd(real, part, width) for name, part in written.items() if len(real)},
        "nearest": [Nearest(seed, *nearest(seed, kept)) for seed in seeds] if kept else [],
        "map": {name: [(round(x, 4), round(y, 4)) for x, y in part.tolist()] for name, part in zip(embeddings, spots)},
    }


def _width(embeddings: Mapping[str, torch.Tensor]) -> float:
    """Returns the width of one kernel for all discrepancies, so that they can be compared."""
    distances = torch.pdist(torch.cat(list(embeddings.values())).double())
    return (distances.median().item() if len(distances) else 0.0) or 1.0


def _spread(values: list[int]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]} – {ordered[len(ordered) // 2]} – {ordered[-1]} (least, median, most)"
