"""Reports on the start of an adapter: its share of each layer and the quantization error, as numbers, table and picture."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from hf_ext.display import COLORS, PALE, label, legend, new_figure, percent, save_figure, table


@dataclass(frozen=True)
class LayerReport:
    """One layer at the start of training.

    Attributes:
        rank: r.
        energy: share of the weight's squared Frobenius norm that the adapter holds.
        error: Frobenius norm of the weight's quantization error with the adapter, relative to the weight's norm. None in full
            precision.
        plain_error: the same without an adapter.
    """

    layer: str
    rank: int
    energy: float
    error: float | None
    plain_error: float | None


@dataclass(frozen=True)
class PissaReport:
    """The layers of an adapter at the start of training. `str()` of it is a table."""

    layers: list[LayerReport]

    @property
    def quantized(self) -> list[LayerReport]:
        """The layers with quantized weights."""
        return [layer for layer in self.layers if layer.error is not None]

    def to_dict(self) -> dict:
        return asdict(self)

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Returns header and rows."""
        columns = {
            "layer": [layer.layer for layer in self.layers],
            "rank": [str(layer.rank) for layer in self.layers],
            "energy": [percent(layer.energy, 1) for layer in self.layers],
        }
        if self.quantized:
            columns["error"] = [percent(layer.error, 2) for layer in self.layers]
            columns["error without adapter"] = [percent(layer.plain_error, 2) for layer in self.layers]
        return tuple(columns), list(zip(*columns.values()))

    def __str__(self) -> str:
        return f"{table(*self.table())}\n\n{self.summary()}"

    def summary(self) -> str:
        count = len(self.layers)
        text = f"{count} layers, {percent(sum(layer.energy for layer in self.layers) / count)} of the energy in the adapter"
        ratios = [layer.error / layer.plain_error for layer in self.layers if layer.error is not None and layer.plain_error]
        if not ratios:
            return text
        kept = sum(ratios) / len(ratios)
        return f"{text}, {percent(1 - kept)} less quantization error than without it (means over layers)"

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the figures of each layer into an image file.

        Raises:
            HfExtError: matplotlib is not installed, or the file cannot be written.
        """
        names = [layer.layer for layer in self.layers]
        figure = new_figure(11 if self.quantized else 7, max(2.2, 0.18 * len(names) + 1.3))
        panels = figure.subplots(1, 1 + bool(self.quantized), sharey=True, squeeze=False)[0]
        panels[0].barh(names, [100 * layer.energy for layer in self.layers], color=COLORS[0])
        label(panels[0], "Energy in the adapter", "% of the weight's squared Frobenius norm")
        if self.quantized:
            errors = [(100 * (layer.error or 0), 100 * (layer.plain_error or 0)) for layer in self.layers]
            panels[1].barh(names, [plain for _, plain in errors], color=PALE, label="without adapter")
            panels[1].barh(names, [error for error, _ in errors], color=COLORS[1], label="with adapter")
            label(panels[1], "Quantization error", "% of the weight's Frobenius norm")
            legend(panels[1], outside=True)
        panels[0].tick_params(axis="y", labelsize="x-small")
        panels[0].invert_yaxis()
        save_figure(figure, path)
