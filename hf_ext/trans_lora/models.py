"""Models by their names, and their adapters: loads, activates, disables and moves them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from huggingface_hub.errors import HFValidationError, HTTPError
from peft import PeftConfig, PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_ext.adapters.adapter_source import CHANGES_BASE
from hf_ext.errors import HfExtError
from hf_ext.integration.modes import evaluating
from hf_ext.storage.hub import Hub, reason_of


@contextmanager
def loading(name: str, what: str = "model") -> Iterator[None]:
    """Turns an error of the block into one that names the model."""
    try:
        yield
    except (OSError, HTTPError, HFValidationError) as error:
        reason = reason_of(error)
        if os.path.isdir(name):
            raise HfExtError(f"The {what} in '{name}' cannot be loaded: {reason}") from error
        raise HfExtError(f"'{name}' is neither a folder nor a {what} of the Hub that can be reached: {reason}") from error


def load_model(name: str, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a language model and its tokenizer from a folder or the Hub.

    A tokenizer without a padding token pads with the end-of-text token.

    Args:
        kwargs: access to the Hub, such as token.

    Raises:
        HfExtError: there is no such model.
    """
    with loading(name):
        if not os.path.isdir(name):
            access = {key: kwargs[key] for key in Hub._fields if key in kwargs}
            Hub(**access).probe(name, kwargs.get("revision"))
        config = AutoConfig.from_pretrained(name, **kwargs)
        tokenizer = load_tokenizer(name, **kwargs)  # before the weights, which take longer
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        return kind.from_pretrained(name, dtype="auto", **kwargs), tokenizer


def load_tokenizer(name: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model. If it has no padding token, it pads with the end-of-text token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise HfExtError(
            f"The model '{name}' has no tokenizer that can be loaded. Save one with it: tokenizer.save_pretrained(…)."
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_adapted(name: str, adapter: str) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Loads a model with a saved adapter, and its tokenizer. Raises HfExtError if the adapter was trained on another model."""
    try:
        PeftConfig.from_pretrained(adapter)
    except ValueError as error:
        raise HfExtError(f"{adapter} is no adapter: {error}") from error
    model, tokenizer = load_model(name)
    misfit = f"The adapter {adapter} does not fit the source model {name}"
    advice = "Give the model that its adapter_config.json names."
    try:
        adapted = PeftModel.from_pretrained(model, adapter)
        # PEFT ignores layers that only the adapter or only the model has, and reports them here alone.
        result = adapted.load_adapter(adapter, adapted.active_adapter)
    except (RuntimeError, ValueError, KeyError) as error:
        raise HfExtError(f"{misfit}: {' '.join(str(error).strip().splitlines()[:3])} {advice}") from error
    differences = (("which the model lacks", result.unexpected_keys), ("which the adapter lacks", result.missing_keys))
    if parts := [f"{len(keys)} weights {side}, such as '{keys[0]}'" for side, keys in differences if keys]:
        raise HfExtError(f"{misfit}: {' and '.join(parts)}. {advice}")
    return adapted, tokenizer


def name_of(model: object) -> str:
    """Returns the name of a model, of a server's model, or the class of another generator."""
    if not isinstance(model, nn.Module):
        return getattr(model, "model", type(model).__name__)
    return bare(model).name_or_path or type(bare(model)).__name__


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
    """Yields the model without its adapters, within the block. Raises HfExtError if an adapter changed the base's weights when
    it was added: the model without it is not its base."""
    if not isinstance(model, PeftModel):
        yield model
        return
    for config in model.peft_config.values():
        if config.peft_type == PeftType.LORA and str(config.init_lora_weights).startswith(CHANGES_BASE):
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
