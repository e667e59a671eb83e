"""Tables for people to read in a terminal."""

from __future__ import annotations

import re


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns under a header, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    numeric = [bool(rows) and all(re.match(r"[\d–]", row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric)
        ).rstrip()
        for row in (header, tuple("-" * width for width in widths), *rows)
    ]
    return "\n".join(lines)
