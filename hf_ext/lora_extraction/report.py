"""The report of an extracted LoRA: its layers, what it keeps of the change, and what it does not carry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_ext.display import megabytes, percent, table

MOST_ENDINGS = 8  # of names that a summary lists


class _Kept:
    """The share of a change that a LoRA keeps."""

    change: float
    kept: float

    @property
    def energy(self) -> float:
        """Share of the change's energy that the LoRA keeps."""
        return min(max(self.kept, 0.0) / max(self.change, 1e-300), 1.0)

    @property
    def error(self) -> float:
        """Frobenius norm of the rest of the change, relative to that of the change."""
        return math.sqrt(1 - self.energy)


@dataclass(frozen=True)
class LayerLora(_Kept):
    """The LoRA of one layer.

    Attributes:
        change: energy of the fine-tune's change: the sum of its squares.
        kept: energy of the LoRA.
        size: bytes of the factors.
    """

    layer: str
    rank: int
    change: float
    kept: float
    size: int


@dataclass(frozen=True)
class LoraReport(_Kept):
    """An extracted LoRA. `str()` gives a table of its layers and the summary.

    Attributes:
        layers: the adapted layers.
        size: bytes of the adapter's weights.
        original_size: bytes of the fine-tune's tensors.
        whole: modules that the adapter holds whole, and embeddings of which it holds rows.
        omitted: energies of the changes that the adapter does not carry, by tensor; None if the base has no counterpart, or
            the tensor does not hold floats.
        added_tokens: number of tokens that the base lacks and the adapter does not carry.
        resize: number of tokens to which the base must be resized before it loads the adapter; None if it fits.
        losses: mean loss of a token in a text, in nats, of "base", "fine-tune" and "base + LoRA"; empty without texts.
    """

    layers: list[LayerLora]
    size: int
    original_size: int
    whole: list[str] = field(default_factory=list)
    omitted: Mapping[str, float | None] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    added_tokens: int = 0
    resize: int | None = None

    @property
    def change(self) -> float:  # type: ignore[override]
        """Energy of all layers' changes."""
        return sum(layer.change for layer in self.layers)

    @property
    def kept(self) -> float:  # type: ignore[override]
        """Energy of the LoRA."""
        return sum(layer.kept for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON holds it."""
        layers = [asdict(layer) | {"energy": layer.energy, "error": layer.error} for layer in self.layers]
        return asdict(self) | {"layers": layers, "energy": self.energy, "error": self.error}

    def __str__(self) -> str:
        rows = [
            (layer.layer, str(layer.rank), percent(layer.energy), percent(layer.error), f"{layer.size:,}")
            for layer in self.layers
        ]
        return f"{table(('layer', 'rank', 'energy', 'error', 'bytes'), rows)}\n\n{self.summary()}"

    def summary(self) -> str:
        """Returns the size, the share of the energy, the changes that the adapter does not carry, and the losses."""
        ranks = sorted({layer.rank for layer in self.layers})
        rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        lines = [
            f"{len(self.layers)} layers, {rank}, {megabytes(self.size)} of {megabytes(self.original_size)}, "
            f"{percent(self.energy)} of the energy of their change (relative error {percent(self.error)})"
        ]
        if self.whole:
            lines.append(f"Whole in the adapter: {', '.join(self.whole)}")
        if self.omitted:
            lines.append(f"Not in the adapter: {self._omissions()}")
        if self.added_tokens:
            lines.append(f"Not in the adapter: {self.added_tokens} added tokens. It fits the base with the base's own tokens.")
        if self.resize is not None:
            lines.append(f"Before loading, resize the base: base.resize_token_embeddings({self.resize})")
        if self.losses:
            lines.append("Loss: " + ", ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items()))
        return "\n".join(lines)

    def _omissions(self) -> str:
        """Returns the numbers of changed tensors that the adapter does not carry, by the ends of their names. Those that
        changed most, or cannot be compared, come first."""
        groups: dict[str, list[float | None]] = {}
        for name, energy in self.omitted.items():
            groups.setdefault(".".join(name.split(".")[-2:]), []).append(energy)
        whole_change = self.change + sum(energy or 0 for energy in self.omitted.values())
        ordered = sorted(groups.items(), key=lambda group: -sum(math.inf if energy is None else energy for energy in group[1]))
        texts = []
        for ending, energies in ordered[:MOST_ENDINGS]:
            compared = [energy for energy in energies if energy is not None]
            share = f" ({percent(sum(compared) / whole_change)} of the whole change)" if len(compared) == len(energies) else ""
            texts.append(f"{len(energies)} × {ending}{share}")
        if rest := sum(len(energies) for _, energies in ordered[MOST_ENDINGS:]):
            texts.append(f"{rest} other tensors")
        return ", ".join(texts)
