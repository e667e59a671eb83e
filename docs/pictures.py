"""Draws the charts of the pages into docs/assets: python docs/pictures.py [FOLDER]

The charts are as wide as a phone: their panels stand below each other. Most charts read the tables of the pages, so that each
number stands in one place. Run this program again when a table changes. `emr_election` computes a small example.
The diagrams (choosing.svg, delta.svg, pissa_split.svg, connector.svg) are written by hand.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from hf_ext.display import COLORS, PALE, label, legend, new_figure

DOCS = Path(__file__).parent
WIDTH = 4.6  # of a chart in inches, which a phone shows without making it much smaller
INK = "#010203"  # replaced by the color of text, which depends on the reader's setting
STYLE = "<style>svg { color: #24292f } @media (prefers-color-scheme: dark) { svg { color: #d7dae0 } }</style>"
matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "hf_ext",
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
)


@dataclass(frozen=True)
class Chart:
    """Bars of columns of a table, a panel for each column.

    Attributes:
        page: where the table is.
        columns: headings of the table's columns, each with the title of its panel.
        unit: of all columns, or of each.
        shared: whether the panels have one scale.
        ours: the column or row that is colored, where it is not the row in bold.
    """

    page: str
    columns: dict[str, str]
    unit: str | tuple[str, ...]
    shared: bool = False
    ours: str = ""


CHARTS = {
    "fm_delta_language_model": Chart(
        "benchmarks.md",
        {
            "full, 29 % changed": "Full fine-tune:\n269 → 16.7 MB",
            "merged LoRA, 10 %": "Merged LoRA:\n269 → 6.1 MB",
            "light, 1.7 %": "Light fine-tune:\n269 → 1.6 MB",
        },
        "% of 269 MB",
    ),
    "uni_med_mixture": Chart(
        "benchmarks.md",
        {"exact: projector": "Projector alone", "exact: CMoE": "CMoE, five experts"},
        "share of exact answers",
        shared=True,
        ours="exact: CMoE",
    ),
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_table(page: str, columns: list[str]) -> dict[str, list[str]]:
    """Returns the numbers of these columns, as they are written, for each row of the first table that has them.

    Labels of rows keep their asterisks.

    Raises:
        ValueError: the page has no such table.
    """
    blocks = re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    for header, _, *rows in map(str.splitlines, blocks):
        names = [name.strip("*") for name in cells(header)]
        if set(columns) <= set(names):
            places = [names.index(name) for name in columns]
            lines = [cells(row) for row in rows]
            found = {line[0].replace("`", ""): [number(line[place]) for place in places] for line in lines}
            return {name: values for name, values in found.items() if any(values)}
    raise ValueError(f"{page} has no table with the columns {', '.join(columns)}. Change docs/pictures.py with the table.")


def number(cell: str) -> str:
    """Returns the first number in a cell, "" without one."""
    found = re.search(r"-?\d[\d,]*\.?\d*", cell)
    return found[0].replace(",", "") if found else ""


def bars(chart: Chart) -> Figure:
    rows = read_table(chart.page, list(chart.columns))
    names = [textwrap.fill(name.replace("**", ""), 28) for name in rows]
    across = 1 if len(chart.columns) <= 3 else 2
    down = math.ceil(len(chart.columns) / across)
    lines = sum(1 + 0.5 * name.count("\n") for name in names)
    figure = new_figure(WIDTH, down * (0.25 * lines + 0.8))
    panels = figure.subplots(down, across, sharey=True, sharex=chart.shared, squeeze=False).flat
    units = [chart.unit] * len(chart.columns) if isinstance(chart.unit, str) else chart.unit
    for i, (axes, (column, title), unit) in enumerate(zip(panels, chart.columns.items(), units)):
        values = [row[i] for row in rows.values()]
        ours = [chart.ours in (column, name) or "**" in name or "hf_ext" in name for name in rows]
        sizes, colors = [float(value or 0) for value in values], [COLORS[0] if own else PALE for own in ours]
        axes.bar_label(axes.barh(names, sizes, color=colors), values, fontsize="x-small", padding=2)
        axes.margins(x=0.18)
        label(axes, title if across == 1 else textwrap.fill(title, 17), unit)
        axes.tick_params(axis="y", labelsize="x-small")
    figure.axes[0].invert_yaxis()
    return figure


def emr_curves() -> Figure:
    """Size and accuracy of the methods that store many fine-tunes of one base, each a curve."""
    figure = new_figure(WIDTH, 5.6)
    panels = {"MiniLM, five classifiers": "five classifiers", "SmolLM2, three generated answers": "generated answers"}
    for axes, (title, task) in zip(figure.subplots(2, 1), panels.items()):
        curves = {name: [] for name in ("hf_ext", "UltraDelta", "T-Switch", "BitDelta", "EMR", "FM-Delta")}
        for name, (bits, share, _) in read_table("benchmarks.md", ["bits", "of single", task]).items():
            curves.get(name.replace("*", "").partition(",")[0], []).append((float(bits), float(share)))
        for (name, points), color in zip(curves.items(), COLORS):
            axes.plot(*zip(*sorted(points)), "o-", color=color, ms=4, label=name)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        label(axes, title, "bits per parameter and task", "accuracy, % of the single models")
    legend(axes)
    return figure


def emr_election() -> Figure:
    """Three tasks of ten parameters: their changes, what they elect, and what each gets back."""
    base = np.zeros(10)
    draw = np.random.default_rng(12)
    tasks = (draw.normal(0, 1, 10) + draw.normal(0, 1, (3, 10))).round(1)
    sign = np.where(tasks.sum(0) > 0, 1, -1)
    unified = sign * np.maximum(sign * tasks, 0).max(0)
    figure = new_figure(WIDTH, 5.2)
    names = ["Task A", "Task B", "Task C"]
    panels = figure.subplot_mosaic([names, ["unified"] * 3, [f"{name} again" for name in names]], sharey=True)
    positions = np.arange(1, len(base) + 1)
    for name, task, color in zip(names, tasks, COLORS):
        mask = sign * task > 0
        scale = np.abs(task).sum() / np.abs(mask * unified).sum()
        panels[name].bar(positions, task, color=color)
        label(panels[name], name)
        again = panels[f"{name} again"]
        again.bar(positions, scale * mask * unified, color=color, label="λ × mask × elected")
        again.step(np.arange(0.5, 11), [*task, task[-1]], where="post", color=INK, lw=0.8, label="the task's change")
        again.scatter(positions, np.full(10, -3.5), marker="s", s=14, color=INK, facecolor=np.where(mask, INK, "none"), lw=0.6)
        label(again, f"{name}, λ = {scale:.2f}")
    panels["unified"].bar(positions, unified, color=PALE)
    label(panels["unified"], "Elected: sign of the sum, largest change of that sign")
    again.scatter([], [], marker="s", s=14, color=INK, label="in the mask")
    figure.legend(*again.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    for axes in panels.values():
        axes.axhline(0, color=INK, lw=0.6)
        axes.set_xticks([])
    panels["Task B again"].set_xlabel("ten parameters", fontsize="small")
    for name in ("Task A", "unified", "Task A again"):
        panels[name].set_ylabel("change", fontsize="small")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes an SVG without a background, whose text has the color of the reader's setting."""
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    text = path.read_text(encoding="utf-8").replace(INK, "currentColor")
    path.write_text(re.sub(r"(<svg .*?>)", rf"\1\n {STYLE}", text, count=1, flags=re.DOTALL), encoding="utf-8")


def main(folder: str = str(DOCS / "assets")) -> None:
    for name, chart in CHARTS.items():
        save(bars(chart), Path(folder, f"{name}.svg"))
    for draw in (emr_curves, emr_election):
        save(draw(), Path(folder, f"{draw.__name__}.svg"))


if __name__ == "__main__":
    main(*sys.argv[1:])
