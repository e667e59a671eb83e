"""Weighted combinations of adapters of a model, where PiSSA adapters take part as the LoRAs that they are saved as."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers.utils.logging import get_logger

from hf_ext.integration.compat import rank_of_combination
from hf_ext.pissa.start import PrincipalStart

logger = get_logger(__name__)


class CombinableLayer(LoraLayer):
    """A layer with adapters that can turn into plain LoRAs for a while."""

    @abstractmethod
    def factors(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Returns the parameters A, (r, n), and B, (m, r). In a convolution, they have further dimensions."""

    @abstractmethod
    def stacked(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the factors that are saved, of rank 2r."""

    @contextmanager
    def as_lora(self, adapter: str) -> Iterator[None]:
        """Turns a PiSSA adapter into the LoRA that it is saved as, until the context ends."""
        factors, whole = self.factors(adapter), self.stacked(adapter)
        before, variant = [factor.data for factor in factors], self.lora_variant.pop(adapter)
        for factor, data in zip(factors, whole):
            factor.data = data
        try:
            yield
        finally:
            for factor, data in zip(factors, before):
                factor.data = data
            self.lora_variant[adapter] = variant


def add_weighted_adapter(
    model: PeftModel | LoraModel,
    adapters: list[str],
    weights: list[float],
    adapter_name: str,
    combination_type: str = "svd",
    svd_rank: int | None = None,
    **options: Any,
) -> None:
    """Adds a weighted combination of LoRA and PiSSA adapters to their model, with the arguments of PEFT's method.

    A PiSSA adapter of rank r takes part as the LoRA of rank 2r that it is saved as. The combination is a LoRA. Without
    svd_rank, combinations by SVD have the largest rank of the adapters, at most that of the smallest layer.

    Raises:
        ValueError: PEFT cannot combine these adapters, or one is of QPiSSA.
    """
    tuner = model.base_model if isinstance(model, PeftModel) else model
    layers = [module for module in tuner.modules() if isinstance(module, CombinableLayer)]
    with ExitStack() as stack:
        for adapter in dict.fromkeys(adapters):
            config = tuner.peft_config.get(adapter)
            if isinstance(config, PrincipalStart) and config.peft_type == "LORA":
                for layer in layers:
                    if adapter in layer.scaling:
                        stack.enter_context(layer.as_lora(adapter))
                stack.callback(tuner.peft_config.__setitem__, adapter, config)
                tuner.peft_config[adapter] = config.to_lora_config()
        if combination_type.endswith("svd") and svd_rank is None:
            svd_rank = _rank_of_all_layers(tuner, layers, adapters, combination_type)
        type(tuner).add_weighted_adapter(tuner, adapters, weights, adapter_name, combination_type, svd_rank, **options)


def combine_as_loras(tuner: nn.Module) -> None:
    """Makes the method of a model's LoRA tuner this module's: PEFT's would combine A and B without A₀ and B₀."""
    if type(tuner) is LoraModel:
        tuner.__dict__["add_weighted_adapter"] = partial(add_weighted_adapter, tuner)


def _rank_of_all_layers(tuner: Any, layers: list[CombinableLayer], adapters: list[str], combination_type: str) -> int:
    """Returns the rank that PEFT would take, or the rank of the smallest layer if PEFT's SVD would fail there."""
    rank = rank_of_combination(tuner, adapters, combination_type)
    shapes = [layer.get_base_layer().weight.flatten(1).shape for layer in layers if layer.scaling.keys() & set(adapters)]
    smallest = min((min(shape) for shape in shapes), default=rank)
    if smallest < rank:
        logger.warning(f"The combination has rank {smallest}, that of the smallest layer, instead of {rank}.")
    return min(rank, smallest)
