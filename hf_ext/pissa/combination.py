"""The LoRA tuner of models with PiSSA adapters: combines and saves them as LoRAs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from peft.tuners.lora import LoraModel
from torch import nn
from transformers.utils.logging import get_logger

from hf_ext.pissa.adapters import is_pissa
from hf_ext.pissa.state import stack

logger = get_logger(__name__)


class PissaModel(LoraModel):
    """PEFT's LoRA tuner, which combines and saves PiSSA adapters as LoRAs.

    PEFT makes a `LoraModel`, because PiSSA's adapters are of type LORA. The first PiSSA layer gives it this class.
    """

    @staticmethod
    def adopt(tuner: nn.Module) -> None:
        """Makes PEFT's tuner a `PissaModel`."""
        if type(tuner) is LoraModel:
            tuner.__class__ = PissaModel

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "svd",
        svd_rank: int | None = None,
        **options: Any,
    ) -> None:
        """Adds a weighted combination of adapters, with the arguments of PEFT's method.

        A PiSSA adapter of rank r takes part as a LoRA of rank 2r, [B, −B₀] [A; A₀]. The combination is a LoRA. Without
        svd_rank, combinations by SVD have the largest rank of the adapters, at most that of the smallest layer.
        """
        with ExitStack() as stack:
            for adapter in dict.fromkeys(adapters):
                if is_pissa(self.peft_config.get(adapter)):
                    stack.enter_context(self._as_lora(adapter))
            if combination_type.endswith("svd") and svd_rank is None:
                svd_rank = self._rank_of_all_layers(adapters, combination_type)
            super().add_weighted_adapter(adapters, weights, adapter_name, combination_type, svd_rank, **options)

    @classmethod
    def _get_adapter_state_dict(cls, model, config, adapter_name, state_dict, unwanted_adapter_names):
        state = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        stack(state, adapter_name)
        return state

    def _rank_of_all_layers(self, adapters: list[str], combination_type: str) -> int:
        """Returns the rank that PEFT would take, or the rank of the smallest layer if PEFT's SVD would fail there."""
        _, rank, _ = self._check_add_weighted_adapter(adapters=adapters, combination_type=combination_type, svd_rank=None)
        layers = [module for module in self.modules() if hasattr(module, "pissa_adapters")]
        shapes = [layer.get_base_layer().weight.flatten(1).shape for layer in layers if layer.scaling.keys() & set(adapters)]
        smallest = min((min(shape) for shape in shapes), default=rank)
        if smallest < rank:
            logger.warning(f"The combination has rank {smallest}, that of the smallest layer, instead of {rank}.")
        return min(rank, smallest)

    @contextmanager
    def _as_lora(self, adapter: str) -> Iterator[None]:
        config = self.peft_config[adapter]
        layers = [module for module in self.modules() if hasattr(module, "pissa_adapters")]
        with ExitStack() as stack:
            for layer in layers:
                if adapter in layer.pissa_adapters():
                    stack.enter_context(layer.as_lora(adapter))
            self.peft_config[adapter] = config.to_lora_config()
            try:
                yield
            finally:
                self.peft_config[adapter] = config
