"""The LoRA tuner of models with PiSSA adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from peft.tuners.lora import LoraModel
from torch import nn

from hf_ext.pissa.adapters import is_pissa


class PissaModel(LoraModel):
    """PEFT's LoRA tuner, whose `add_weighted_adapter` combines PiSSA adapters as the LoRAs that they are saved as.

    PEFT makes a `LoraModel`, because PiSSA's adapters are of type LORA. The first PiSSA layer gives it this class.
    """

    @staticmethod
    def adopt(tuner: nn.Module) -> None:
        """Makes PEFT's tuner a `PissaModel`."""
        if type(tuner) is LoraModel:
            tuner.__class__ = PissaModel

    def add_weighted_adapter(self, adapters: Sequence[str], *args: Any, **kwargs: Any) -> None:
        """Adds a weighted combination of adapters, with the arguments of PEFT's method.

        A PiSSA adapter of rank r takes part as a LoRA of rank 2r, [B, −B₀] [A; A₀]. The combination is a LoRA.
        """
        with ExitStack() as stack:
            for adapter in dict.fromkeys(adapters):
                if is_pissa(self.peft_config.get(adapter)):
                    stack.enter_context(self._as_lora(adapter))
            super().add_weighted_adapter(adapters, *args, **kwargs)

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
