"""Queries of a PEFT model's adapters."""

from __future__ import annotations

from peft.tuners.lora import LoraLayer, LoraModel
from torch import nn

from hf_ext.errors import HfExtError
from hf_ext.integration.compat import variables_of_caller


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


def refuse_combination() -> None:
    """Refuses PEFT's `add_weighted_adapter` of an adapter in PiSSA's training form.

    PEFT would combine A and B alone, without A₀ and B₀. It calls no hook of the adapters that it combines. So this runs where
    PEFT makes the configuration or the first layer of the new adapter.

    Raises:
        ValueError: PEFT is combining such an adapter.
    """
    variables = variables_of_caller(LoraModel.add_weighted_adapter)
    if variables is None:
        return
    model, name = variables["self"], variables["adapter_name"]
    refused = [adapter for adapter in variables["adapters"] if is_pissa(model.peft_config.get(adapter))]
    if refused:
        if name in model.peft_config:
            model.delete_adapter(name)
        raise ValueError(
            f"The adapters {refused} are in PiSSA's training form, which add_weighted_adapter cannot combine. Save them, and "
            "combine the LoRAs that PeftModel.from_pretrained loads."
        )
