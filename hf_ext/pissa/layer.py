"""The base of the layers that compute W x + s (B A − B₀ A₀) x: PEFT's LoRA layers with a variant of their own."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_ext.errors import BaseModelError, HfExtError
from hf_ext.integration.compat import (
    config_and_name_of_layer,
    is_offloaded,
    loads_adapter,
    loads_adapter_by_transformers,
    loads_weights_later,
    saves_only_lora_tensors,
    tuner_that_makes_layer,
)
from hf_ext.pissa.combination import CombinableLayer, combine_as_loras
from hf_ext.pissa.decomposition import energy, initial_factors, is_of, principal_components
from hf_ext.pissa.reports import LayerReport
from hf_ext.pissa.start import PrincipalStart
from hf_ext.pissa.state import check_gathered, gathered, stack, stacked, unstacked

#: `init_lora_weights` of an adapter whose weights PiSSA decomposes. PEFT's own layers do not know it and name it in an error.
PRINCIPAL = "principal components (see hf_ext.pissa.accept_pissa)"


class PissaVariant(LoraVariant):
    """A PiSSA adapter's part in a layer, in PEFT's terms; `module` is a `PissaLayer`."""

    @staticmethod
    def init(module: PissaLayer, adapter_name: str, **kwargs: Any) -> None:
        config = module.configs[adapter_name]
        if module.merged:
            raise ValueError("The model has merged adapters. Call unmerge_adapter() before you add a PiSSA adapter.")
        A, B = module.factors(adapter_name)
        rank, shape = module.r[adapter_name], (len(B), A[0].numel())
        if rank > min(shape):
            raise ValueError(
                f"r={rank} is more than the {min(shape)} principal components that {module.name or 'a layer'} "
                f"({shape[0]} × {shape[1]}) has. Set a smaller r, or a rank_pattern for this layer."
            )
        is_loaded = A.device.type == "meta" or config.is_trained or loads_weights_later()
        decomposes = bool(config.init_lora_weights) and not is_loaded
        if config.init_lora_weights and not config.is_trained and is_offloaded(module.get_base_layer()):
            raise ValueError(
                f"The weight of {module.name or 'a layer'} is offloaded, and PiSSA cannot start from it. Load the base without "
                "offloading to the CPU or the disk (device_map)."
            )
        if decomposes:
            if is_deepspeed_zero3_enabled():
                raise ValueError("PiSSA cannot decompose weights that DeepSpeed ZeRO-3 has partitioned. Use ZeRO-2.")
            with torch.no_grad():
                for parameter, start in zip((A, B), module.start(adapter_name, config)):
                    parameter.copy_(start.view_as(parameter))
            config.count_decomposition()
        started = torch.clone if decomposes else torch.zeros_like  # or else the adapter is a LoRA with random A and B
        module.initial_A[adapter_name] = started(A.detach())
        module.initial_B[adapter_name] = started(B.detach())

    @staticmethod
    def forward(module: PissaLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return result + module.change(active_adapter, x)

    @staticmethod
    def merge_safe(module: PissaLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        return orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: PissaLayer, active_adapter: str, orig_weight: torch.Tensor) -> None:
        orig_weight.data += module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    @staticmethod
    def unmerge(module: PissaLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        return orig_weight - module.get_delta_weight(active_adapter).to(orig_weight.dtype)


class Frozen(nn.ParameterDict):
    """Parameters by adapter that are never trained.

    DDP synchronizes buffers at every forward, and FSDP 2 does not shard them. Both treat parameters as they treat A and B.
    """

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        super().__setitem__(key, nn.Parameter(value, requires_grad=False))


class PissaLayer(CombinableLayer):
    """The base of the PiSSA layers: keeps A₀ and B₀ beside A and B, as parameters that are frozen.

    PEFT saves all four as one LoRA of rank 2r (see state.py), and the layer loads either form.
    Plain LoRA adapters work in these layers as in PEFT's own.

    Attributes:
        name: the layer's name in the model.
        configs: the configuration of each adapter, of any kind.
        initial_A, initial_B: A₀ and B₀ of each PiSSA adapter.
    """

    other_param_names = (*LoraLayer.other_param_names, "lora_variant", "configs", "initial_A", "initial_B")
    name: str
    configs: dict[str, LoraConfig]
    initial_A: Any
    initial_B: Any
    _adapter_to_update: str | None = None

    def prepare(self) -> None:
        """Adds the attributes that PEFT's layers do not have."""
        if not hasattr(self, "configs"):
            self.name, self.configs = "", {}
            self.initial_A, self.initial_B = Frozen(), Frozen()

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        self.prepare()
        config, name = config_and_name_of_layer(kwargs)
        if isinstance(config, PrincipalStart) and loads_adapter_by_transformers():
            raise HfExtError(
                f"model.load_adapter of Transformers cannot load an adapter of {type(config).__name__}. Use PeftModel: "
                "PeftModel.from_pretrained(model, folder)."
            )
        if (tuner := tuner_that_makes_layer()) is not None:
            combine_as_loras(tuner)
        self.configs[adapter_name], self.name = config, name or self.name
        self._adapter_to_update = adapter_name
        try:
            super().update_layer(adapter_name, *args, **kwargs)
        except BaseException:
            self.configs.pop(adapter_name, None)
            if isinstance(config, PrincipalStart):
                config.close_bar()
            raise
        finally:
            self._adapter_to_update = None

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        super().set_adapter(*args, **kwargs)
        # PEFT calls this in update_layer of each layer, and in all layers once every layer has its adapter.
        if self._adapter_to_update is None:
            for config in self.configs.values():
                if isinstance(config, PrincipalStart):
                    config.close_bar()

    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        if init_lora_weights != PRINCIPAL:
            super().reset_lora_parameters(adapter_name, init_lora_weights)
        elif self.configs[adapter_name].is_trained:  # type: ignore[attr-defined]  # PRINCIPAL is of a `PrincipalStart`
            super().reset_lora_parameters(adapter_name, True)
        # `PissaVariant.init` handles the others.

    def resolve_lora_variant(self, **kwargs: Any) -> LoraVariant | None:
        config = self.configs.get(self._adapter_to_update or "")
        return PissaVariant() if isinstance(config, PrincipalStart) else super().resolve_lora_variant(**kwargs)

    def pissa_adapters(self) -> list[str]:
        return [name for name, variant in self.lora_variant.items() if isinstance(variant, PissaVariant)]

    def keys(self, adapter: str) -> tuple[str, str]:
        """Returns the names of A and B in the layer's state dict."""
        return f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight"

    def factors(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Returns the parameters A, (r, n), and B, (m, r). In a convolution, they have further dimensions."""
        return self.lora_A[adapter].weight, self.lora_B[adapter].weight

    @abstractmethod
    def matrix(self) -> torch.Tensor:
        """Returns the weight as the (m, n) matrix that PiSSA decomposes, float32.

        Raises:
            ValueError: the weight does not consist of floats.
        """

    def start(self, adapter: str, config: PrincipalStart) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes A and B from the weight's principal components."""
        niter = None if config.svd == "exact" else config.niter
        components = principal_components(self.matrix(), self.r[adapter], niter, seed=config.seed)
        B, A = initial_factors(components, self.start_scaling(adapter))
        return A, B

    def initial(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A₀ and B₀ in the dtype of A and B."""
        A, A0, B0 = self.factors(adapter)[0], self.initial_A[adapter].detach(), self.initial_B[adapter].detach()
        check_gathered(adapter, A)
        if A.shape != A0.shape:
            raise ValueError(
                f"A of the adapter '{adapter}' has the shape {tuple(A.shape)} instead of {tuple(A0.shape)}. PiSSA's training "
                "form does not support hotswapping. Use PeftModel.load_adapter."
            )
        return A0.to(A.dtype), B0.to(A.dtype)

    def start_scaling(self, adapter: str) -> float:
        """Returns the scaling at the start of training, which A₀ and B₀ belong to."""
        rank = self.r[adapter]
        return self.lora_alpha[adapter] / (math.sqrt(rank) if self.use_rslora[adapter] else rank)

    @torch.no_grad()
    def report(self, adapter: str, name: str) -> LayerReport:
        """Reports what an adapter started from in this layer; `name` is the layer's name."""
        A, B = (factor.float().flatten(1) for factor in self.initial(adapter))
        part = energy(B, A, self.start_scaling(adapter))
        share = part / torch.linalg.norm(gathered(self.matrix())).square().clamp_min(torch.finfo(part.dtype).tiny)
        return LayerReport(name, self.r[adapter], share.item(), None, None)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        if adapter not in self.pissa_adapters():
            return super().get_delta_weight(adapter)
        now, before = (
            (B.float().flatten(1) @ A.float().flatten(1)) * self.scaling[adapter]
            for A, B in (self.factors(adapter), self.initial(adapter))
        )
        delta = (now - before).to(self.factors(adapter)[0].dtype)
        return delta.T if self.is_transposed() else delta

    def stacked(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        (A, B), (A0, B0) = self.factors(adapter), self.initial(adapter)
        return stacked(A.detach(), B.detach(), A0, B0, self.is_quantized(adapter))

    def is_quantized(self, adapter: str) -> bool:
        """Tells whether an adapter is of QPiSSA."""
        return self.configs[adapter].peft_type == "QPISSA"

    def rows(self, adapter: str) -> int:
        """Returns the number of rows of A."""
        return self.r[adapter]

    def split(self, A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first half of the saved A, and A₀ as it is kept."""
        first, A0 = A.chunk(2)
        return first, A0

    def is_transposed(self) -> bool:
        """Tells whether the weight is stored as (n, m)."""
        return False

    @abstractmethod
    def change(self, adapter: str, x: torch.Tensor) -> torch.Tensor:
        """Computes s (B A − B₀ A₀) x, which is exactly zero before training."""

    def state_dict(self, *args: Any, destination: dict | None = None, prefix: str = "", keep_vars: bool = False) -> dict:
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if saves_only_lora_tensors():
            for adapter in self.pissa_adapters():
                stack(state, adapter, prefix, self.is_quantized(adapter))
        return state

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        for adapter in self.pissa_adapters():
            a, b = (prefix + key for key in self.keys(adapter))
            if a in state_dict and b in state_dict and len(state_dict[a]) == 2 * self.rows(adapter):
                (first, A0), (B, second) = self.split(state_dict[a]), state_dict[b].chunk(2, dim=1)
                A, B0 = unstacked(first, A0.reshape(first.shape), B, second, self.is_quantized(adapter))
                self.check_initial(adapter, gathered(A0), gathered(B0))
                state_dict[a], state_dict[b] = A.clone(), B.contiguous()
                # The submodules load these.
                state_dict[f"{prefix}initial_A.{adapter}"], state_dict[f"{prefix}initial_B.{adapter}"] = A0.clone(), B0
            elif a in state_dict and f"{prefix}initial_A.{adapter}" not in state_dict:
                self._require_own_form(adapter, len(state_dict[a]))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _require_own_form(self, adapter: str, rows: int) -> None:
        """Checks that factors without A₀ and B₀ are not those of a saved LoRA, whose change does not contain this start.

        Raises:
            HfExtError: they are.
        """
        config = self.configs[adapter]
        starts = isinstance(config, PrincipalStart) and config.init_lora_weights and not config.is_trained
        if starts and rows == self.rows(adapter) and loads_adapter():
            rank = self.r[adapter]
            raise HfExtError(
                f"The saved adapter has rank {rank} in {self.name or 'a layer'}, but PiSSA with r={rank} saves rank "
                f"{2 * rank}. It is a LoRA, or was trained with r={rank // 2}. Load it with PeftModel.from_pretrained, and "
                "with config=PissaConfig.from_pretrained(folder) to continue PiSSA."
            )

    def check_initial(self, adapter: str, A0: torch.Tensor, B0: torch.Tensor) -> None:
        """Checks A₀ and B₀ of a saved adapter.

        Raises:
            BaseModelError: they are not principal components of this layer's weight.
        """
        device = self.get_base_layer().weight.device
        if device.type == "meta":
            return
        A0, B0 = A0.to(device), B0.to(device)
        if not is_of(B0.flatten(1), A0.flatten(1), self.start_scaling(adapter), gathered(self.matrix())):
            raise another_base(self.get_base_layer())


def another_base(layer: object) -> BaseModelError:
    """Returns the error for an adapter whose start is not in the weight of a layer."""
    return BaseModelError(
        f"The adapter's principal components are not those of the weight of {layer}: it was trained on another base, or not "
        "by PiSSA. Load it on the base that its adapter_config.json names."
    )
