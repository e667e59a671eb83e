"""QPiSSA as a PEFT tuner: PiSSA adapters on 4-bit layers, whose weight becomes the quantized residual."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import get_logger

from hf_ext.errors import AdapterError, BaseModelError, HfExtError
from hf_ext.pissa.config import QPissaConfig
from hf_ext.pissa.decomposition import is_of, share_of_energy
from hf_ext.pissa.kinds import PissaLinear
from hf_ext.pissa.layer import another_base
from hf_ext.pissa.model import PissaModel
from hf_ext.pissa.original import OriginalModel, OriginalWeight
from hf_ext.pissa.quantization import (
    Quantization,
    QuantizedWeight,
    bitsandbytes,
    dequantize,
    format_of,
    quantized_residual,
    residual,
)

logger = get_logger(__name__)

# Share of a quantized weight's codes that may differ from the original weight's, as another device rounds in another way.
OTHER_CODES = 0.01
SAMPLE = 1 << 16  # number of weights whose codes are compared: whole rows, of all parts of the matrix


class ResidualLinear(nn.Module):
    """A layer that computes quantized(W − s B₀ A₀) x + s B₀ A₀ x (+ bias), from which QPiSSA's training starts. Until `set`, it
    computes the same as bitsandbytes' Linear4bit that it wraps, whose weight becomes the residual. `original` is W."""

    # A₀ and B₀, and behind them the factors of merged adapters.
    A: nn.Parameter | None
    B: nn.Parameter | None

    def __init__(self, layer: Any, original: OriginalWeight):
        super().__init__()
        self.layer = layer
        self.original = original
        self.quantization = Quantization.of(layer)
        self.out_features, self.in_features = original.shape
        self.scaling, self.rank = 1.0, 0
        self.packs = getattr(layer, "support_avx512bf16_for_cpu", False)
        # Frozen parameters: DDP synchronizes buffers at every forward.
        self.register_parameter("A", None)
        self.register_parameter("B", None)

    @property
    def weight(self) -> QuantizedWeight:
        return self.layer.weight

    @property
    def bias(self) -> nn.Parameter | None:
        return self.layer.bias

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which PEFT makes adapters on the layer."""
        return self.layer.compute_dtype or self.quantization.dtype

    def full_precision(self) -> torch.Tensor:
        """Returns W, (out_features, in_features), float32. Raises BaseModelError if the checkpoint lacks W, or the layer was
        not quantized from the checkpoint's W."""
        weight = self.original.read(self.weight.device)
        codes, rows = self.weight.data.view(torch.uint8), slice(None)
        if weight.shape[1] % self.quantization.blocksize == 0:  # then each row has codes of its own
            rows = slice(0, None, max(1, weight.numel() // SAMPLE))
            codes = codes.reshape(len(weight), -1)[rows]
        again = self.quantization.quantize(weight[rows].to(self.quantization.dtype)).data.view(torch.uint8)
        if again.numel() != codes.numel() or (again.flatten() != codes.flatten()).float().mean() > OTHER_CODES:
            raise BaseModelError(
                f"The weight of {self.original.layer} in '{self.original.model.name}' is not the one that the layer was "
                "quantized from. Name the model that was: QPissaConfig(full_precision_model=…)."
            )
        return weight

    def set(self, B: torch.Tensor, A: torch.Tensor, scaling: float, quantized: QuantizedWeight) -> None:
        """Sets A₀, B₀ and the residual, in the place of the layer's weight."""
        self.scaling, self.rank = scaling, len(A)
        self._set_factors(A.float(), B.float())
        # bitsandbytes' layout for inference on some CPUs rounds the scales, and so would what is computed from them.
        self._set_weight(quantized, packs=False)

    def _set_weight(self, quantized: QuantizedWeight, packs: bool) -> None:
        weight, self.layer.support_avx512bf16_for_cpu = self.layer.weight, packs
        weight.data.copy_(quantized.data)
        weight.quant_state = self.layer.quant_state = quantized.quant_state

    def _set_factors(self, A: torch.Tensor, B: torch.Tensor) -> None:
        # In the layout of the adapter's own factors, so that both make the same product to the last bit.
        self.A = nn.Parameter(A.contiguous(), requires_grad=False)
        self.B = nn.Parameter(B.contiguous(), requires_grad=False)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A and B. Raises HfExtError if the adapter's weights have not been loaded yet."""
        if self.A is None or self.B is None:
            raise HfExtError(f"{self.original.layer} has no quantized residual yet: load the adapter's weights first.")
        return self.A, self.B

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x)
        if self.A is None or self.B is None:
            return result
        low_rank = functional.linear(functional.linear(x.to(self.A.dtype), self.A), self.B)
        return (result + self.scaling * low_rank).to(x.dtype)

    def merge(self, B: torch.Tensor, A: torch.Tensor) -> None:
        """Adds scaling · B A to what the layer computes."""
        before = self.factors()
        self._set_factors(torch.cat([before[0], A.to(before[0])]), torch.cat([before[1], B.to(before[1])], dim=1))

    def unmerge(self, rank: int) -> None:
        """Removes the last `rank` merged rows of A and columns of B."""
        A, B = self.factors()
        self._set_factors(A[:-rank], B[:, :-rank])

    def plain(self, weight: torch.Tensor) -> nn.Module:
        """Returns the 4-bit layer with another weight, (out_features, in_features)."""
        self._set_weight(self.quantization.quantize(weight.to(self.quantization.dtype)), self.packs)
        return self.layer


class QPissaLinear(PissaLinear):
    """A `ResidualLinear` with PiSSA adapters. Merging is exact: the base takes the adapter's factors, not their product."""

    base_layer: ResidualLinear

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A]
        alone = len(active) == 1 and isinstance(self.lora_dropout[active[0]], nn.Identity)
        alone = alone and self.base_layer.B is not None and self.scaling[active[0]] == self.base_layer.scaling
        if not alone or self.disable_adapters or self.merged or kwargs.get("adapter_names"):
            return super().forward(x, *args, **kwargs)
        # The base's s B₀ A₀ x and the adapter's − s B₀ A₀ x cancel, so this computes neither.
        result = self.base_layer.layer(x)
        A, B = self.factors(active[0])
        return (result + self.product(active[0], self._cast_input_dtype(x, A.dtype), A, B) * self.scaling[active[0]]).to(
            x.dtype
        )

    def matrix(self) -> torch.Tensor:
        return self.base_layer.full_precision()

    def principal(self, adapter: str, config: QPissaConfig) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        base, rank, scaling = self.base_layer, self.r[adapter], self.start_scaling(adapter)
        if base.B is None:
            matrix, dtype = self.matrix(), self.factors(adapter)[0].dtype
            start = quantized_residual(matrix, rank, base.quantization, config.iterations, scaling, config.rounds, dtype)
            base.set(start.B, start.A, scaling, start.quantized)
            self.energies[adapter] = share_of_energy(start.B.float(), start.A.float(), scaling, matrix)
        self._check_shared(rank, scaling)
        A, B = base.factors()
        return A[:rank], B[:, :rank]

    def check_start(self, adapter: str, A0: torch.Tensor, B0: torch.Tensor) -> None:
        """Sets the residual that a saved adapter was trained on, or checks that the layer has it. Raises BaseModelError if the
        base's weight is another one, or cannot be read."""
        base, scaling = self.base_layer, self.start_scaling(adapter)
        A0, B0 = A0.to(base.weight.device), B0.to(base.weight.device)
        if base.B is None:
            matrix = self.matrix()
            if not is_of(B0.float(), A0.float(), scaling, matrix):
                raise another_base(base.original.layer)
            base.set(B0, A0, scaling, base.quantization.quantize(residual(matrix, B0, A0, scaling)))
        self._check_shared(len(A0), scaling)
        A, B = base.factors()
        if not (torch.equal(A0, A[: base.rank].to(A0.dtype)) and torch.equal(B0, B[:, : base.rank].to(B0.dtype))):
            raise BaseModelError(
                f"The adapter was trained on another residual of {base.original.layer} than this one. Load it on a fresh base."
            )

    def _check_shared(self, rank: int, scaling: float) -> None:
        base = self.base_layer
        if rank != base.rank or scaling != base.scaling:
            raise AdapterError(
                f"The adapters of a QPiSSA model share its residual, and so their start: rank {base.rank} and scaling "
                f"{base.scaling} in {base.original.layer}, not {rank} and {scaling}."
            )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter in self.lora_A:
                A, B = (factor.detach() for factor in self.stacked(adapter))
                if safe_merge and not (A.isfinite().all() and B.isfinite().all()):
                    raise AdapterError(f"The adapter '{adapter}' has NaN or infinite weights and was not merged.")
                self.base_layer.merge(B * (self.scaling[adapter] / self.base_layer.scaling), A)
                self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        while self.merged_adapters:
            self.base_layer.unmerge(2 * self.r[self.merged_adapters.pop()])

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None) -> nn.Module:
        base = self.base_layer
        if merge:
            logger.warning_once("The merged weights are quantized again, with an error. merge_adapter() has none.")
            self.merge(safe_merge, adapter_names)
            A, B = base.factors()
            return base.plain(dequantize(base.weight) + base.scaling * (B @ A))
        return base.layer if base.B is None else base.plain(base.original.read(base.weight.device))


