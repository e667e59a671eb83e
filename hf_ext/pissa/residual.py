"""The layer that QPiSSA puts in the place of a linear layer: a quantized residual and a frozen low-rank part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_ext.errors import BaseModelError, HfExtError
from hf_ext.pissa.decomposition import is_of
from hf_ext.pissa.layer import another_base
from hf_ext.pissa.quantization import (
    LinearLayer,
    Quantization,
    QuantizedResidual,
    QuantizedWeight,
    bitsandbytes,
    dequantize,
    residual,
    unpacked,
)
from hf_ext.storage.open import open_checkpoint
from hf_ext.storage.safetensors_file import torch_dtype
from hf_ext.storage.source import TensorSource

# Share of a quantized weight's codes that may differ from the original weight's, as another device rounds in another way.
OTHER_CODES = 0.01
SAMPLE = 1 << 16  # number of weights whose codes are compared: whole rows, of all parts of the matrix


class OriginalModel:
    """The model whose checkpoint has the full-precision weights of a quantized model.

    Args:
        name: folder or Hub id; empty if unknown.
        revision: commit on the Hub.
    """

    def __init__(self, name: str, revision: str | None):
        self.name = name
        self.revision = revision

    @cached_property
    def checkpoint(self) -> TensorSource:
        return open_checkpoint(self.name, self.revision)

    def __getstate__(self) -> dict:
        return {"name": self.name, "revision": self.revision}  # a copy opens the files again


@dataclass(frozen=True)
class OriginalWeight:
    """One weight of an original model.

    Attributes:
        layer: the module's name in the model.
        shape: (out_features, in_features).
        transposed: the checkpoint has it as (in_features, out_features), as Conv1D does.
    """

    model: OriginalModel
    layer: str
    shape: tuple[int, int]
    transposed: bool

    def read(self, device: torch.device) -> torch.Tensor:
        """Reads the weight, (out_features, in_features), float32, and nothing else of the checkpoint.

        Raises:
            BaseModelError: the checkpoint has no float weight of that name and shape.
        """
        advice = "Name a folder or Hub id that holds the base's original weights: QPissaConfig(full_precision_model=…)."
        if not self.model.name:
            raise BaseModelError(f"The original weight of the quantized layer {self.layer} is nowhere to be found. {advice}")
        try:
            checkpoint = self.model.checkpoint
        except HfExtError as error:
            raise BaseModelError(f"The original weights of the quantized layers cannot be read: {error} {advice}") from error
        name = checkpoint.twin_of(f"{self.layer}.weight")
        if name is None:
            raise BaseModelError(f"{checkpoint} holds no weight for the quantized layer {self.layer}. {advice}")
        entry = checkpoint.entry(name)
        shape = self.shape[::-1] if self.transposed else self.shape
        if tuple(entry.shape) != shape or not torch_dtype(entry.dtype).is_floating_point:
            raise BaseModelError(
                f"'{name}' in {checkpoint} is of type {entry.dtype} and shape {tuple(entry.shape)}, not floats of {shape}: it "
                f"is itself quantized, or of another model. {advice}"
            )
        weight = checkpoint.read(name).to_torch().to(device).float()
        checkpoint.release(name)
        return weight.T.contiguous() if self.transposed else weight


class Statistics(NamedTuple):
    """The figures of a layer in its `LayerReport`."""

    energy: float
    error: float
    plain_error: float


def _digest(weight: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(weight.cpu().contiguous().numpy())


class ResidualLinear(nn.Module):
    """A layer that computes quantized(W − s B₀ A₀) x + s B₀ A₀ x (+ bias), from which QPiSSA's training starts.

    It wraps a layer and keeps its bias. Until `put` or `rebuild`, it computes the same as the wrapped layer.

    Args:
        layer: Linear or Conv1D in full precision, or bitsandbytes' Linear4bit or Linear8bitLt.
        original: the full-precision weight, for a layer that is quantized.
        quantization: quantization of the residual.
    """

    # A₀ and B₀, and behind them the factors of merged adapters.
    A: nn.Parameter | None
    B: nn.Parameter | None

    def __init__(self, layer: LinearLayer, original: OriginalWeight, quantization: Quantization):
        super().__init__()
        self.layer: LinearLayer = layer
        self.original = original
        self.quantization = quantization
        self.before = Quantization.of(layer)  # None in full precision
        self.dtype_before: torch.dtype = layer.weight.dtype
        self.digest: int | None = None  # of a full-precision weight that was in memory
        self.scaling = 1.0
        self.rank = 0
        # Frozen parameters: DDP synchronizes buffers at every forward.
        self.register_parameter("A", None)
        self.register_parameter("B", None)
        self.statistics: Statistics | None = None
        self.out_features, self.in_features = original.shape

    @property
    def weight(self) -> QuantizedWeight:
        return self.layer.weight

    @property
    def bias(self) -> nn.Parameter | None:
        return self.layer.bias

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which PEFT makes adapters on the layer."""
        if self.before is None:
            return self.dtype_before
        return getattr(self.layer, "compute_dtype", None) or self.before.dtype

    def full_precision(self) -> torch.Tensor:
        """Returns W, (out_features, in_features), float32.

        Raises:
            BaseModelError: the checkpoint lacks W, or the layer was not quantized from the checkpoint's W.
        """
        if self.before is None:
            weight = self.layer.weight.detach().float()
            weight = weight.T.contiguous() if isinstance(self.layer, Conv1D) else weight
            self.digest = _digest(weight)
            return weight
        weight = self.original_weight()
        codes = (unpacked(self.layer) if self.before.bits == 4 else self.layer.weight).data.view(torch.uint8)
        rows = slice(None)
        if weight.shape[1] % self.before.blocksize == 0:  # then each row has codes of its own
            rows = slice(0, None, max(1, weight.numel() // SAMPLE))
            codes = codes.reshape(len(weight), -1)[rows]
        again = self.before.quantize(weight[rows].to(self.before.dtype)).data.view(torch.uint8)
        other = again.numel() != codes.numel() or (again.flatten() != codes.flatten()).float().mean() > OTHER_CODES
        if other:
            raise BaseModelError(
                f"The weight of {self.original.layer} in '{self.original.model.name}' is not the one that the layer was "
                "quantized from. Name the model that was: QPissaConfig(full_precision_model=…)."
            )
        return weight

    def original_weight(self) -> torch.Tensor:
        """Reads W from the checkpoint, (out_features, in_features), float32.

        Raises:
            BaseModelError: W cannot be read, or the model had another W in memory.
        """
        weight = self.original.read(self.layer.weight.device)
        if self.digest is not None and _digest(weight.to(self.dtype_before).float()) != self.digest:
            raise BaseModelError(
                f"The weight of {self.original.layer} in '{self.original.model.name}' is not the one that the model had when "
                "QPiSSA quantized it. That weight was only in memory: save the model before you quantize it."
            )
        return weight

    def put(self, decomposition: QuantizedResidual, scaling: float, plain_error: float) -> None:
        """Replaces the layer's weight by its decomposition."""
        self.statistics = Statistics(decomposition.energy, decomposition.error, plain_error)
        self._set(decomposition.B, decomposition.A, scaling, decomposition.quantized)

    def plain_error(self, weight: torch.Tensor) -> float:
        """Returns the Frobenius norm of W's quantization error without an adapter, relative to W's. Call it before `put`."""
        if self.before == self.quantization:
            plain = dequantize(self.layer.weight, getattr(self.layer, "state", None))
        else:
            plain = dequantize(self.quantization.quantize(weight))
        return (torch.linalg.norm(weight - plain) / torch.linalg.norm(weight)).item()

    def rebuild(self, B: torch.Tensor, A: torch.Tensor, scaling: float, quantized: QuantizedWeight = None) -> None:
        """Sets the residual of a saved adapter: `quantized`, or else computed from W and the adapter's start."""
        device = self.layer.weight.device
        if quantized is None:
            weight, B, A = self.full_precision(), B.to(device), A.to(device)
            if not is_of(B.float(), A.float(), scaling, weight):
                raise another_base(self.original.layer)
            quantized = self.quantization.quantize(residual(weight, B, A, scaling))
        self._set(B.to(device), A.to(device), scaling, quantized)

    def _set(self, B: torch.Tensor, A: torch.Tensor, scaling: float, quantized: QuantizedWeight) -> None:
        # In the layout of the adapter's own factors, so that both make the same product to the last bit.
        self._set_factors(A.float().contiguous(), B.float().contiguous())
        self.scaling, self.rank = scaling, len(A)
        before, self.layer = self.layer, self._layer(self.quantization, quantized)
        if before is not self.layer:
            before.weight = nn.Parameter(quantized.new_empty(0, dtype=torch.float32), requires_grad=False)  # see `_layer`
        # bitsandbytes' layout for inference on some CPUs rounds the scales, and so would what is saved afterwards.
        self.layer.support_avx512bf16_for_cpu = False

    def _layer(self, quantization: Quantization, quantized: QuantizedWeight) -> LinearLayer:
        """Returns bitsandbytes' layer with this weight and the bias of the present layer."""
        nn8bit = quantization.bits == 8
        bnb = bitsandbytes()
        if not nn8bit and Quantization.of(self.layer) == quantization:
            # In place: PEFT keeps the layers that it replaces until it has replaced all of them.
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
        """Returns the dense weight with all merged adapters, (out_features, in_features), float32.

        Raises:
            HfExtError: the adapter's weights have not been loaded yet.
        """
        A, B = self.factors()
        weight = dequantize(self.layer.weight, getattr(self.layer, "state", None))
        return weight + self.scaling * (B.float() @ A.float())

    def _set_factors(self, A: torch.Tensor, B: torch.Tensor) -> None:
        self.A, self.B = nn.Parameter(A, requires_grad=False), nn.Parameter(B, requires_grad=False)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A and B.

        Raises:
            HfExtError: the adapter's weights have not been loaded yet.
        """
        if self.A is None or self.B is None:
            raise HfExtError(f"{self.original.layer} has no quantized residual yet: load the adapter's weights first.")
        return self.A, self.B

    def state_dict(self, *args: Any, **kwargs: Any) -> dict:  # type: ignore[override]
        # The keys of the wrapped layer, so that PEFT's get_base_model_state_dict gives those of the base.
        return self.layer.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(f"{prefix}layer.")]:
            state_dict[f"{prefix}layer.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        # `QPissaLinear.rebuild` sets these, and no state dict has them.
        state_dict |= {prefix + name: factor for name, factor in self.named_parameters(recurse=False)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x)
        if self.A is None or self.B is None:
            return result
        low_rank = functional.linear(functional.linear(x.to(self.A.dtype), self.A), self.B)
        return (result + self.scaling * low_rank).to(x.dtype)

    def merge(self, B: torch.Tensor, A: torch.Tensor) -> None:
        """Adds scaling · B A to what the layer computes.

        Raises:
            HfExtError: the adapter's weights have not been loaded yet.
        """
        before = self.factors()
        self._set_factors(torch.cat([before[0], A.to(before[0])]), torch.cat([before[1], B.to(before[1])], dim=1))

    def unmerge(self, rank: int) -> None:
        """Removes the last `rank` merged rows of A and columns of B."""
        A, B = self.factors()
        self._set_factors(A[:-rank].contiguous(), B[:, :-rank].contiguous())

    def plain(self) -> tuple[LinearLayer, float]:
        """Returns a layer with one weight, quantized if it was before QPiSSA, and the relative error of quantizing."""
        weight = self.dequantized()
        if self.before is None:
            return self._dense(weight), 0.0
        quantized = self.quantization.quantize(weight)
        error = torch.linalg.norm(dequantize(quantized) - weight) / torch.linalg.norm(weight)
        return self._layer(self.quantization, quantized), error.item()

    def restored(self) -> LinearLayer:
        """Returns the layer as it was before QPiSSA.

        Raises:
            BaseModelError: its full-precision weight cannot be read.
        """
        if self.B is None:
            return self.layer
        weight = self.original_weight()
        if self.before is not None:
            return self._layer(self.before, self.before.quantize(weight.to(self.before.dtype)))
        return self._dense(weight)

    def _dense(self, weight: torch.Tensor) -> nn.Module:
        layer: LinearLayer
        with torch.device("meta"):
            if self.original.transposed:
                layer, weight = Conv1D(self.out_features, self.in_features), weight.T.contiguous()
            else:
                layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight = nn.Parameter(weight.to(self.dtype_before), requires_grad=False)
        layer.bias = self.bias
        return layer.train(self.training)
