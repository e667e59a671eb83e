"""A linear layer of a quantised residual and a frozen low-rank part: what QPiSSA puts in the place of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import xxhash
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_ext.errors import BaseModelError, HfExtError
from hf_ext.pissa.decomposition import is_of
from hf_ext.pissa.layer import another_base
from hf_ext.pissa.quantization import Quantization, QuantizedResidual, bitsandbytes, dequantize, residual, unpacked
from hf_ext.storage.open import open_checkpoint
from hf_ext.storage.safetensors_file import torch_dtype
from hf_ext.storage.source import TensorSource

OTHER_CODES = 0.01  # share of a quantised weight's codes that may differ from those of the original's, by another device


class OriginalModel:
    """Where the full-precision weights of a quantised model are to be found.

    Args:
        name: folder or Hub id; empty if the model has none.
        revision: commit on the Hub.
    """

    def __init__(self, name: str, revision: str | None):
        self.name = name
        self.revision = revision

    @cached_property
    def checkpoint(self) -> TensorSource:
        return open_checkpoint(self.name, self.revision)

    def __getstate__(self) -> dict:
        return {"name": self.name, "revision": self.revision}  # copies open the files themselves


@dataclass(frozen=True)
class OriginalWeight:
    """One weight of it.

    Attributes:
        layer: the module's name in the model.
        shape: (out_features, in_features).
        transposed: whether it is stored as (in_features, out_features), as Conv1D does.
    """

    model: OriginalModel
    layer: str
    shape: tuple[int, int]
    transposed: bool

    def read(self, device: torch.device) -> torch.Tensor:
        """The weight, (out_features, in_features), float32. Nothing else of the checkpoint is read.

        Raises:
            BaseModelError: there is none of that name, shape and kind.
        """
        advice = "Name a folder or Hub id that holds the base's original weights: QPissaConfig(full_precision_model=…)."
        if not self.model.name:
            raise BaseModelError(f"The original weight of the quantised layer {self.layer} is nowhere to be found. {advice}")
        try:
            checkpoint = self.model.checkpoint
        except HfExtError as error:
            raise BaseModelError(f"The original weights of the quantised layers cannot be read: {error} {advice}") from error
        name = checkpoint.twin_of(f"{self.layer}.weight")
        if name is None:
            raise BaseModelError(f"{checkpoint} holds no weight for the quantised layer {self.layer}. {advice}")
        entry = checkpoint.entry(name)
        shape = self.shape[::-1] if self.transposed else self.shape
        if tuple(entry.shape) != shape or not torch_dtype(entry.dtype).is_floating_point:
            raise BaseModelError(
                f"'{name}' in {checkpoint} is of type {entry.dtype} and shape {tuple(entry.shape)}, not floats of {shape}: it "
                f"is itself quantised, or of another model. {advice}"
            )
        raw = checkpoint.read(name)
        weight = replace(raw, data=raw.data.copy()).to_torch().to(device).float()
        checkpoint.release(name)
        return weight.T.contiguous() if self.transposed else weight


class Statistics(NamedTuple):
    """What `LayerReport` says of a layer."""

    energy: float
    error: float
    plain_error: float


def _digest(weight: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(weight.cpu().contiguous().numpy())


class ResidualLinear(nn.Module):
    """quantised(W − s B₀ A₀) x + s B₀ A₀ x (+ bias): the model that QPiSSA's training starts from.

    Made from a layer, whose bias it keeps; until `put` or `rebuild` it is that layer.

    Args:
        layer: Linear or Conv1D in full precision, or bitsandbytes' Linear4bit or Linear8bitLt.
        original: where its full-precision weight is, for layers that are quantised already.
        quantization: of the residual.
    """

    def __init__(self, layer: nn.Module, original: OriginalWeight, quantization: Quantization):
        super().__init__()
        self.layer = layer
        self.original = original
        self.quantization = quantization
        self.before = Quantization.of(layer)  # None in full precision
        self.dtype_before = layer.weight.dtype
        self.digest: int | None = None  # of a weight that was in memory in full precision
        self.scaling = 1.0
        self.rank = 0
        # A₀ and B₀; behind them the factors of what is merged.
        self.A: torch.Tensor | None
        self.B: torch.Tensor | None
        self.register_buffer("A", None, persistent=False)
        self.register_buffer("B", None, persistent=False)
        self.statistics: Statistics | None = None
        self.out_features, self.in_features = original.shape

    @property
    def weight(self) -> nn.Parameter:
        return self.layer.weight

    @property
    def bias(self) -> nn.Parameter | None:
        return self.layer.bias

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type in which PEFT makes adapters on the layer."""
        if self.before is None:
            return self.dtype_before
        return getattr(self.layer, "compute_dtype", None) or self.before.dtype

    def full_precision(self) -> torch.Tensor:
        """W, (out_features, in_features), float32.

        Raises:
            BaseModelError: the checkpoint lacks it, or holds another than the one the layer was quantised from.
        """
        if self.before is None:
            weight = self.layer.weight.detach().float()
            weight = weight.T.contiguous() if isinstance(self.layer, Conv1D) else weight
            self.digest = _digest(weight)
            return weight
        weight = self.original_weight()
        again = self.before.quantize(weight.to(self.before.dtype)).data
        codes = (unpacked(self.layer) if self.before.bits == 4 else self.layer.weight).data
        other = again.shape != codes.shape or (again.view(torch.uint8) != codes.view(torch.uint8)).float().mean() > OTHER_CODES
        if other:
            raise BaseModelError(
                f"The weight of {self.original.layer} in '{self.original.model.name}' is not the one that the layer was "
                "quantised from. Name the model that was: QPissaConfig(full_precision_model=…)."
            )
        return weight

    def original_weight(self) -> torch.Tensor:
        """W as it stands in the checkpoint, (out_features, in_features), float32.

        Raises:
            BaseModelError: it cannot be read, or is another than the one that the model had in memory.
        """
        weight = self.original.read(self.layer.weight.device)
        if self.digest is not None and _digest(weight.to(self.dtype_before).float()) != self.digest:
            raise BaseModelError(
                f"The weight of {self.original.layer} in '{self.original.model.name}' is not the one that the model had when "
                "QPiSSA quantised it, and that one is nowhere else."
            )
        return weight

    def put(self, found: QuantizedResidual, scaling: float, plain_error: float) -> None:
        """Takes a decomposition of the layer's weight into its place."""
        self.statistics = Statistics(found.energy, found.error, plain_error)
        self._set(found.B, found.A, scaling, found.quantized)

    def plain_error(self, weight: torch.Tensor) -> float:
        """Frobenius norm of what quantising takes from W without an adapter, relative to W's; before `put` of W."""
        if self.before == self.quantization:
            plain = dequantize(self.layer.weight, getattr(self.layer, "state", None))
        else:
            plain = dequantize(self.quantization.quantize(weight))
        return (torch.linalg.norm(weight - plain) / torch.linalg.norm(weight)).item()

    def rebuild(self, B: torch.Tensor, A: torch.Tensor, scaling: float, quantized: nn.Parameter | None = None) -> None:
        """The residual of a saved adapter: given, or made again from the full-precision weight and the adapter's start."""
        device = self.layer.weight.device
        if quantized is None:
            weight, B, A = self.full_precision(), B.to(device), A.to(device)
            if not is_of(B.float(), A.float(), scaling, weight):
                raise another_base(self.original.layer)
            quantized = self.quantization.quantize(residual(weight, B, A, scaling))
        self._set(B.to(device), A.to(device), scaling, quantized)

    def _set(self, B: torch.Tensor, A: torch.Tensor, scaling: float, quantized: nn.Parameter) -> None:
        # In the layout of the adapter's own factors, so that both make the same product to the last bit.
        self.B, self.A = B.float().contiguous(), A.float().contiguous()
        self.scaling, self.rank = scaling, len(A)
        before, self.layer = self.layer, self._layer(self.quantization, quantized)
        if before is not self.layer:
            before.weight = nn.Parameter(quantized.new_empty(0, dtype=torch.float32), requires_grad=False)  # see `_layer`
        # bitsandbytes' layout for inference on some CPUs rounds the scales, and so would what is saved afterwards.
        self.layer.support_avx512bf16_for_cpu = False

    def _layer(self, quantization: Quantization, quantized: nn.Parameter) -> nn.Module:
        """bitsandbytes' layer with a weight, and the bias that this one has."""
        nn8bit = quantization.bits == 8
        bnb = bitsandbytes()
        if not nn8bit and Quantization.of(self.layer) == quantization:
            # In place, as PEFT holds on to the layers that it replaces until it has replaced all.
            weight = unpacked(self.layer)
            weight.data.copy_(quantized.data)
            weight.quant_state = self.layer.quant_state = quantized.quant_state
            self.layer.support_avx512bf16_for_cpu = bnb.functional.has_avx512bf16()
            return self.layer
        kind = bnb.nn.Linear8bitLt if nn8bit else bnb.nn.Linear4bit
        options = {"has_fp16_weights": False} if nn8bit else {"compute_dtype": getattr(self.layer, "compute_dtype", None)}
        with torch.device("meta"):
            layer = kind(self.in_features, self.out_features, bias=self.bias is not None, **options)
        layer.bias = self.bias
        layer.weight = quantized
        if nn8bit:
            layer.state.threshold = self.layer.state.threshold if isinstance(self.layer, kind) else 0.0
        else:
            layer.quant_state, layer.quant_storage = quantized.quant_state, quantized.dtype
            quantized.module = layer
        return layer.train(self.training)

    @torch.no_grad()
    def dequantized(self) -> torch.Tensor:
        """The dense weight that the layer stands for, with what is merged into it; (out_features, in_features), float32.

        Raises:
            HfExtError: the adapter's weights have not been loaded yet.
        """
        self._require_residual()
        weight = dequantize(self.layer.weight, getattr(self.layer, "state", None))
        return weight + self.scaling * (self.B.float() @ self.A.float())

    def _require_residual(self) -> None:
        if self.B is None:
            raise HfExtError(f"{self.original.layer} has no quantised residual yet: load the adapter's weights first.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x)
        if self.B is None:
            return result
        low_rank = functional.linear(functional.linear(x.to(self.A.dtype), self.A), self.B)
        return (result + self.scaling * low_rank).to(x.dtype)

    def merge(self, B: torch.Tensor, A: torch.Tensor) -> None:
        """Adds scaling · B A to what the layer computes.

        Raises:
            HfExtError: the adapter's weights have not been loaded yet.
        """
        self._require_residual()
        self.B, self.A = torch.cat([self.B, B.to(self.B)], dim=1), torch.cat([self.A, A.to(self.A)])

    def unmerge(self, rank: int) -> None:
        """Takes the last `rank` merged rows and columns away again."""
        self.B, self.A = self.B[:, :-rank].contiguous(), self.A[:-rank].contiguous()

    def plain(self) -> tuple[nn.Module, float]:
        """The layer as one weight, quantised if it was before QPiSSA, and the relative error that quantising makes."""
        weight = self.dequantized()
        if self.before is None:
            return self._dense(weight), 0.0
        quantized = self.quantization.quantize(weight)
        error = torch.linalg.norm(dequantize(quantized) - weight) / torch.linalg.norm(weight)
        return self._layer(self.quantization, quantized), error.item()

    def restored(self) -> nn.Module:
        """The layer as it was before QPiSSA.

        Raises:
            BaseModelError: its full-precision weight cannot be found again.
        """
        if self.B is None:
            return self.layer
        weight = self.original_weight()
        if self.before is not None:
            return self._layer(self.before, self.before.quantize(weight.to(self.before.dtype)))
        return self._dense(weight)

    def _dense(self, weight: torch.Tensor) -> nn.Module:
        with torch.device("meta"):
            if self.original.transposed:
                layer, weight = Conv1D(self.out_features, self.in_features), weight.T.contiguous()
            else:
                layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight = nn.Parameter(weight.to(self.dtype_before), requires_grad=False)
        layer.bias = self.bias
        return layer.train(self.training)
