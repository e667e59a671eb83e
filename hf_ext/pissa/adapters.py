"""Queries of a PEFT model's adapters."""

from __future__ import annotations

from peft.tuners.lora import LoraLayer
from torch import nn

from hf_ext.errors import HfExtError
from hf_ext.pissa.layer import PissaLayer
from hf_ext.pissa.reports import PissaReport


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


def report(model: nn.Module, adapter_name: str | None = None) -> PissaReport:
    """Returns the report of how a PiSSA or QPiSSA adapter started, layer by layer.

    Args:
        model: a model with the adapter in PiSSA's training form. For a QPiSSA adapter that was loaded, this reads the base's
            original weights again, tensor by tensor.
        adapter_name: defaults to the active adapter.

    Raises:
        HfExtError: there is no such adapter.
        BaseModelError: the original weights are needed and cannot be found.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, PissaLayer)}
    adapter_name = adapter_name or active_adapter(model)
    if any(module.merged for module in modules.values()):
        raise HfExtError("The model has merged adapters; call unmerge_adapter() before reporting.")
    layers = [
        module.report(adapter_name, name.removeprefix("base_model.model."))
        for name, module in modules.items()
        if adapter_name in module.pissa_adapters()
    ]
    if not layers:
        raise HfExtError(
            f"The model has no PiSSA adapter '{adapter_name}'. A saved one loads as a LoRA; for its training form load it with "
            "config=PissaConfig.from_pretrained(folder)."
        )
    return PissaReport(layers)
