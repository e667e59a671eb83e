"""Activates, disables and moves the adapters of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from hf_ext.errors import HfExtError
from hf_ext.integration.adapter_source import CHANGES_BASE
from hf_ext.integration.modes import evaluating


def bare(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Returns the model without the wrapper of its adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@torch.no_grad()
def base_sample(model: PreTrainedModel | PeftModel) -> list[float]:
    """Returns the output of the model without adapters for fixed tokens: 64 logits minus their mean. They identify the model in
    any dtype."""
    with base_of(model) as base, evaluating(base):
        size = base.get_input_embeddings().weight.shape[0]
        tokens = torch.linspace(0, size - 1, 16).long().to(base.device)[None]
        begun = {"decoder_input_ids": tokens[:, :4]} if base.config.is_encoder_decoder else {}
        logits = base(input_ids=tokens, **begun).logits[0, -1].float()
    logits = logits[torch.linspace(0, len(logits) - 1, 64).long().to(logits.device)]
    return (logits - logits.mean()).tolist()


def adapter_digest(model: PreTrainedModel | PeftModel) -> str:
    """Returns a checksum of a model's adapter weights; for a model without adapters, of its output (`base_sample`)."""
    digest = xxhash.xxh3_64()
    if not isinstance(model, PeftModel):
        digest.update(str([round(value, 2) for value in base_sample(model)]).encode())
        return digest.hexdigest()
    for name in model.active_adapters:
        for key, tensor in sorted(get_peft_model_state_dict(model, adapter_name=name).items()):
            digest.update(key.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def base_of(model: PreTrainedModel | PeftModel) -> Iterator[PreTrainedModel]:
    """Yields the model without its adapters, within the block.

    Raises:
        HfExtError: an adapter changed the base's weights when it was added, so the model without it is not its base.
    """
    if not isinstance(model, PeftModel):
        yield model
        return
    for config in model.peft_config.values():
        if str(getattr(config, "init_lora_weights", "")).startswith(CHANGES_BASE):
            raise HfExtError(
                f"init_lora_weights='{config.init_lora_weights}' changes the base model's weights, and the base itself is "
                "needed. For PiSSA take hf_ext.PissaConfig, which leaves them; PEFT can convert a saved adapter to a LoRA "
                "(path_initial_model_for_weight_conversion)."
            )
    trainable = _trainable(model)
    with model.disable_adapter():
        yield model.get_base_model()
    _set_trainable(model, trainable)  # PEFT makes all adapters trainable when it enables them again


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
    """Restores the active adapters of a model when the block ends. Adapters added meanwhile become inactive."""
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    before = {m: (list(m.active_adapters), m.disable_adapters) for m in model.modules() if isinstance(m, kinds)}
    trainable = _trainable(model)
    try:
        yield
    finally:
        for layer in model.modules():
            if isinstance(layer, kinds):
                active, disabled = before.get(layer, ([], False))
                layer.enable_adapters(not disabled)
                layer.set_adapter(active, inference_mode=True)
        _set_trainable(model, trainable)


def _trainable(model: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in model.parameters() if parameter.requires_grad}


def _set_trainable(model: nn.Module, trainable: set[nn.Parameter]) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():  # quantized ones never are
            parameter.requires_grad_(parameter in trainable)


@contextmanager
def on_device(model: PreTrainedModel | PeftModel, device: torch.device) -> Iterator[None]:
    """Moves the model to a device within the block. A dispatched or quantized model stays where it is."""
    home = model.device
    fixed = home == device or getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    if not fixed:
        model.to(device)
    try:
        yield
    finally:
        if not fixed:
            model.to(home)
