"""Differences between the supported versions of Transformers and PEFT. Each function names the versions it is about."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from hf_ext.integration import versions
from hf_ext.storage.hub import Hub

if TYPE_CHECKING:
    from peft import LoraConfig


@cache
def converts_on_cpu() -> bool:
    """Returns true if a `WeightConverter` may set `force_cpu`.

    Transformers 5.16 leaves such a weight on the CPU; 5.17 and later move it to the device that `device_map` says."""
    return Version(versions.installed("transformers") or "0") >= Version("5.17")


def variables_of_caller(function: Callable[..., Any]) -> Mapping[str, Any] | None:
    """Returns the local variables of the nearest caller that is a run of `function`, or None outside of `function`.

    PEFT 0.18 to 0.21 and Transformers offer no hook where this is used. The names of functions and variables are internals of
    theirs: check them when a new version comes out.
    """
    code = inspect.unwrap(function).__code__
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            return frame.f_locals
    return None


def config_and_name_of_layer(options: Mapping[str, Any]) -> tuple[LoraConfig, str]:
    """Returns the adapter's configuration and the layer's name, for a LoRA layer that PEFT makes or updates with `options`.

    PEFT 0.19 and later pass the configuration to the layer, and the name in some calls. PEFT 0.18 passes neither.
    """
    from peft.tuners.lora import LoraModel

    if "config" not in options or "target_name" not in options:
        variables = variables_of_caller(LoraModel._create_and_replace)
        if variables is not None:
            return variables["lora_config"], variables["current_key"]
    return options["config"], options.get("target_name", "")


def loads_adapter() -> bool:
    """Tells whether PEFT makes an adapter in order to load its weights at this moment.

    PEFT initializes the weights of such an adapter too, and then overwrites them.
    """
    from peft import PeftModel

    return any(variables_of_caller(function) is not None for function in (PeftModel.from_pretrained, PeftModel.load_adapter))


def requested_quantization() -> Any:
    """Returns the `quantization_config=` of the `from_pretrained` that reads a config.json at this moment.

    Transformers refuses a class other than that of the config.json, and has no way to combine the two.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    variables = variables_of_caller(AutoHfQuantizer.merge_quantization_configs)
    return None if variables is None else variables.get("quantization_config_from_args")


def hub_settings() -> Hub:
    """Returns `token`, `cache_dir` and `local_files_only` of the `from_pretrained` that loads a model at this moment.

    Transformers hands them to no quantizer.
    """
    from transformers import PreTrainedModel

    variables = variables_of_caller(PreTrainedModel.from_pretrained) or {}
    return Hub(**{name: variables[name] for name in Hub._fields if name in variables})


def saves_only_lora_tensors() -> bool:
    """Tells whether PEFT saves only A and B of adapter types that it does not know, as versions before 0.21 do."""
    from peft.tuners.tuners_utils import BaseTuner

    return not hasattr(BaseTuner, "_get_adapter_state_dict")
