"""PiSSA's layer for each kind of target: linear layers, embeddings and convolutions."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d, Embedding, Linear
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_ext.adapters.landing import computes_as_linear
from hf_ext.errors import AdapterError
from hf_ext.pissa.config import PissaConfig
from hf_ext.pissa.layer import PissaLayer


class PissaLinear(PissaLayer, Linear):
    """The layer for `torch.nn.Linear` and for Transformers' `Conv1D`, whose weight is stored as (n, m)."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: PissaConfig, **kwargs: Any):
        is_conv1d = isinstance(base_layer, Conv1D)
        config.fan_in_fan_out = is_conv1d
        super().__init__(base_layer, adapter_name, config=config, is_target_conv_1d_layer=is_conv1d, **kwargs)

    def is_transposed(self) -> bool:
        return self.fan_in_fan_out

    def matrix(self) -> torch.Tensor:
        return self.base_weight().float().T if self.is_transposed() else self.base_weight().float()

    def product(self, adapter: str, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.linear(x, A), B)


class PissaEmbedding(PissaLayer, Embedding):
    """The layer for `torch.nn.Embedding`. PiSSA decomposes the transpose of its weight (entries, width)."""

    def factors(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        return self.lora_embedding_A[adapter], self.lora_embedding_B[adapter]

    def keys(self, adapter: str) -> tuple[str, str]:
        return f"lora_embedding_A.{adapter}", f"lora_embedding_B.{adapter}"

    def is_transposed(self) -> bool:
        return True

    def matrix(self) -> torch.Tensor:
        return self.base_weight().float().T

    def product(self, adapter: str, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Computes B A of the entries x."""
        product, scale = self._embed(x, A.T) @ B.T, self._get_embed_scale()
        return product if scale is None else product * scale.to(product.dtype)

    def _mixed_batch_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AdapterError(
            "Embeddings with PiSSA adapters cannot mix adapters in a batch. Save the adapter and load it as a LoRA."
        )


class _PissaConv(PissaLayer):
    """The layer for a convolution. PiSSA decomposes its weight (m, channels, …) as the matrix (m, channels · kernel size). A is
    a convolution with r output channels, and B one with a kernel of size 1, as in PEFT."""

    @property
    def trailing(self) -> int:  # type: ignore[override]
        return self.get_base_layer().weight.dim() - 2

    def start(self, adapter: str, config: PissaConfig) -> None:
        base = self.get_base_layer()
        if base.groups > 1 or set(base.dilation) != {1} or base.padding_mode != "zeros":  # PEFT's convolution A has neither
            raise AdapterError(
                "PiSSA does not support convolutions with groups, dilation or a padding_mode other than 'zeros'. Leave this "
                "one out of target_modules, or name it in exclude_modules."
            )
        super().start(adapter, config)

    def matrix(self) -> torch.Tensor:
        return self.base_weight().float().flatten(1)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        return super().get_delta_weight(adapter).reshape(self.get_base_layer().weight.shape)

    def product(self, adapter: str, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        conv = self.lora_A[adapter]
        return self.conv_fn(self.conv_fn(x, A, stride=conv.stride, padding=conv.padding), B)


class PissaConv1d(_PissaConv, Conv1d):
    """The layer for `torch.nn.Conv1d`."""


class PissaConv2d(_PissaConv, Conv2d):
    """The layer for `torch.nn.Conv2d`."""


class PissaConv3d(_PissaConv, Conv3d):
    """The layer for `torch.nn.Conv3d`."""


#: PiSSA's layer for each kind of target.
KINDS: dict[type[nn.Module], type[PissaLayer]] = {
    nn.Linear: PissaLinear,
    Conv1D: PissaLinear,
    nn.Embedding: PissaEmbedding,
    nn.Conv1d: PissaConv1d,
    nn.Conv2d: PissaConv2d,
    nn.Conv3d: PissaConv3d,
}


def computes_as(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Checks whether a layer computes as the class in KINDS that it belongs to. Some subclasses pad, scale or shift by
    themselves, which an adapter beside them would not. PEFT knows embeddings that scale by `embed_scale`."""
    if kind in (nn.Linear, Conv1D):
        return computes_as_linear(layer)
    own = type(layer)
    is_same = all(getattr(own, name, None) is getattr(kind, name, None) for name in ("forward", "_conv_forward"))
    return is_same or kind is nn.Embedding and hasattr(layer, "embed_scale")
