"""Tables and pictures for people."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_ext.errors import HfExtError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's bright scheme: color-blind readers can tell them apart, on white and on dark paper.
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
PALE = "#bbbbbb"  # what the colored parts are compared with


def bytes_of(size: int | str) -> float | None:
    """Returns the bytes of a size such as 50000000 or "50MB" (of 10⁶ bytes); None if it is none. May be infinite."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", str(size).upper())
    number = float(match[1]) * 1000 ** " KMGT".index(match[2] or " ") if match else 0.0
    return number or None


def megabytes(size: float) -> str:
    """Returns a number of bytes in MB of 10⁶ bytes, with the unit."""
    return f"{size / 1e6:.2f} MB"


def percent(share: float | None, digits: int = 1) -> str:
    """Returns a share of 1 in percent, with the sign, or a dash."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Returns a table as text, with columns of numbers aligned right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    numeric = [bool(rows) and all(re.match(r"[\d–]", row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric)
        ).rstrip()
        for row in (header, tuple("-" * width for width in widths), *rows)
    ]
    return "\n".join(lines)


def markdown_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.strip() for cell in row)} |" for row in lines)


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty picture of this size in inches.

    Raises:
        HfExtError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HfExtError("Drawing requires matplotlib: pip install matplotlib.") from error
    return Figure(figsize=(width, height), layout="constrained")


def label(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Gives a panel of a picture its title, the names and units of its axes, and the style that all pictures share."""
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.set_xlabel(x, fontsize="small")
    axes.set_ylabel(y, fontsize="small")
    axes.tick_params(labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes, title: str | None = None, outside: bool = False) -> None:
    """Explains the colors of a panel, within it or at its right."""
    place = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if outside else {}
    axes.legend(title=title, fontsize="small", title_fontsize="small", frameon=False, **place)


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    """Writes a picture to a file; the suffix of its name selects the format.

    Raises:
        HfExtError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise HfExtError(f"The picture {path} could not be written: {error}") from error
