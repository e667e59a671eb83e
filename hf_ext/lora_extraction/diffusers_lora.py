"""The LoRA of a model of diffusers, in the file that `load_lora_weights` of its pipeline reads."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.loaders import PeftAdapterMixin
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import nn

from hf_ext.adapters.adapter_source import fill_with_nothing
from hf_ext.adapters.landing import not_arrived
from hf_ext.errors import CheckpointError
from hf_ext.lora_extraction.roles import Part, Parts, Role
from hf_ext.storage.layout import DIFFUSERS_LORA
from hf_ext.storage.source import TensorSource

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def sort(folder: Path, config: dict, tuned: TensorSource, base: TensorSource) -> Parts:
    """Sorts the tensors of a fine-tuned model of diffusers, whose convolutions get a LoRA, too. The arguments and errors are
    those of `roles.sort`."""
    try:
        with torch.device("meta"):
            model: nn.Module = getattr(diffusers, config["_class_name"]).from_config(config)
        kind = next((kind.lower() for kind in ("UNet", "Transformer") if kind in type(model).__name__), None)
        if kind is None or not isinstance(model, PeftAdapterMixin):
            raise TypeError("`load_lora_weights` of a pipeline adds none to such a model")
    except Exception as error:  # a stranger's file may hold anything
        raise CheckpointError(f"There is no LoRA of the {config['_class_name']} in {folder}: {error}") from error
    weights = {f"{name}.weight" for name, module in model.named_modules() if _takes_lora(module)}
    parts = {}
    for name in tuned.names():
        twin = name if name in base else ""
        parts[name] = Part(Role.LORA if twin and name in weights else Role.OTHER, name, twin, name.rpartition(".")[0])
    return Parts(model, parts, file=DIFFUSERS_LORA, prefix=f"{kind}.", library="diffusers", lost=partial(_lost, kind))


def _lost(prefix: str, model: Any, folder: Path, tokens: int | None) -> set[str]:
    """Returns the tensors of a saved LoRA that do not arrive, and the layers where its scaling is not 1."""
    model = deepcopy(model)
    fill_with_nothing(model)
    options = {"weight_name": DIFFUSERS_LORA, "use_safetensors": True, "low_cpu_mem_usage": True, "adapter_name": "default"}
    model.load_lora_adapter(folder, prefix=prefix, **options)
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer))
    scaled = {name for name, layer in layers if layer.scaling["default"] != 1}
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return scaled | not_arrived({f"{prefix}.{name}": tensor for name, tensor in state.items()}, folder / DIFFUSERS_LORA)


def _takes_lora(module: Any) -> bool:
    """Checks whether PEFT's LoRA of a module computes as the module does: its convolutions have neither groups nor dilation."""
    kind = next((kind for kind in PLAIN if isinstance(module, kind) and type(module).forward is kind.forward), None)
    return kind is nn.Linear or bool(kind and module.groups == 1 == max(module.dilation) and module.padding_mode == "zeros")
