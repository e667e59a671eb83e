"""A model and its adapters: which of them compute, and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


def bare(model: nn.Module) -> nn.Module:
    """The model that adapters are around of, or in."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def base_sample(model: nn.Module) -> list[float]:
    """A few of the input embeddings, by which a model is known again in whatever type it is loaded, quantised or not."""
    weight = bare(model).get_input_embeddings().weight
    rows = torch.linspace(0, weight.shape[0] - 1, 16).long().to(weight.device)
    return weight.detach()[rows, :8].float().flatten().tolist()


@contextmanager
def base_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model without its adapters, as long as the block lasts."""
    if isinstance(model, PeftModel):
        with model.disable_adapter():
            yield model.get_base_model()
    else:
        yield model


def only(model: nn.Module, name: str, trainable: bool = False) -> None:
    """Makes an adapter the only active one of a model."""
    for layer in model.modules():
        if isinstance(layer, AuxiliaryTrainingWrapper):
            layer.enable_adapters(False)
        elif isinstance(layer, BaseTunerLayer):
            layer.enable_adapters(True)
            layer.set_adapter([name], inference_mode=not trainable)


@contextmanager
def adapters_kept(model: nn.Module) -> Iterator[None]:
    """Sets a model's adapters back, as the block ends, to what was active before; those that came in are not."""
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    before = {m: (list(m.active_adapters), m.disable_adapters) for m in model.modules() if isinstance(m, kinds)}
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    try:
        yield
    finally:
        for layer in model.modules():
            if isinstance(layer, kinds):
                active, disabled = before.get(layer, ([], False))
                layer.enable_adapters(not disabled)
                layer.set_adapter(active, inference_mode=True)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in trainable)


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on a device, as long as the block lasts; one that was spread or quantised stays where it is."""
    home = model.device
    fixed = home == device or getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    if not fixed:
        model.to(device)
    try:
        yield
    finally:
        if not fixed:
            model.to(home)
