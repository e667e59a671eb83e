"""PiSSA's layer for each kind of target: linear layers, embeddings and convolutions, and experts."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d, Embedding, Linear, LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_ext.integration import versions
from hf_ext.integration.compat import config_and_name_of_layer
from hf_ext.pissa.experts import PissaExperts
from hf_ext.pissa.layer import PissaLayer
from hf_ext.pissa.start import PrincipalStart


class PissaLinear(PissaLayer, Linear):
    """The layer for `torch.nn.Linear` and for Transformers' `Conv1D`, whose weight is stored as (n, m)."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **kwargs: Any):
        inner = base_layer.get_base_layer() if isinstance(base_layer, BaseTunerLayer) else base_layer
        config, _ = config_and_name_of_layer(kwargs)
        config.fan_in_fan_out = isinstance(inner, Conv1D)
        if "fan_in_fan_out" in kwargs:  # PEFT 0.18 passes each option
            kwargs["fan_in_fan_out"] = config.fan_in_fan_out
        super().__init__(base_layer, adapter_name, is_target_conv_1d_layer=config.fan_in_fan_out, **kwargs)

    def is_transposed(self) -> bool:
        return self.fan_in_fan_out

    def matrix(self) -> torch.Tensor:
        weight = self.get_base_layer().weight
        # bitsandbytes may pack its codes into a float dtype.
        if type(weight).__name__ in ("Params4bit", "Int8Params"):
            raise ValueError(
                f"The weight of {self.get_base_layer()} is quantized: PiSSA cannot start from it. Use QPissaConfig."
            )
        if weight.is_floating_point() and weight.element_size() == 1:  # codes, whose scales are elsewhere
            raise ValueError(
                f"The weight of {self.get_base_layer()} is quantized to {weight.dtype}: PiSSA cannot start from it. Load the "
                "base in bfloat16 (with an FP8 checkpoint: FineGrainedFP8Config(dequantize=True))."
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


class _PissaConv(PissaLayer):
    """The layer for a convolution. PiSSA decomposes its weight (m, channels, …) as the matrix (m, channels · kernel size).

    A is a convolution with r output channels, and B one with a kernel of size 1, as in PEFT.
    """

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        base, (config, name) = self.get_base_layer(), config_and_name_of_layer(kwargs)
        # PEFT's convolution A has neither.
        unsupported = base.groups > 1 or set(base.dilation) != {1} or base.padding_mode != "zeros"
        if isinstance(config, PrincipalStart) and unsupported:
            raise ValueError(
                f"{name or 'A convolution'} has groups, dilation or a padding_mode other than 'zeros', which PiSSA does not "
                "support. Leave it out of target_modules, or name it in exclude_modules."
            )
        super().update_layer(*args, **kwargs)

    def matrix(self) -> torch.Tensor:
        return self.get_base_layer().weight.detach().float().flatten(1)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        return super().get_delta_weight(adapter).view(self.get_base_layer().weight.shape)

    def change(self, adapter: str, x: torch.Tensor) -> torch.Tensor:
        x, scaling, A = self.lora_dropout[adapter](x), self.scaling[adapter], self.lora_A[adapter]
        A0, B0 = self.initial(adapter)
        before = self.conv_fn(self.conv_fn(x, A0, stride=A.stride, padding=A.padding) * scaling, -B0)
        return self.lora_B[adapter](A(x) * scaling) + before


class PissaConv1d(_PissaConv, Conv1d):
    """The layer for `torch.nn.Conv1d`."""


class PissaConv2d(_PissaConv, Conv2d):
    """The layer for `torch.nn.Conv2d`."""


class PissaConv3d(_PissaConv, Conv3d):
    """The layer for `torch.nn.Conv3d`."""


#: PiSSA's layer for each of PEFT's.
KINDS: dict[type[LoraLayer], type[PissaLayer]] = {
    Linear: PissaLinear,
    Embedding: PissaEmbedding,
    Conv1d: PissaConv1d,
    Conv2d: PissaConv2d,
    Conv3d: PissaConv3d,
    ParamWrapper: PissaExperts,
}


def layer_for(target: nn.Module, adapter_name: str, **kwargs: Any) -> PissaExperts:
    """Returns the layer for a parameter, such as the weights of experts.

    Raises:
        ValueError: the target is another one, which has no matrix.
        ImportError: PEFT is too old.
    """
    _, name = config_and_name_of_layer(kwargs)
    inner = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if kwargs.get("parameter_name") is None:
        raise ValueError(
            f"PiSSA has no adapter for {type(inner).__name__} ({name}), only for linear layers, embeddings, "
            "convolutions and parameters. Leave it out of target_modules, or name it in exclude_modules."
        )
    versions.require("PiSSA for parameters", "peft>=0.21")
    return PissaExperts(target, adapter_name, **kwargs)


def accept_pissa(model: nn.Module) -> None:
    """Prepares a model that already has LoRA adapters for PiSSA adapters: replaces PEFT's layers by this package's.

    Layers that PiSSA does not support, such as quantized ones, do not change and refuse a PiSSA adapter.

    Args:
        model: a `PeftModel`, or a model with injected adapters.
    """
    for name, module in list(model.named_modules()):
        kind = KINDS.get(type(module))
        if kind is not None:
            layer = kind.__new__(kind)
            layer.__dict__ = module.__dict__
            layer.prepare()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
