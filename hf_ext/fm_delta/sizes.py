"""Sizes before and after compression, as all reports have them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of weights in bytes.

    Attributes:
        original_bytes: before compression.
        compressed_bytes: after it.
    """

    original_bytes: int = 0
    compressed_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Compressed size as a share of the original."""
        return self.compressed_bytes / max(self.original_bytes, 1)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON holds it."""
        return asdict(self) | {"ratio": self.ratio}
