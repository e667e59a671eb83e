"""Layers that compute W x + s (B A − B₀ A₀) x: PEFT's LoRA layers with a variant of their own."""

from __future__ import annotations

import math
from abc import abstractmethod
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch
from peft import LoraConfig
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, LoraVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.peft import PeftAdapterMixin
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import tqdm

from hf_ext.errors import BaseModelError, HfExtError
from hf_ext.integration.compat import config_and_name_of_layer, variables_of_caller
from hf_ext.pissa.adapters import is_pissa, refuse_combination
from hf_ext.pissa.decomposition import energy, initial_factors, is_of, principal_components
from hf_ext.pissa.reports import LayerReport

if TYPE_CHECKING:
    from hf_ext.pissa.config import PissaConfig

#: `init_lora_weights` of an adapter whose weights PiSSA decomposes. PEFT's own layers do not know it and name it in an error.
PRINCIPAL = "principal components (see hf_ext.pissa.accept_pissa)"
#: Every layer that is alive, in the order of creation. Model cards find the layers of an adapter here.
LAYERS: WeakValueDictionary[int, PissaLayer] = WeakValueDictionary()
_numbers = count()


class PissaVariant(LoraVariant):
    """A PiSSA adapter's part in a layer, in PEFT's terms; `module` is a `PissaLayer`."""

    @staticmethod
    def init(module: PissaLayer, adapter_name: str, **kwargs: Any) -> None:
        config = module.configs[adapter_name]
        if module.merged:
            raise ValueError("The model has merged adapters. Call unmerge_adapter() before you add a PiSSA adapter.")
        A, B = module.factors(adapter_name)
        rank, shape = module.r[adapter_name], (module.out_features, module.in_features)
        if rank > min(shape):
            raise ValueError(
                f"r={rank} is more than the {min(shape)} principal components that {module.name or 'a layer'} "
                f"({shape[0]} × {shape[1]}) has. Set a smaller r, or a rank_pattern for this layer."
            )
        decomposes = bool(config.init_lora_weights) and A.device.type != "meta"
        if decomposes:
            if is_deepspeed_zero3_enabled():
                raise ValueError("PiSSA cannot decompose weights that DeepSpeed ZeRO-3 has partitioned. Use ZeRO-2.")
            with torch.no_grad():
                for parameter, start in zip((A, B), module.start(adapter_name, config)):
                    parameter.copy_(start)
            PissaLayer.count_decomposition()
        module.initial_A[adapter_name] = A.detach().clone()
        module.initial_B[adapter_name] = B.detach().clone()
        if decomposes:
            module.note_start(adapter_name)

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


