"""Tables and pictures for people."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_ext.errors import HfExtError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    """Writes a picture to a file; the suffix of its name selects the format.

    Raises:
        HfExtError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise HfExtError(f"The picture {path} could not be written: {error}") from error