class QPissaModel(PissaModel):
    """The tuner behind `get_peft_model(model, QPissaConfig(…))`."""

    is_quantized = True

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Adds an adapter, and records the base's 4-bit format in its configuration. Raises BaseModelError if the adapter was
        trained on another format."""
        config, kind = self.peft_config[adapter_name], bitsandbytes().nn.Linear4bit
        format = " and ".join(sorted({format_of(module.weight) for module in model.modules() if isinstance(module, kind)}))
        if format and config.quantization not in (format, None) and not config.decomposes:
            raise BaseModelError(
                f"The base is quantized as {format}, and the adapter was trained on {config.quantization}. Load the base with "
                "the BitsAndBytesConfig of the training."
            )
        if format:
            config.quantization = format
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _create_new_module(self, config: QPissaConfig, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:  # type: ignore[override]
        if not isinstance(target, bitsandbytes().nn.Linear4bit):
            return super()._create_new_module(config, adapter_name, target, **kwargs)
        transposed = issubclass(getattr(target, "source_cls", nn.Linear), Conv1D)
        shape = (target.out_features, target.in_features)
        original = OriginalWeight(self._original_model(config), kwargs["target_name"], shape, transposed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # PEFT does not know a ResidualLinear
            return QPissaLinear(ResidualLinear(target, original), adapter_name, config=config, **kwargs)

    def _original_model(self, config: QPissaConfig) -> OriginalModel:
        """Returns the original model, one for all layers, so that they share its open files."""
        if "original_model" not in self.__dict__:
            name, revision = config.full_precision_model, None
            if name is None:
                name = getattr(self.model, "name_or_path", "") or ""
                revision = getattr(getattr(self.model, "config", None), "_commit_hash", None)
            self.original_model = OriginalModel(name, revision, self.model)
        return self.original_model
