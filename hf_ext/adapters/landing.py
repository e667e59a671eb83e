"""The tensors of a LoRA that PEFT puts where they belong.

PEFT matches names by their endings, refuses some modules of some models, and rewrites the targets of mixtures of experts. It
skips tensors that then fit nowhere. So a LoRA is loaded into the model without weights, as `PeftModel.from_pretrained` does.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_ext.adapters.adapter_source import fill_with_nothing
from hf_ext.errors import CheckpointError
from hf_ext.integration import compat
from hf_ext.integration.versions import installed
from hf_ext.storage.layout import ADAPTER
from hf_ext.storage.safetensors_file import RawTensor

PREFIX = "base_model.model."  # of all names in PEFT's files


def lost(model: PreTrainedModel, folder: Path, tokens: int | None = None) -> set[str]:
    """Returns the tensors of a saved LoRA that do not arrive, and those that PEFT expects in addition.

    Args:
        model: the base, on the meta device. It stays unchanged.
        folder: of the LoRA.
        tokens: number of tokens of the base, if it is not that of the model.

    Raises:
        Exception: PEFT cannot load the LoRA.
    """
    skeleton = deepcopy(model)
    if tokens is not None:
        skeleton.resize_token_embeddings(tokens, mean_resizing=False)
    fill_with_nothing(skeleton)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"low_cpu_mem_usage": True, "torch_device": "cpu", "autocast_adapter_dtype": False}
        loaded = PeftModel.from_pretrained(skeleton, folder, **options)
        state = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    # PEFT adapts the parameter of such a module instead of the module, and then gives it the largest rank.
    parameters = tuple(f"{name}." for name, module in loaded.named_modules() if compat.adapts_parameter(module))
    return not_arrived(state, folder / ADAPTER) | {name for name in state if name.startswith(parameters)}


def not_arrived(state: Mapping[str, torch.Tensor], file: Path) -> set[str]:
    """Returns the tensors that differ between a loaded LoRA and its file, or are in one of them only."""
    saved = load_file(file)
    missed = state.keys() ^ saved.keys()
    for name in state.keys() & saved.keys():
        loaded, expected = state[name], saved[name]
        is_like = loaded.shape == expected.shape and not loaded.is_meta
        data = RawTensor.from_torch(expected).data
        if not is_like or not np.array_equal(RawTensor.from_torch(loaded.to(expected.dtype)).data, data):
            missed.add(name)
    return missed


def layers_that_load(
    model: PreTrainedModel, layers: Collection[str], config: Callable[[Iterable[str]], LoraConfig]
) -> set[str]:
    """Returns the layers whose LoRA arrives where PEFT loads it, together with those of the others.

    Args:
        model: the base, on the meta device.
        layers: names of linear layers.
        config: returns the configuration of a LoRA of rank 1 for some layers.

    Raises:
        CheckpointError: PEFT loads none of them, because of an error.
    """

    failures: list[Exception] = []

    def arriving(names: set[str]) -> set[str]:
        if not names:
            return names
        with TemporaryDirectory() as place:
            folder = Path(place)
            config(names).save_pretrained(folder)
            marks = {}
            for i, name in enumerate(sorted(names)):
                mark = math.ldexp(128 + i % 128, i // 128 - 16)  # of no other layer, and exact in all types of weights
                layer = model.get_submodule(name)
                rows, columns = layer.weight.T.shape if isinstance(layer, Conv1D) else layer.weight.shape
                marks[f"{PREFIX}{name}.lora_A.weight"] = torch.full((1, columns), mark)
                marks[f"{PREFIX}{name}.lora_B.weight"] = torch.full((rows, 1), mark)
            save_file(marks, folder / ADAPTER, metadata={"format": "pt"})
            try:
                missed = lost(model, folder)
            except Exception as error:  # PEFT raises errors of many types
                failures.append(error)
                return set()
        return {name for name in names if not {f"{PREFIX}{name}.lora_{side}.weight" for side in "AB"} & missed}

    all_names = {*layers}
    names = arriving(all_names)
    if not names:  # PEFT refuses all because of a few, such as Mamba's out_proj
        groups: dict[str, set[str]] = {}
        for name in layers:
            groups.setdefault(re.sub(r"\d+", "#", name), set()).add(name)
        all_names = set().union(*map(arriving, groups.values()))
        names = arriving(all_names)
        if failures and not names:
            raise CheckpointError(
                f"PEFT {installed('peft')} cannot load a LoRA of a {type(model).__name__}: {type(failures[-1]).__name__}: "
                f"{failures[-1]}. If its own LoraConfig works with this model, install an older PEFT or a newer hf_ext."
            ) from failures[-1]
    while names != all_names:  # fewer targets, other conversions
        all_names, names = names, arriving(names)
    return names


def targets_that_load(model: nn.Module, config: LoraConfig) -> tuple[set[str], set[str]]:
    """Returns the linear layers that are targets of a LoRA, and those of them whose factors arrive where PEFT loads it.

    Args:
        model: with its weights. It stays unchanged. Types into which PEFT loads each tensor as it is are not examined.
        config: of the LoRA. Of "all-linear", layers that do not load are no longer targets for the others.
    """
    if not isinstance(model, PreTrainedModel) or not compat.converts_adapters(model) or compat.shards_by_zero3():
        return set(), set()
    try:
        skeleton = compat.without_weights(type(model), deepcopy(model.config))
    except Exception:  # a class of someone's own may need more than a configuration
        return set(), set()
    targets = compat.linear_targets(config, skeleton)
    plain = {"r": 1, "rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "bias": "none", "task_type": None}
    plain |= {"modules_to_save": None, "trainable_token_indices": None}

    def config_of(names: Iterable[str]) -> LoraConfig:
        result = deepcopy(config)
        vars(result).update(plain | ({"target_modules": {*names}} if is_all_linear(config) else {}))
        return result

    return targets, layers_that_load(skeleton, targets, config_of)


def is_all_linear(config: LoraConfig) -> bool:
    return str(config.target_modules).lower() == "all-linear"


def computes_as_linear(layer: nn.Module) -> bool:
    """Checks whether a layer computes as PyTorch's linear layer does. Some have a forward of their own, such as Falcon's."""
    if type(layer).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    if any(layer.children()) or {name for name, _ in layer.named_parameters()} - {"weight", "bias"}:
        return False
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small = cast(nn.Linear, type(layer)(3, 2))
            x = 3 * torch.randn(8, 3, dtype=small.weight.dtype)
            return torch.allclose(small(x), nn.functional.linear(x, small.weight, small.bias))
    except Exception:  # it takes other arguments, or has other weights
        return False
