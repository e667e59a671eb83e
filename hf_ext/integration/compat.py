"""The names of other libraries that may change with a version: private ones, and public ones that came or went. No other file
uses private names, except for those of loading in loading/: where one of these is gone, loading takes the plain way.

The entries stand by library: any, Transformers (loading, models, registries), PEFT, diffusers, accelerate and DeepSpeed,
PyTorch. A docstring ends with the names, what needs them, and what happens where they are gone.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from hf_ext.errors import CheckpointError, HfExtError, MissingDependencyError
from hf_ext.integration import versions
from hf_ext.storage.hub import Hub

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

# ---- Any library ----

#: The errors with which code fails that uses a library's internals after they have changed.
HOST_CHANGED = (AttributeError, ImportError, TypeError)


@contextmanager
def host_internals(feature: str, advice: str) -> Iterator[None]:
    """Turns the errors of changed internals into one that names the feature and the version. Raises CheckpointError if the
    block raised one of HOST_CHANGED."""
    try:
        yield
    except HOST_CHANGED as error:
        version = versions.installed("transformers")
        raise CheckpointError(
            f"{feature} does not work with Transformers {version} ({type(error).__name__}: {error}). {advice}"
        ) from error


def variables_of_caller(owner: object, function: str) -> Mapping[str, Any] | None:
    """Returns the local variables of the nearest caller that is a run of this function of a library's class or module. Returns
    None outside of it, or where the library has no such function.

    Transformers and diffusers offer no hook where this is used.
    """
    if not hasattr(owner, function):
        return None
    code = inspect.unwrap(getattr(owner, function)).__code__
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            return frame.f_locals
    return None


# ---- Transformers: loading ----


def warn_of_plain_loading(error: Exception) -> None:
    """Says, once for each error, that loading takes the plain way."""
    from transformers.utils import logging

    logging.get_logger(__name__).warning_once(
        f"Transformers {versions.installed('transformers')} has changed what fast loading relies on ({type(error).__name__}: "
        f"{error}). The weights are decoded to temporary files first (in TMPDIR), which takes longer and needs disk space for "
        "all weights. To load faster, install a newer hf_ext or an older Transformers."
    )


@cache
def converts_on_cpu() -> bool:
    """Checks whether a weight may be converted on the CPU and moved to its device afterwards.

    Name: `force_cpu` of `WeightConverter`; Transformers 5.16 leaves such a weight on the CPU. For: decoding during loading."""
    return Version(versions.installed("transformers") or "0") >= Version("5.17")


def hub_settings(owner: type) -> Hub:
    """Returns `token`, `cache_dir` and `local_files_only` of the `from_pretrained` that loads a model at this moment.

    Names: local variables of `from_pretrained` of `owner`, as quantizers do not get these. For: finding a base. Gone: those of
    the environment (HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE)."""
    variables = variables_of_caller(owner, "from_pretrained") or {}
    return Hub(**{name: variables[name] for name in Hub._fields if name in variables})


def requested_quantization(owner: type) -> Any:
    """Returns the `quantization_config=` of the `from_pretrained` that reads a config.json at this moment; None without one.

    Names: `merge_quantization_configs` of `owner` (AutoHfQuantizer, DiffusersAutoQuantizer), and its local variables. For:
    quantizing decoded weights. Gone: Transformers refuses a requested config, and diffusers ignores it with a warning."""
    return (variables_of_caller(owner, "merge_quantization_configs") or {}).get("quantization_config_from_args")


def accepted_beside(requested: Any, kind: type) -> type:
    """Returns a subclass of a quantization config's class, with a requested config of another class as `requested`, that
    Transformers accepts beside that.

    Transformers compares the names of the classes. For: quantizing decoded weights. Gone: it refuses the requested config."""
    return type(type(requested).__name__, (kind,), {"requested": requested})


def quantization_after_decoding(original: Any, ours: Any, parse: Callable[[dict], Any]) -> Any:
    """Returns the config of quantized weights that are stored compressed. With it, Transformers and diffusers make the
    quantizer of `ours`.

    Names: `quant_method`, and the config's class, which Transformers looks at to apply the `quantization_config=` of
    `from_pretrained`. For: loading with the weights' own quantizer, see `own_quantization`. Gone: Transformers makes another
    quantizer, and `check_each_load` refuses the payloads.

    Args:
        original: the entry that config.json had.
        parse: returns its config.
    """
    if not isinstance(original, dict):
        raise CheckpointError(f"config.json is damaged: {original!r} is no quantization. Download or save the folder again.")
    config = parse(dict(original))
    kind = type(config)
    config.__class__ = type(kind.__name__, (kind,), {"decoding": (ours, kind, config.quant_method)})
    config.quant_method = ours.quant_method
    return config


def own_quantization(config: Any) -> Any:
    """Makes a config of `quantization_after_decoding` the original one, because the model's config holds this object."""
    _, config.__class__, config.quant_method = config.decoding
    return config


