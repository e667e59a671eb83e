"""Differences between the versions of Transformers, PEFT and accelerate, and the private names of theirs that this package
uses. Each function says which versions it is about, and what happens where a name is gone.

Loading depends on more of them, in decoding.py and renaming.py. Where one is gone, `DecodingQuantizer` loads the plain way.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from hf_ext.errors import CheckpointError, HfExtError, MissingDependencyError
from hf_ext.integration import versions
from hf_ext.storage.config_file import ENCODINGS
from hf_ext.storage.hub import Hub
from hf_ext.storage.weights import KEY, PARTS_OF

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

#: The errors with which code fails that uses a host's internals after they have changed.
HOST_CHANGED = (AttributeError, ImportError, TypeError)


def warn_of_plain_loading(error: Exception) -> None:
    """Says, once for each error, that loading takes the plain way."""
    from transformers.utils import logging

    logging.get_logger(__name__).warning_once(
        f"Transformers {versions.installed('transformers')} has changed what fast loading relies on ({type(error).__name__}: "
        f"{error}). The weights are decoded to temporary files first (in TMPDIR), which takes longer and needs disk space for "
        "all weights. To load faster, install a newer hf_ext or an older Transformers."
    )


@contextmanager
def host_internals(feature: str, advice: str) -> Iterator[None]:
    """Turns the errors of changed internals into one that names the feature and the version.

    Raises:
        CheckpointError: the block raised one of HOST_CHANGED.
    """
    try:
        yield
    except HOST_CHANGED as error:
        version = versions.installed("transformers")
        raise CheckpointError(
            f"{feature} does not work with Transformers {version} ({type(error).__name__}: {error}). {advice}"
        ) from error


@cache
def converts_on_cpu() -> bool:
    """Returns true if a `WeightConverter` may set `force_cpu`.

    Transformers 5.16 leaves such a weight on the CPU; 5.17 and later move it to the device that `device_map` says."""
    return Version(versions.installed("transformers") or "0") >= Version("5.17")


def shards_by_zero3() -> bool:
    """Returns true if DeepSpeed ZeRO-3 partitions weights during loading. False where Transformers no longer says so."""
    try:
        from transformers.integrations import is_deepspeed_zero3_enabled
    except ImportError:
        return False
    return is_deepspeed_zero3_enabled()


def zero3_dtype() -> torch.dtype | None:
    """Returns the type in which DeepSpeed ZeRO-3 keeps the weights, whatever `dtype=` says; None without ZeRO-3."""
    if not shards_by_zero3():
        return None
    import torch
    from transformers.integrations import deepspeed_config

    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((types[name] for name in types if deepspeed_config().get(name, {}).get("enabled")), torch.float32)


def shards_while_loading(model: PreTrainedModel) -> bool:
    """Returns true if each process of a job loads a part of the weights. False where Transformers names its setting otherwise.
    The processes can then exchange objects: with ZeRO-3, DeepSpeed prepares that, as it does for a plain checkpoint."""
    if is_zero3 := shards_by_zero3():
        import deepspeed

        deepspeed.init_distributed()
    sizes = getattr(getattr(model.config, "distributed_config", None), "__dict__", {})
    return is_zero3 or any(name.endswith("_size") and (size or 1) > 1 for name, size in sizes.items())


def partition_by_zero3(model: PreTrainedModel) -> None:
    """Lets DeepSpeed ZeRO-3, if it is enabled, partition the weights of a loaded model.

    Transformers does so for a plain checkpoint before it loads, but never for one with a quantizer. `deepspeed.initialize`
    would move the whole model to the GPU first.
    """
    if (dtype := zero3_dtype()) is not None:
        import deepspeed
        from transformers.integrations import deepspeed_config

        for weight in model.parameters():  # some models keep a few in float32
            weight.data = weight.data.to(dtype if weight.is_floating_point() else weight.dtype)
        deepspeed.zero.Init(module=model, config_dict_or_path=deepspeed_config())


def point_offloaded_ties_at_decoded_weights(model: PreTrainedModel) -> None:
    """Lets an offloaded weight share the decoded copy on disk of the weight that it is tied to.

    Transformers reads such a weight from the checkpoint's own file, which holds the payload. Where accelerate's hooks have
    another form, the use of the weight fails: its payload has another shape.
    """
    maps = (getattr(getattr(module, "_hf_hook", None), "weights_map", None) for module in model.modules())
    indices = (getattr(getattr(weights, "dataset", None), "index", None) for weights in maps)
    index: dict[str, Any] = next((index for index in indices if index is not None), {})
    for target, source in model.all_tied_weights_keys.items():
        if source in index:
            index[target] = index[source]


def is_offloaded(layer: torch.nn.Module) -> bool:
    """Tells whether accelerate keeps a layer's weights elsewhere between forward passes. False if it no longer says so."""
    return bool(getattr(getattr(layer, "_hf_hook", None), "offload", False))


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns a module's own parameters and buffers by name, without those of its submodules. They may be set meanwhile."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return iter([*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)])