class PissaLayer(LoraLayer):
    """The base of the PiSSA layers: keeps A₀ and B₀ beside A and B. In the state dict, all four stand as one LoRA of rank 2r.

    So whatever saves or loads through state dicts (PEFT, Trainer, Accelerate) reads and writes [A; A₀] and [B, −B₀].
    Plain LoRA adapters work in these layers as in PEFT's own.

    Attributes:
        name: the layer's name in the model.
        configs: the configuration of each adapter, of any kind.
        initial_A, initial_B: A₀ and B₀ of each PiSSA adapter.
        started: the report on the start of each PiSSA adapter, where it is known.
    """

    other_param_names = (*LoraLayer.other_param_names, "lora_variant", "configs", "initial_A", "initial_B", "started")
    name: str
    configs: dict[str, LoraConfig]
    initial_A: BufferDict
    initial_B: BufferDict
    started: dict[str, LayerReport]
    _bar: ClassVar[Any] = None  # over the layers of the adapter that PEFT is adding
    _adapter_to_update: str | None = None

    def prepare(self) -> None:
        """Adds the attributes that PEFT's layers do not have."""
        if not hasattr(self, "configs"):
            self.name, self.configs, self.started = "", {}, {}
            self.initial_A, self.initial_B = BufferDict(), BufferDict()
            LAYERS[next(_numbers)] = self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        LAYERS[next(_numbers)] = self  # a copy of a layer

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        self.prepare()
        refuse_combination()
        config, name = config_and_name_of_layer(kwargs)
        if is_pissa(config) and variables_of_caller(PeftAdapterMixin.load_adapter) is not None:
            raise HfExtError(
                f"model.load_adapter of Transformers cannot load an adapter of {type(config).__name__}. Use PeftModel: "
                "PeftModel.from_pretrained(model, folder)."
            )
        self.configs[adapter_name], self.name = config, name or self.name
        self._adapter_to_update = adapter_name
        try:
            super().update_layer(adapter_name, *args, **kwargs)
        except BaseException:
            self.configs.pop(adapter_name, None)
            PissaLayer.close_bar()
            raise
        finally:
            self._adapter_to_update = None

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        super().set_adapter(*args, **kwargs)
        # PEFT calls this in update_layer of each layer, and in all layers once every layer has its adapter.
        if self._adapter_to_update is None:
            PissaLayer.close_bar()

    @staticmethod
    def count_decomposition() -> None:
        """Advances the progress bar over the layers of the adapter that PEFT is adding."""
        if PissaLayer._bar is None:
            PissaLayer._bar = tqdm(desc="Principal components", unit=" layers")
        PissaLayer._bar.update()

    @staticmethod
    def close_bar() -> None:
        if PissaLayer._bar is not None:
            PissaLayer._bar.close()
            PissaLayer._bar = None

    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        if init_lora_weights != PRINCIPAL:  # `PissaVariant.init` handles that one
            super().reset_lora_parameters(adapter_name, init_lora_weights)

    def resolve_lora_variant(self, **kwargs: Any) -> LoraVariant | None:
        config = self.configs.get(self._adapter_to_update or "")
        return PissaVariant() if is_pissa(config) else super().resolve_lora_variant(**kwargs)

    def pissa_adapters(self) -> list[str]:
        return [name for name, variant in self.lora_variant.items() if isinstance(variant, PissaVariant)]

    @abstractmethod
    def keys(self, adapter: str) -> tuple[str, str]:
        """Returns the names of A and B in the layer's state dict."""

    @abstractmethod
    def factors(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Returns A, (r, n), and B, (m, r)."""

    @abstractmethod
    def matrix(self) -> torch.Tensor:
        """Returns the weight as the (m, n) matrix that PiSSA decomposes, float32.

        Raises:
            ValueError: the weight does not consist of floats.
        """

    def start(self, adapter: str, config: PissaConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes A and B from the weight's principal components."""
        niter = None if config.svd == "exact" else config.niter
        components = principal_components(self.matrix(), self.r[adapter], niter, seed=config.seed)
        B, A = initial_factors(components, self.start_scaling(adapter))
        return A, B

    def initial(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A₀ and B₀ in the dtype of A and B."""
        A, A0 = self.factors(adapter)[0], self.initial_A[adapter]
        if A.shape != A0.shape:
            raise ValueError(
                f"A of the adapter '{adapter}' has the shape {tuple(A.shape)} instead of {tuple(A0.shape)}. PiSSA's training "
                "form does not support hotswapping. Use PeftModel.load_adapter."
            )
        return A0.to(A.dtype), self.initial_B[adapter].to(A.dtype)

    def start_scaling(self, adapter: str) -> float:
        """Returns the scaling at the start of training, which A₀ and B₀ belong to."""
        rank = self.r[adapter]
        return self.lora_alpha[adapter] / (math.sqrt(rank) if self.use_rslora[adapter] else rank)

    @torch.no_grad()
    def report(self, adapter: str, name: str) -> LayerReport:
        """Reports what an adapter started from in this layer; `name` is the layer's name."""
        A, B = self.initial(adapter)
        part = energy(B.float(), A.float(), self.start_scaling(adapter))
        share = part / torch.linalg.norm(self.matrix()).square().clamp_min(torch.finfo(part.dtype).tiny)
        return LayerReport(name, self.r[adapter], share.item(), None, None)

    def note_start(self, adapter: str) -> None:
        """Records the report on the adapter's start, for the model card."""
        self.started[adapter] = self.report(adapter, self.name)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        delta = super().get_delta_weight(adapter)
        if adapter not in self.pissa_adapters():
            return delta
        A, B = self.initial(adapter)
        before = (B.float() @ A.float() * self.scaling[adapter]).to(delta.dtype)
        return delta - (before.T if self.is_transposed() else before)

    @abstractmethod
    def is_transposed(self) -> bool:
        """Tells whether the weight is stored as (n, m)."""

    @abstractmethod
    def change(self, adapter: str, x: torch.Tensor) -> torch.Tensor:
        """Computes s (B A − B₀ A₀) x, which is exactly zero before training."""

    def state_dict(self, *args: Any, destination: dict | None = None, prefix: str = "", keep_vars: bool = False) -> dict:
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for adapter in self.pissa_adapters():
            A0, B0 = self.initial(adapter)
            a, b = (prefix + key for key in self.keys(adapter))
            state[a], state[b] = torch.cat([state[a], A0]), torch.cat([state[b], -B0], dim=1)
        return state

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        for adapter in self.pissa_adapters():
            a, b = (prefix + key for key in self.keys(adapter))
            if a in state_dict and b in state_dict and len(state_dict[a]) == 2 * self.r[adapter]:
                (A, A0), (B, B0) = state_dict[a].chunk(2), state_dict[b].chunk(2, dim=1)
                self.set_initial(adapter, A0.clone(), -B0)
                state_dict[a], state_dict[b] = A.clone(), B.contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def set_initial(self, adapter: str, A0: torch.Tensor, B0: torch.Tensor) -> None:
        """Sets A₀ and B₀ of a saved adapter.

        Raises:
            BaseModelError: they are not principal components of this layer's weight.
        """
        weight = self.get_base_layer().weight
        if weight.device.type != "meta" and not is_of(
            B0.to(weight.device), A0.to(weight.device), self.start_scaling(adapter), self.matrix()
        ):
            raise another_base(self.get_base_layer())
        device = weight.device
        self.initial_A[adapter], self.initial_B[adapter] = A0.to(device), B0.to(device)
        if weight.device.type != "meta":
            self.note_start(adapter)


class PissaLinear(PissaLayer, Linear):
    """The layer for `torch.nn.Linear` and for Transformers' `Conv1D`, whose weight is stored as (n, m)."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **kwargs: Any):
        inner = base_layer.get_base_layer() if isinstance(base_layer, BaseTunerLayer) else base_layer
        config, _ = config_and_name_of_layer(kwargs)
        config.fan_in_fan_out = isinstance(inner, Conv1D)
        if "fan_in_fan_out" in kwargs:  # PEFT 0.18 passes each option
            kwargs["fan_in_fan_out"] = config.fan_in_fan_out
        super().__init__(base_layer, adapter_name, is_target_conv_1d_layer=config.fan_in_fan_out, **kwargs)

    def keys(self, adapter: str) -> tuple[str, str]:
        return f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight"

    def factors(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        return self.lora_A[adapter].weight, self.lora_B[adapter].weight

    def is_transposed(self) -> bool:
        return self.fan_in_fan_out

    def matrix(self) -> torch.Tensor:
        weight = self.get_base_layer().weight
        # bitsandbytes may pack its codes into a float dtype.
        if type(weight).__name__ in ("Params4bit", "Int8Params"):
            raise ValueError(
                f"The weight of {self.get_base_layer()} is quantized: PiSSA cannot start from it. Use QPissaConfig."
            )
        if not weight.is_floating_point() or weight.shape != self._matrix_shape():
            raise ValueError(f"The weight of {self.get_base_layer()} is not a matrix of floats: PiSSA cannot start from it.")
        matrix = weight.detach().float()
        return matrix.T if self.is_transposed() else matrix

    def _matrix_shape(self) -> tuple[int, int]:
        shape = self.out_features, self.in_features
        return shape[::-1] if self.is_transposed() else shape

    def change(self, adapter: str, x: torch.Tensor) -> torch.Tensor:
        x, scaling = self.lora_dropout[adapter](x), self.scaling[adapter]
        A0, B0 = self.initial(adapter)
        # The small tensors are scaled and negated. The difference of two equal products is still exactly zero.
        A, B = self.lora_A[adapter], self.lora_B[adapter]
        return B(A(x) * scaling) + functional.linear(functional.linear(x, A0) * scaling, -B0)


class PissaEmbedding(PissaLayer, Embedding):
    """The layer for `torch.nn.Embedding`. PiSSA decomposes the transpose of its weight (entries, width)."""

    def keys(self, adapter: str) -> tuple[str, str]:
        return f"lora_embedding_A.{adapter}", f"lora_embedding_B.{adapter}"

    def factors(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        return self.lora_embedding_A[adapter], self.lora_embedding_B[adapter]

    def is_transposed(self) -> bool:
        return True

    def matrix(self) -> torch.Tensor:
        return self.get_base_layer().weight.detach().float().T

    def change(self, adapter: str, x: torch.Tensor) -> torch.Tensor:
        """Computes s (B A − B₀ A₀) of the entries x."""
        now, before = (self._embed(x, A.T) @ B.T for A, B in (self.factors(adapter), self.initial(adapter)))
        change = (now - before) * self.scaling[adapter]
        scale = self._get_embed_scale()
        return change if scale is None else change * scale.to(change.dtype)

    def _mixed_batch_forward(self, x: torch.Tensor, *args: Any, adapter_names: list[str], **kwargs: Any) -> torch.Tensor:
        if any(name in self.pissa_adapters() for name in adapter_names):
            raise ValueError(
                "Embeddings with PiSSA adapters cannot mix adapters in a batch. Save the adapter and load it as a LoRA."
            )
        return super()._mixed_batch_forward(x, *args, adapter_names=adapter_names, **kwargs)


def starts_of(config: LoraConfig) -> list[LayerReport]:
    """Returns the reports on the start of the adapter with this configuration object, layer by layer."""
    found = {}
    for layer in list(LAYERS.values()):
        for adapter, report in layer.started.items():
            if layer.configs[adapter] is config:
                found[report.layer] = report
    return list(found.values())


def another_base(layer: object) -> BaseModelError:
    """Returns the error for an adapter whose start is not in the weight of a layer."""
    return BaseModelError(
        f"The adapter's principal components are not those of the weight of {layer}: it was trained on another base, or not "
        "by PiSSA. Load it on the base that its adapter_config.json names."
    )


def refuse(target: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Raises an error in place of a layer class, for targets that have no matrix.

    Raises:
        ValueError: always.
    """
    _, name = config_and_name_of_layer(kwargs)
    if parameter := kwargs.get("parameter_name"):
        raise ValueError(
            f"PiSSA has no adapter for the parameter {parameter} of {type(target).__name__} ({name}). "
            'Name the linear layers in target_modules, instead of "all-linear" or target_parameters.'
        )
    raise ValueError(
        f"PiSSA has no adapter for {type(target).__name__} ({name}), only for Linear, Conv1D and "
        "Embedding layers. Leave it out of target_modules, or name it in exclude_modules."
    )


def accept_pissa(model: nn.Module) -> None:
    """Prepares a model that already has LoRA adapters for PiSSA adapters: replaces PEFT's layers by this package's.

    Layers that PiSSA does not support (quantized layers, convolutions) do not change and refuse a PiSSA adapter.

    Args:
        model: a `PeftModel`, or a model with injected adapters.
    """
    for name, module in list(model.named_modules()):
        for theirs, ours in ((Linear, PissaLinear), (Embedding, PissaEmbedding)):
            if type(module) is theirs:
                layer = ours.__new__(ours)
                layer.__dict__ = module.__dict__
                layer.prepare()
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, layer)
