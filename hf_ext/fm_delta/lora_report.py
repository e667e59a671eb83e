"""The report of a LoRA that was extracted from a fine-tune."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_ext.display import COLORS, label, legend, megabytes, new_figure, percent, save_figure, table
from hf_ext.storage.source import layer_of


@dataclass(frozen=True)
class LayerLora:
    """The LoRA of one layer.

    Attributes:
        change: energy of the fine-tune's change (the sum of its squares); None if the base was not read.
        kept: energy of the LoRA.
        size: bytes of the factors.
    """

    layer: str
    rank: int
    change: float | None
    kept: float
    size: int

    @property
    def energy(self) -> float | None:
        """Share of the change's energy that the LoRA keeps."""
        return energy_of([self])

    @property
    def error(self) -> float | None:
        """Frobenius norm of the rest of the change, relative to that of the change."""
        return None if self.energy is None else math.sqrt(1 - self.energy)


@dataclass(frozen=True)
class LoraReport:
    """An extracted LoRA. `str()` gives a table of its layers.

    Attributes:
        layers: the adapted layers.
        size: bytes of adapter_model.safetensors.
        original_size: bytes of the fine-tune's tensors.
        whole: modules that the adapter holds whole, and embeddings of which it holds rows.
        omitted: energies of the changes that the adapter does not carry, by tensor; None where the base was not read.
        losses: mean loss of a token in a text, in nats, of "base", "fine-tune" and "base + LoRA"; empty without texts.
    """

    layers: list[LayerLora]
    size: int
    original_size: int
    whole: list[str] = field(default_factory=list)
    omitted: Mapping[str, float | None] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)

    @property
    def energy(self) -> float | None:
        """Share of the energy of all layers' changes that the LoRA keeps."""
        return energy_of(self.layers)

    @property
    def error(self) -> float | None:
        """Frobenius norm of the rest of all layers' changes, relative to that of the changes."""
        return None if self.energy is None else math.sqrt(1 - self.energy)

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
        ranks = sorted({layer.rank for layer in self.layers})
        rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        lines = [f"{len(self.layers)} layers, {rank}, {megabytes(self.size)} of {megabytes(self.original_size)}"]
        if self.energy is not None:
            lines[0] += f", {percent(self.energy)} of the energy of their change (relative error {percent(self.error)})"
        if self.whole:
            lines.append(f"Whole in the adapter: {', '.join(self.whole)}")
        if self.omitted:
            lines.append(f"Not in the adapter: {self._omissions()}")
        if self.losses:
            lines.append("Loss: " + ", ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items()))
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the share of the energy that each layer keeps, and its rank, to an image file.

        Raises:
            HfExtError: matplotlib is not installed, or the file cannot be written.
        """
        series: dict[str, list[tuple[int, LayerLora]]] = {}
        for layer in self.layers:
            stack, number = layer_of(layer.layer) or ("", "0")
            kind = layer.layer.replace(f"{stack}{number}.", f"{stack}*.")
            series.setdefault(kind, []).append((int(number), layer))
        panels = {"Rank": lambda layer: layer.rank}
        if self.energy is not None:
            panels = {"Energy of the change that the LoRA keeps, %": lambda layer: 100 * layer.energy} | panels
        figure = new_figure(10, 3.2 * len(panels))
        for axes, (title, value) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items()):
            for i, (kind, points) in enumerate(series.items()):
                style = {"color": COLORS[i % len(COLORS)], "marker": "osD^v"[i // len(COLORS) % 5], "markersize": 4}
                axes.plot([number for number, _ in points], [value(layer) for _, layer in points], label=kind, **style)
            axes.set_ylim(bottom=0)
            axes.xaxis.get_major_locator().set_params(integer=True)
            label(axes, title, "layer")
        legend(figure.axes[0], outside=True)
        save_figure(figure, path)

    def description(self) -> str:
        """Returns what a model card says about the LoRA."""
        rank = max(layer.rank for layer in self.layers)
        if self.energy is None:
            return f"It is the low-rank part of the compressed weights, of rank {rank} and less."
        return (
            f"It is the best approximation of the change of {len(self.layers)} layers, of rank {rank} and less.\nIt keeps "
            f"{percent(self.energy)} of the energy of the change (relative error {percent(self.error)})."
        )

    def _omissions(self) -> str:
        """Returns the number of changed tensors that the adapter does not carry, by the ends of their names."""
        groups: dict[str, list[float | None]] = {}
        for name, energy in self.omitted.items():
            groups.setdefault(".".join(name.split(".")[-2:]), []).append(energy)
        all_energy = sum(layer.change or 0 for layer in self.layers) + sum(energy or 0 for energy in self.omitted.values())
        shares = {
            ending: f" ({percent(sum(energies) / all_energy)} of the whole change)"  # type: ignore[arg-type]
            for ending, energies in groups.items()
            if None not in energies and all_energy
        }
        return ", ".join(f"{len(found)} × {ending}{shares.get(ending, '')}" for ending, found in groups.items())


def energy_of(layers: Iterable[LayerLora]) -> float | None:
    """Returns the share of the energy of these layers' changes that the LoRA keeps."""
    layers = list(layers)
    changes = [layer.change for layer in layers if layer.change is not None]
    if len(changes) < len(layers):
        return None
    return min(sum(layer.kept for layer in layers) / max(sum(changes), 1e-300), 1.0)