def check_each_load(check: Callable[[Mapping[str, Any]], None]) -> None:
    """Calls a function with the local variables of each `from_pretrained` of Transformers, when it has its files and quantizer.

    Names: the conversions "legacy" of `conversion_mapping`, which each load copies, and `WeightRenaming`. For: compressed
    weights without a decoder. Gone: nothing calls the function, and Transformers reports mismatched sizes."""
    with suppress(*HOST_CHANGED):
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        class Check(WeightRenaming):
            """Renames nothing. Calls the function when it is copied."""

            def __deepcopy__(self, memo: dict) -> Check:
                check(variables_of_caller(PreTrainedModel, "from_pretrained") or {})
                return self

        conversions = get_checkpoint_conversion_mapping("legacy")
        register_checkpoint_conversion_mapping("legacy", [*conversions, Check(r"(?!)", "")], overwrite=True)


# ---- Transformers: models and their files ----


def without_weights(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Returns a model of a configuration on the meta device, as `AutoModel.from_config` builds it.

    Names: `_from_config`, which gives the configurations of the model's parts its dtype, and `initialization.no_init_weights`.
    For: whoever reads the names and shapes of weights. Gone: the parts keep their dtype, and building takes longer."""
    import torch

    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        no_init_weights = nullcontext
    with torch.device("meta"), no_init_weights():
        return getattr(kind, "_from_config", kind)(config)


def config_of(kind: type[PretrainedConfig], entries: dict) -> PretrainedConfig:
    """Returns the configuration of a config.json's entries, as `from_pretrained` reads it.

    Name: `_decode_special_floats`, as JSON has no infinities. For: switching, merging. Gone: a config with one is invalid."""
    decode = getattr(kind, "_decode_special_floats", deepcopy)
    return kind.from_dict(decode(deepcopy(entries)))


def generation_of(entries: dict) -> GenerationConfig:
    """Returns the settings of a generation_config.json, as `from_pretrained` reads it.

    Name: `_original_object_hash`. For: switching, as saving refuses invalid settings if they are new. Gone: it refuses them."""
    from transformers import GenerationConfig

    settings = GenerationConfig.from_dict(deepcopy(entries))
    settings._original_object_hash = hash(settings)  # type: ignore[attr-defined]
    return settings


def declared_ties(model: PreTrainedModel) -> dict[str, str]:
    """Returns the weights that a model's class ties, by name with the one they are tied to, even if its configuration does not.

    Name: `_tied_weights_keys`. For: extracting a LoRA. Gone: those that the configuration ties."""
    declared = getattr(model, "_tied_weights_keys", None)
    return model.all_tied_weights_keys or (declared if isinstance(declared, dict) else {})


def unsaved(model: PreTrainedModel) -> set[str]:
    """Returns the weights that a model's class leaves out of its files.

    Name: `_keys_to_ignore_on_save`. For: switching and publishing. Gone: none; a switch asks for these weights."""
    return {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}


# ---- Transformers: registries and modes ----


def let_serve_load(config: type[PretrainedConfig], model: type[PreTrainedModel]) -> None:
    """Lets `transformers serve` load a model of images and text whose class is not in Transformers.

    Names: the mappings imported here. For: Uni-Med. Gone: `transformers serve` does not load it."""
    try:
        from transformers import AutoModelForMultimodalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    except ImportError:
        return
    AutoModelForMultimodalLM.register(config, model, exist_ok=True)
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[config.model_type] = model.__name__


def register_part(config: type[PretrainedConfig], model: type[PreTrainedModel]) -> None:
    """Lets `AutoModel` build a model that Transformers registers only as a part of another.

    Names: `_model_mapping._extra_content`, as `register` ignores its own configs up to Transformers 5.18. For: the vision tower
    of Uni-Med's paper. Gone: a warning; other towers work."""
    from transformers import AutoModel

    AutoModel.register(config, model, exist_ok=True)
    if config not in AutoModel._model_mapping:
        AutoModel._model_mapping._extra_content[config] = model


def loads_weights_later() -> bool:
    """Checks whether Transformers left the weights of this process empty, because FSDP gets them from the first one.

    Names: `is_fsdp_enabled`, `is_local_dist_rank_0` (cpu_ram_efficient_loading). For: the start of PiSSA. Gone: false."""
    try:
        from transformers.modeling_utils import is_fsdp_enabled, is_local_dist_rank_0
    except ImportError:
        return False
    return is_fsdp_enabled() and not is_local_dist_rank_0()


# ---- PEFT ----


def add_peft_type(name: str) -> None:
    """Adds a member to `PeftType`, under which `register_peft_method` then takes a method.

    Names: `_member_map_`, `_value2member_map_`, `_member_names_` of enumerations. For: PiSSA, QPiSSA, CMoE. Gone: a warning,
    and the method is not available."""
    from peft import PeftType

    if name not in PeftType.__members__:
        member = str.__new__(PeftType, name)
        member._name_ = member._value_ = name
        PeftType._member_map_[name] = PeftType._value2member_map_[name] = member
        PeftType._member_names_.append(name)
        type.__setattr__(PeftType, name, member)


def require_methods(kind: type, *names: str) -> None:
    """Checks that a class of PEFT has the methods that a subclass replaces. Raises MissingDependencyError if it lacks one. For:
    PiSSA. PEFT would never call a method under an old name, and save an adapter in another form than its config says."""
    if lost := [name for name in names if not hasattr(kind, name)]:
        version = versions.installed("peft")
        raise MissingDependencyError(
            f"{kind.__name__} of PEFT {version} has no {lost[0]}. Install a newer hf_ext or an older PEFT."
        )


class NamedAsInStateDict:
    """A model whose modules have the names that its state dict's keys begin with.

    Names: `_checkpoint_wrapped_module`, `_fsdp_wrapped_module`, which the keys leave out. For: saving and loading PiSSA and
    CMoE, as PEFT 0.21 selects tensors by the names of modules. Gone: `require_modules` raises an error."""

    WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")

    def __init__(self, model: torch.nn.Module):
        self._model = model

    def named_modules(self, **options: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        return ((self.WRAPPERS.sub("", name).lstrip("."), module) for name, module in self._model.named_modules(**options))

    def require_modules(self, keys: Iterable[str]) -> None:
        """Raises HfExtError unless the keys of an adapter in a state dict begin with names of modules."""
        names = {name for name, _ in self.named_modules(remove_duplicate=False)}
        if lost := next((key for key in keys if key.rpartition(".")[0] not in names), None):
            raise HfExtError(
                f"'{lost}' is under a wrapper whose name its state dict leaves out, so PEFT would not save it. Unwrap the "
                "model's modules before you save the adapter."
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def adapts_parameter(module: torch.nn.Module) -> bool:
    """Checks whether a LoRA layer of PEFT adapts a parameter instead of a module.

    Name: `ParamWrapper`. For: checking that a LoRA arrives where its factors came from. Gone: false."""
    from peft.tuners.lora import layer

    return isinstance(module, getattr(layer, "ParamWrapper", ()))


def converts_adapters(model: PreTrainedModel) -> bool:
    """Checks whether PEFT may rename or merge the tensors of a LoRA, or move its targets, for this type of model.

    Name: `get_checkpoint_conversion_mapping`, which PEFT asks. For: the targets of PiSSA. Gone: true; all targets are tried."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return True
    return get_checkpoint_conversion_mapping(model.config.model_type) is not None


def linear_targets(config: LoraConfig, model: torch.nn.Module) -> set[str]:
    """Returns the linear layers of a model that are targets of a LoRA.

    Names: those imported here. For: the targets of PiSSA. Gone: none; no target is tried."""
    import torch
    from transformers.pytorch_utils import Conv1D

    try:
        from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists

        config = _maybe_include_all_linear_layers(deepcopy(config), model)
        linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
        return {name for name in linear if check_target_module_exists(config, name)}
    except HOST_CHANGED:
        return set()


# ---- diffusers ----


def forget_quantization(model: Any) -> None:
    """Makes diffusers treat a model that is about to be loaded as an ordinary one, without a `quantization_config`.

    Name: `_internal_dict`. For: compressed models of diffusers. Gone: saved copies keep the entry, and load with a warning."""
    vars(model).pop("is_quantized", None)
    vars(model).pop("quantization_method", None)
    if (config := getattr(model, "_internal_dict", None)) is not None:
        model._internal_dict = type(config)({key: value for key, value in config.items() if key != "quantization_config"})


# ---- accelerate and DeepSpeed ----


def is_offloaded(layer: torch.nn.Module) -> bool:
    """Checks whether accelerate keeps a layer's weights elsewhere between forward passes.

    Name: `_hf_hook.offload`. For: the start of PiSSA. Gone: false."""
    return bool(getattr(getattr(layer, "_hf_hook", None), "offload", False))


def point_offloaded_ties_at_decoded_weights(model: PreTrainedModel) -> None:
    """Lets an offloaded weight share the decoded copy on disk of the weight that it is tied to.

    Names: `_hf_hook.weights_map.dataset.index`; Transformers reads such a weight from the checkpoint, which holds a payload.
    For: decoding during loading. Gone: the use of the weight fails, because its payload has another shape."""
    maps = (getattr(getattr(module, "_hf_hook", None), "weights_map", None) for module in model.modules())
    indices = (getattr(getattr(weights, "dataset", None), "index", None) for weights in maps)
    index: dict[str, Any] = next((index for index in indices if index is not None), {})
    for target, source in model.all_tied_weights_keys.items():
        if source in index:
            index[target] = index[source]


def shards_by_zero3() -> bool:
    """Checks whether DeepSpeed ZeRO-3 partitions weights during loading.

    Name: Transformers' `is_deepspeed_zero3_enabled`. For: loading, switching, the targets of PiSSA. Gone: false."""
    try:
        from transformers.integrations import is_deepspeed_zero3_enabled
    except ImportError:
        return False
    return is_deepspeed_zero3_enabled()


def shards_while_loading(model: PreTrainedModel) -> bool:
    """Checks whether each process of a job loads a part of the weights. The processes can then exchange objects: with ZeRO-3,
    DeepSpeed prepares that, as it does for a plain checkpoint.

    Name: `distributed_config`. For: loading. Gone: false without ZeRO-3; loading fails, as each reads a part of a payload."""
    if is_zero3 := shards_by_zero3():
        import deepspeed

        deepspeed.init_distributed()
    sizes = getattr(getattr(model.config, "distributed_config", None), "__dict__", {})
    return is_zero3 or any(name.endswith("_size") and (size or 1) > 1 for name, size in sizes.items())


def zero3_dtype() -> torch.dtype | None:
    """Returns the type in which DeepSpeed ZeRO-3 keeps the weights, whatever `dtype=` says; None without ZeRO-3.

    Name: Transformers' `deepspeed_config`. For: loading."""
    if not shards_by_zero3():
        return None
    import torch
    from transformers.integrations import deepspeed_config

    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((types[name] for name in types if deepspeed_config().get(name, {}).get("enabled")), torch.float32)


def partition_by_zero3(model: PreTrainedModel) -> None:
    """Lets DeepSpeed ZeRO-3, if it is enabled, partition the weights of a loaded model. Transformers does so for a plain
    checkpoint before it loads, but never for one with a quantizer. `deepspeed.initialize` would move the whole model to the GPU
    first. Names: `deepspeed.zero.Init`, Transformers' `deepspeed_config`. For: loading."""
    if (dtype := zero3_dtype()) is not None:
        import deepspeed
        from transformers.integrations import deepspeed_config

        for weight in model.parameters():  # some models keep a few in float32
            weight.data = weight.data.to(dtype if weight.is_floating_point() else weight.dtype)
        deepspeed.zero.Init(module=model, config_dict_or_path=deepspeed_config())


# ---- PyTorch ----


def unsaved_buffers(module: torch.nn.Module) -> Set[str]:
    """Returns the names of a module's own buffers that are not in its state dict.

    Name: `_non_persistent_buffers_set`. For: switching. Gone: none; modules whose buffers depend on sizes are switched."""
    return getattr(module, "_non_persistent_buffers_set", frozenset())


def recomputes_in_backward() -> bool:
    """Checks whether activation checkpointing computes a layer again at this moment.

    Name: `torch._C._current_graph_task_id`. For: the tasks of CMoE. Gone: false."""
    import torch

    current = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return not torch.compiler.is_compiling() and current() != -1