def model_of(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Returns a model of a configuration, as `AutoModel.from_config` builds it: the configurations of its parts get its dtype.
    Where the class has no such method, they keep theirs."""
    return getattr(kind, "_from_config", kind)(config)


def config_of(kind: type[PretrainedConfig], entries: dict) -> PretrainedConfig:
    """Returns the configuration of a config.json's entries, as `from_pretrained` reads it: JSON has no infinite numbers, which
    Transformers writes in a form of its own. Where its function is gone, a configuration with one is refused as invalid."""
    decode = getattr(kind, "_decode_special_floats", deepcopy)
    return kind.from_dict(decode(deepcopy(entries)))


def generation_of(entries: dict) -> GenerationConfig:
    """Returns the settings of a generation_config.json, as `from_pretrained` reads it: saving refuses settings that are not
    strictly valid, unless they are unchanged since then. Where Transformers notes that elsewhere, saving refuses these too."""
    from transformers import GenerationConfig

    settings = GenerationConfig.from_dict(deepcopy(entries))
    settings._original_object_hash = hash(settings)  # type: ignore[attr-defined]
    return settings


def declared_ties(model: PreTrainedModel) -> dict[str, str]:
    """Returns the weights that a model's class ties, by name with the one they are tied to, even if its configuration does not.
    Where its attribute is gone or is no dict, those that the configuration ties."""
    declared = getattr(model, "_tied_weights_keys", None)
    return model.all_tied_weights_keys or (declared if isinstance(declared, dict) else {})


def unsaved(model: PreTrainedModel) -> set[str]:
    """Returns the weights that a model's class leaves out of its files. Where its attribute is gone, there are none, and a
    switch asks for them."""
    return {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}


def adapts_parameter(module: torch.nn.Module) -> bool:
    """Checks whether a LoRA layer of PEFT adapts a parameter instead of a module. False where PEFT has no such layer."""
    from peft.tuners.lora import layer

    return isinstance(module, getattr(layer, "ParamWrapper", ()))


def let_serve_load(config: type[PretrainedConfig], model: type[PreTrainedModel]) -> None:
    """Lets `transformers serve` load a model of images and text whose class is not in Transformers. Where a name is gone, it
    cannot."""
    try:
        from transformers import AutoModelForMultimodalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    except ImportError:
        return
    AutoModelForMultimodalLM.register(config, model, exist_ok=True)
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[config.model_type] = model.__name__


def no_init_weights() -> AbstractContextManager[object]:
    """Returns a context in which Transformers does not initialize a model's weights. Where it is gone, that takes its time."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        return nullcontext()
    return no_init_weights()


def unsaved_buffers(module: torch.nn.Module) -> Set[str]:
    """Returns the names of a module's own buffers that are not in its state dict. None where PyTorch keeps them elsewhere: a
    switch of tasks or checkpoints then compares these buffers too, and says so if they differ."""
    return getattr(module, "_non_persistent_buffers_set", frozenset())


def variables_of_caller(owner: object, function: str) -> Mapping[str, Any] | None:
    """Returns the local variables of the nearest caller that is a run of this function of a host's class or module. Returns
    None outside of it, or where the host has no such function.

    Transformers offers no hook where this is used.
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


def converts_adapters(model: PreTrainedModel) -> bool:
    """Returns true if PEFT may rename or merge the tensors of a LoRA, or move its targets, when it loads it into this type of
    model. Where Transformers' function is gone, this is not known, and true."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return True
    return get_checkpoint_conversion_mapping(model.config.model_type) is not None


def linear_targets(config: LoraConfig, model: torch.nn.Module) -> set[str]:
    """Returns the linear layers of a model that are targets of a LoRA. Empty where PEFT's functions have changed."""
    import torch
    from transformers.pytorch_utils import Conv1D

    try:
        from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists

        config = _maybe_include_all_linear_layers(deepcopy(config), model)
        linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
        return {name for name in linear if check_target_module_exists(config, name)}
    except HOST_CHANGED:
        return set()


def requested_quantization(owner: type) -> Any:
    """Returns the `quantization_config=` of the `from_pretrained` that reads a config.json at this moment.

    Transformers refuses a class other than that of the config.json, and has no way to combine the two. diffusers ignores the
    requested config with a warning. Where their functions have another name, they still do.

    Args:
        owner: the class that merges the two: AutoHfQuantizer, or DiffusersAutoQuantizer.
    """
    return (variables_of_caller(owner, "merge_quantization_configs") or {}).get("quantization_config_from_args")


def refuse_undecoded_loading() -> None:
    """Lets `from_pretrained` refuse compressed weights and merges that it would load without decoding them.

    With `quantization_config=None`, the Auto classes remove the entry of config.json that selects a quantizer, so only the
    registry of weight conversions is left: Transformers copies those of old checkpoints ("legacy") for every load. Where it has
    none, it reports mismatched sizes.
    """
    with suppress(*HOST_CHANGED):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        class Check(WeightRenaming):
            """Renames nothing. Checks the files when it is copied."""

            def __deepcopy__(self, memo: dict) -> Check:
                _require_decoding()
                return self

        conversions = get_checkpoint_conversion_mapping("legacy")
        register_checkpoint_conversion_mapping("legacy", [*conversions, Check(r"(?!)", "")], overwrite=True)


def _require_decoding() -> None:
    """Raises CheckpointError if the `from_pretrained` that loads a model at this moment lacks the quantizer that its files
    require. Raises none where its variables have other names."""
    from safetensors import SafetensorError, safe_open
    from transformers import PreTrainedModel

    variables = variables_of_caller(PreTrainedModel, "from_pretrained") or {}
    files = [file for file in variables.get("checkpoint_files") or () if str(file).endswith(".safetensors")]
    method = getattr(getattr(variables.get("hf_quantizer"), "quantization_config", None), "quant_method", None)
    if not files or method in ENCODINGS:
        return
    try:
        with safe_open(files[0], framework="np") as file:
            encoded = {KEY, PARTS_OF} & (file.metadata() or {}).keys()
    except (SafetensorError, OSError):  # Transformers says what is wrong with the file
        return
    if encoded:
        raise CheckpointError(
            f"The weights of '{variables.get('pretrained_model_name_or_path')}' are compressed, and its configuration has lost "
            "the entry `quantization_config` that selects the decoder. AutoModel removes it for `quantization_config=None`: "
            "leave this argument out where you do not quantize. Pass no `config=` of another checkpoint."
        )


def hub_settings(owner: type) -> Hub:
    """Returns `token`, `cache_dir` and `local_files_only` of the `from_pretrained` that loads a model at this moment.

    Neither Transformers nor diffusers hands them to a quantizer. Where their variables have other names, the base is looked up
    with the settings of the environment (HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE).

    Args:
        owner: class of that `from_pretrained`.
    """
    variables = variables_of_caller(owner, "from_pretrained") or {}
    return Hub(**{name: variables[name] for name in Hub._fields if name in variables})


def forget_quantization(model: Any) -> None:
    """Makes diffusers treat a model that is about to be loaded as an ordinary one: it keeps no `quantization_config`. Where its
    attributes have other names, a saved copy of the model has that entry, and loads with a warning."""
    vars(model).pop("is_quantized", None)
    vars(model).pop("quantization_method", None)
    if (config := getattr(model, "_internal_dict", None)) is not None:
        model._internal_dict = type(config)({key: value for key, value in config.items() if key != "quantization_config"})


def loads_weights_later() -> bool:
    """Tells whether Transformers left the weights of this process empty, because FSDP gets them from the first one
    (cpu_ram_efficient_loading). False where its functions have other names."""
    try:
        from transformers.modeling_utils import is_fsdp_enabled, is_local_dist_rank_0
    except ImportError:
        return False
    return is_fsdp_enabled() and not is_local_dist_rank_0()


def recomputes_in_backward() -> bool:
    """Tells whether activation checkpointing computes a layer again at this moment. False where PyTorch's function has
    another name."""
    import torch

    current = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return not torch.compiler.is_compiling() and current() != -1


def require_methods(kind: type, *names: str) -> None:
    """Checks that a class of PEFT has the methods that a subclass replaces. PEFT would never call one under an old name, and
    save an adapter in another form than its configuration says.

    Raises:
        MissingDependencyError: it lacks one.
    """
    if lost := [name for name in names if not hasattr(kind, name)]:
        version = versions.installed("peft")
        raise MissingDependencyError(
            f"{kind.__name__} of PEFT {version} has no {lost[0]}. Install a newer hf_ext or an older PEFT."
        )


class NamedAsInStateDict:
    """A model whose modules have the names that its state dict's keys begin with.

    From PEFT 0.21 on, tuners select an adapter's tensors by the names of modules. Wrappers for activation checkpointing and of
    FSDP 1 leave their own names out of the keys, so nothing inside them would be saved or loaded, without an error.
    """

    WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")

    def __init__(self, model: torch.nn.Module):
        self._model = model

    def named_modules(self, **options: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        return ((self.WRAPPERS.sub("", name).lstrip("."), module) for name, module in self._model.named_modules(**options))

    def require_modules(self, keys: Iterable[str]) -> None:
        """Checks that the modules of an adapter's keys in a state dict are found by their names.

        Raises:
            HfExtError: one is not.
        """
        names = {name for name, _ in self.named_modules(remove_duplicate=False)}
        if lost := next((key for key in keys if key.rpartition(".")[0] not in names), None):
            raise HfExtError(
                f"'{lost}' is under a wrapper whose name its state dict leaves out, so PEFT would not save it. Unwrap the "
                "model's modules before you save the adapter."
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
