"""Queries of a PEFT model's adapters."""

from __future__ import annotations

from peft.tuners.lora import LoraLayer
from torch import nn

from hf_ext.errors import HfExtError


def is_pissa(config: object) -> bool:
    """Tells whether a configuration is a `PissaConfig` or a `QPissaConfig`."""
    return hasattr(config, "svd")


def active_adapter(model: nn.Module) -> str:
    """Returns the name of the LoRA or PiSSA adapter that is active in a model.

    Raises:
        HfExtError: no adapter is active, or several are.
    """
    layers = (module for module in model.modules() if isinstance(module, LoraLayer))
    names = list(dict.fromkeys(name for layer in layers for name in layer.active_adapters))
    if not names:
        raise HfExtError("The model has no active LoRA or PiSSA adapter. Add or load one, or give adapter_name=.")
    if len(names) > 1:
        raise HfExtError(f"Several adapters of the model are active: {', '.join(names)}. Give the adapter_name= of one.")
    return names[0]
