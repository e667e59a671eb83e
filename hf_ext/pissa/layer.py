"""The base of the layers that compute W x + s (B A − B₀ A₀) x.

They are PEFT's LoRA layers with a variant of their own. The change is that of the saved LoRA, s [B, B − B₀] [A − A₀; A₀] x. It
is exactly zero at the start, and in bf16 it keeps what is small beside A and B.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_ext.errors import AdapterError, BaseModelError
from hf_ext.integration.compat import is_offloaded, loads_weights_later
from hf_ext.pissa.config import PissaConfig
from hf_ext.pissa.decomposition import initial_factors, is_of, principal_components, share_of_energy


class PissaVariant(LoraVariant):
    """A PiSSA adapter's part in a layer, in PEFT's terms; `module` is a `PissaLayer`. `dora` is PEFT's own variant of the layer
    for `use_dora=True`, which also merges; None without DoRA."""

    def __init__(self, dora: LoraVariant | None):
        self.dora = dora

    def supports_lora_conversion(self) -> bool:
        return self.dora is None

    def init(self, module: PissaLayer, adapter_name: str, **kwargs: Any) -> None:  # type: ignore[override]
        if self.dora is not None:
            self.dora.init(module, adapter_name=adapter_name, **kwargs)
        module.start(adapter_name, kwargs["config"])

    def forward(  # type: ignore[override]
        self, module: PissaLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        change = module.change(active_adapter, x)
        if self.dora is None:
            return result + change
        bias = getattr(module.get_base_layer(), "bias", None)
        rest = result if bias is None else result - bias.view(-1, *[1] * module.trailing)
        scale = module.lora_magnitude_vector[active_adapter].weight / module.norm(active_adapter)  # 1 at the start
        return result + (scale - 1) * rest + scale * change

    def merge_safe(self, module: PissaLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.dora is not None:
            return self.dora.merge_safe(module, active_adapter, orig_weight)
        return orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    def merge_unsafe(self, module: PissaLayer, active_adapter: str, orig_weight: torch.Tensor) -> None:  # type: ignore[override]
        if self.dora is not None:
            self.dora.merge_unsafe(module, active_adapter, orig_weight)
        else:
            orig_weight.data += module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    def unmerge(self, module: PissaLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.dora is not None:
            return self.dora.unmerge(module, active_adapter, orig_weight)
        return orig_weight - module.get_delta_weight(active_adapter).to(orig_weight.dtype)


class Frozen(nn.Module):
    """A₀ or B₀ of an adapter, never trained. Its name contains `.ADAPTER.`, by which TRL copies an adapter to its reference.
    DDP synchronizes buffers at every forward, and FSDP 2 does not shard them. Both treat parameters as they treat A and B."""

    def __init__(self, factor: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(factor, requires_grad=False)


class PissaLayer(LoraLayer):
    """The base of the PiSSA layers: keeps A₀ and B₀ beside A and B, as parameters that are frozen.

    Attributes:
        initial_A, initial_B: A₀ and B₀ of each adapter.
        energies: share of the weight's squared Frobenius norm that each new adapter starts with, where it was decomposed.
        trailing: number of dimensions of the layer's output behind that of its features.
    """

    other_param_names = (*LoraLayer.other_param_names, "lora_variant", "initial_A", "initial_B", "energies")
    trailing = 0

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, "energies"):
            self.initial_A, self.initial_B, self.energies = nn.ModuleDict(), nn.ModuleDict(), dict[str, float]()
        super().update_layer(*args, **kwargs)

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> LoraVariant:
        if not isinstance(config, PissaConfig):
            raise AdapterError(
                "The model has PiSSA adapters in their training form, beside which it takes no adapter of "
                f"{type(config).__name__}. Save them, and load them as LoRAs: PeftModel.from_pretrained(base, folder)."
            )
        return PissaVariant(super().resolve_lora_variant(config=config, **kwargs))

    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        super().reset_lora_parameters(adapter_name, bool(init_lora_weights))  # `start` does the rest

    def pissa_init(self, adapter_name: str, init_lora_weights: str) -> None:
        self.reset_lora_parameters(adapter_name, True)

    @torch.no_grad()
    def start(self, adapter: str, config: PissaConfig) -> None:
        """Sets A, B, A₀ and B₀: to the principal components, or A₀ and B₀ to zero if the adapter's weights are loaded later.
        Raises AdapterError if the layer's weight cannot be decomposed."""
        A, B = self.factors(adapter)
        if config.decomposes and is_offloaded(self.get_base_layer()):
            raise AdapterError(
                f"The weight of {self.get_base_layer()} is offloaded, and PiSSA cannot start from it. Load the base without "
                "offloading to the CPU or the disk (device_map)."
            )
        decomposes = config.decomposes and A.device.type != "meta" and not loads_weights_later()
        if decomposes:
            if self.merged:
                raise AdapterError("The model has merged adapters. Call unmerge_adapter() before you add a PiSSA adapter.")
            if is_deepspeed_zero3_enabled():
                raise AdapterError("PiSSA cannot decompose weights that DeepSpeed ZeRO-3 partitions. Use ZeRO-2.")
            for parameter, component in zip((A, B), self.principal(adapter, config)):
                parameter.copy_(component.view_as(parameter))
        for initial, factor in ((self.initial_A, A), (self.initial_B, B)):
            initial[adapter] = Frozen(factor.detach().clone() if decomposes else torch.zeros_like(factor))

    def principal(self, adapter: str, config: PissaConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A₀ and B₀, the factors of the weight's principal components, and notes their share of its energy."""
        matrix, rank, scaling = self.matrix(), self.r[adapter], self.start_scaling(adapter)
        B, A = initial_factors(principal_components(matrix, rank, config.rounds), rank, scaling)
        self.energies[adapter] = share_of_energy(B, A, scaling, matrix)
        return A, B

    def factors(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Returns the parameters A, (r, n), and B, (m, r). In a convolution, they have further dimensions."""
        return self.lora_A[adapter].weight, self.lora_B[adapter].weight

    def keys(self, adapter: str) -> tuple[str, str]:
        """Returns the names of A and B in the layer's state dict."""
        return f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight"

    def stacked(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [A − A₀; A₀], (2r, n), and [B, B − B₀], (m, 2r), whose product is B A − B₀ A₀. Raises AdapterError if
        hotswapping replaced A and B by factors of another rank."""
        (A, B), A0, B0 = self.factors(adapter), self.initial_A[adapter].weight, self.initial_B[adapter].weight
        if A.shape != A0.shape:
            raise AdapterError(
                f"The adapter '{adapter}' has rank {len(A)}, but started with rank {self.r[adapter]}: PiSSA's training form "
                "does not support hotswapping. Load the adapters as LoRAs: PeftModel.from_pretrained(base, folder)."
            )
        return torch.cat([A - A0, A0]), torch.cat([B, B - B0], dim=1)  # type: ignore[operator, list-item]

    def change(self, adapter: str, x: torch.Tensor) -> torch.Tensor:
        """Computes s (B A − B₀ A₀) x, which is exactly zero before training."""
        A, B = self.stacked(adapter)  # in the wider dtype: TRL casts A and B, but not A₀ and B₀
        x = self.lora_dropout[adapter](x).to(A.dtype) if x.is_floating_point() else x
        return self.product(adapter, x, A, B) * self.scaling[adapter]

    @abstractmethod
    def product(self, adapter: str, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Computes B A x."""

    @abstractmethod
    def matrix(self) -> torch.Tensor:
        """Returns the weight as the (m, n) matrix that PiSSA decomposes, float32. Raises AdapterError if the weight does not
        consist of floats, or is not in this process."""

    def base_weight(self) -> torch.Tensor:
        """Returns the base layer's weight, after checking that it is there and consists of floats. Raises AdapterError if it is
        not."""
        layer = self.get_base_layer()
        weight = layer.weight.detach()
        if is_quantized(layer.weight):
            raise AdapterError(
                f"The weight of {layer} is quantized ({weight.dtype}): PiSSA cannot start from it. Use QPissaConfig for a "
                "model in 4 bits of bitsandbytes, or load the base in bfloat16."
            )
        if weight.dim() < 2:
            raise AdapterError(
                f"The weight of {layer} is a shard of shape {tuple(weight.shape)}, because DeepSpeed ZeRO-3 or FSDP has "
                "partitioned it, and PiSSA needs whole weights. Add the adapter before the model is partitioned, or use ZeRO-2."
            )
        return weight

    def start_scaling(self, adapter: str) -> float:
        """Returns the scaling at the start of training, which A₀ and B₀ belong to."""
        rank = self.r[adapter]
        return self.lora_alpha[adapter] / (math.sqrt(rank) if self.use_rslora[adapter] else rank)

    def delta(self, adapter: str) -> torch.Tensor:
        """Returns s (B A − B₀ A₀), (m, n), float32."""
        with torch.autocast(self.factors(adapter)[0].device.type, enabled=False):
            A, B = (factor.float().flatten(1) for factor in self.stacked(adapter))
            return self.scaling[adapter] * (B @ A)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        delta = self.delta(adapter).to(self.factors(adapter)[0].dtype)
        return delta.T if self.is_transposed() else delta

    @torch.no_grad()
    def norm(self, adapter: str) -> torch.Tensor:
        """Returns the norms of the rows of W + s (B A − B₀ A₀), shaped like DoRA's magnitudes. DoRA takes them as constants."""
        magnitude = self.lora_magnitude_vector[adapter].weight
        return torch.linalg.norm(self.matrix() + self.delta(adapter), dim=1).to(magnitude.dtype).view_as(magnitude)

    def is_transposed(self) -> bool:
        """Tells whether the weight is stored as (n, m)."""
        return False

    def check_start(self, adapter: str, A0: torch.Tensor, B0: torch.Tensor) -> None:
        """Checks A₀ and B₀ of a saved adapter. Raises BaseModelError if they are not principal components of this layer's
        weight."""
        layer = self.get_base_layer()
        A0, B0 = (factor.to(layer.weight.device).flatten(1) for factor in (A0, B0))
        if A0.device.type != "meta" and not is_of(B0, A0, self.start_scaling(adapter), whole(self.matrix())):
            raise another_base(layer)


def is_quantized(weight: torch.Tensor) -> bool:
    """Tells whether a weight holds codes. bitsandbytes may pack them into a float dtype. Float8 weights are codes too, whose
    scales are elsewhere."""
    is_packed = type(weight).__name__ in ("Params4bit", "Int8Params") or weight.element_size() == 1
    return is_packed or not weight.is_floating_point()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole of a tensor that FSDP 2 has sharded, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def another_base(layer: object) -> BaseModelError:
    """Returns the error for an adapter whose start is not in the weight of a layer."""
    return BaseModelError(
        f"The adapter's principal components are not those of the weight of {layer}: it was trained on another base, or not "
        "by PiSSA. Load it on the base that its adapter_config.json names."
    )
