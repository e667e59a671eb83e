"""Turns a model into another one of its kind in place: checks their differences, and updates what depends on the weights."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig, PreTrainedModel

from hf_ext.errors import CheckpointError
from hf_ext.integration import compat
from hf_ext.storage.config_file import forget_encoding

# Entries of a configuration that may differ: labels, vocabulary, names, dropout, defaults of generation and of the outputs.
FREE = re.compile(
    r"architectures|label|problem_type|vocab_size|token_id|name|version|dtype|drop|finetuning_task|task_specific|use_cache|"
    r"checkpointing|output_(attentions|hidden|router|scores|logits)|return_dict|initializer|max_length|min_length|num_beams|temperature|top_[kp]|penalty|do_sample|suppress_tokens|auto_map"
)
WRAPPERS = (".base_layer", ".original_module")  # PEFT puts these between a module and its weights
LABELS = ("id2label", "label2id", "architectures", "transformers_version", "dtype", "_name_or_path")


class Move(NamedTuple):
    """The differences between two models, apart from their weights.

    Attributes:
        before, after: the configurations, one object if they are equal.
        shapes: the shapes of the second model's tensors, if its modules have other sizes.
        sizes: attributes of modules that hold sizes (out_features, num_labels), as path, attribute and new value.
        generation: the second model's generation settings, if they differ.
    """

    before: PretrainedConfig
    after: PretrainedConfig
    shapes: dict[str, torch.Size] | None
    sizes: list[tuple[str, str, Any]]
    generation: GenerationConfig | None


def require_plain(model: object, function: str, peft: str, purpose: str) -> None:
    """Raises CheckpointError, naming the function, unless this is a Transformers model with plain weights.

    Args:
        peft: advice for a PeftModel.
        purpose: the reason why the weights must be plain, as in "can be compressed".
    """
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(f"{function} takes a Transformers PreTrainedModel, not a {type(model).__name__}. {peft}")
    forget_encoding(model.config)  # of a model that was made from the config.json of a compressed checkpoint
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None) is not None:
        raise CheckpointError(f"This model is quantized; only plain weights {purpose}.")


def difference(first: dict, second: dict) -> tuple[str, Any, Any] | None:
    """Returns the first entry that keeps two models from becoming each other in place, with its two values; None if there is
    none."""
    first, second = _entries(first), _entries(second)
    keys = [key for key in sorted(first.keys() | second.keys()) if not FREE.search(key)]
    return next(((key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)), None)


def move_between(model: PreTrainedModel, texts: tuple[dict, dict], settings: tuple[dict | None, dict | None]) -> Move:
    """Returns the difference between two configurations and their generation settings, if they have any.

    Raises:
        CheckpointError: modules of the two models cannot become each other, or the generation settings are invalid.
    """
    kind = type(model.config)
    before = after = kind.from_dict(deepcopy(texts[0]))
    shapes, sizes = None, []
    if texts[0] != texts[1]:
        after = kind.from_dict(deepcopy(texts[1]))
        if _structure(texts[0]) != _structure(texts[1]) or before.num_labels != after.num_labels:
            with torch.device("meta"), compat.no_init_weights():  # the sizes that the class itself gives
                models = [compat.model_of(type(model), config) for config in (before, after)]
            shapes = {name: tensor.shape for name, tensor in models[1].state_dict().items()}
            sizes = _sizes(*(dict(model.named_modules()) for model in models))
    generation = None
    if settings[0] != settings[1] and model.can_generate():
        try:
            generation = GenerationConfig.from_dict(settings[1]) if settings[1] else GenerationConfig.from_model_config(after)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"The generation_config.json to switch to cannot be read: {error}") from error
    return Move(before, after, shapes, sizes, generation)


def configure(model: PreTrainedModel, move: Move) -> None:
    """Updates the configuration, and the attributes that modules took from it, to those of the new weights."""
    if move.before is not move.after:
        modules = {plain(path): module for path, module in model.named_modules()} if move.sizes else {}
        for path, key, value in move.sizes:
            if path in modules:
                setattr(modules[path], key, value)
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        for config in configs.values():
            if type(config) is not type(move.after):  # a part's, updated within the whole model's
                continue
            _follow(config, move.before, move.after)
            if hasattr(config, "problem_type"):  # models set it themselves, by the labels of the first batch
                config.problem_type = move.after.problem_type
    if move.generation is not None:
        model.generation_config = deepcopy(move.generation)


def replace(model: PreTrainedModel, weight: torch.Tensor, tensor: torch.Tensor) -> None:
    """Sets a parameter or buffer of the model to a tensor, in the type and on the device that it has. Memory is reused if the
    shapes are equal."""
    tensor = tensor.to(dtype=weight.dtype, device=weight.device)
    if weight.shape == tensor.shape and not weight.is_inference():
        weight.copy_(tensor)
        return
    new = torch.nn.Parameter(tensor, weight.requires_grad) if isinstance(weight, torch.nn.Parameter) else tensor
    for module in model.modules():  # several modules may be tied to it
        for key, value in compat.own_tensors(module):
            if value is weight:
                setattr(module, key, new)


def plain(path: str) -> str:
    """Returns the name that a module or a weight has without PEFT."""
    for wrapper in WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def _structure(config: dict) -> dict:
    return {key: value for key, value in config.items() if key not in LABELS}


def _sizes(first: dict[str, torch.nn.Module], second: dict[str, torch.nn.Module]) -> list[tuple[str, str, Any]]:
    """Returns the attributes that hold sizes and differ between modules of the same path."""
    sizes = []
    for path, after in second.items():
        before = first.get(path)
        if before is None:
            continue
        changed = {
            key: value
            for key, value in vars(after).items()
            if type(value) in (int, float, str, bool, tuple, type(None)) and vars(before).get(key, value) != value
        }
        changed.pop("name_or_path", None)
        other = type(before).__name__ != type(after).__name__  # parametrized modules have a class each
        # The constructor derived other state from these attributes.
        deep = tuple in map(type, changed.values()) or changed and compat.unsaved_buffers(after)
        if other or deep:
            what = f"a {type(before).__name__} and a {type(after).__name__}" if other else f"of other {', '.join(changed)}"
            raise CheckpointError(
                f"'{path}' is {what} in the two models, so that one cannot become the other. Load it with from_pretrained."
            )
        sizes += [(path, key, value) for key, value in changed.items()]
    return sizes


def _entries(config: dict, prefix: str = "") -> dict[str, object]:
    """Returns the entries of a config.json, with the defaults of its class, by their path."""
    if not prefix and config.get("model_type") in CONFIG_MAPPING:
        config = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config)).to_dict()
    flat: dict[str, object] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        flat |= _entries(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def _follow(config: PretrainedConfig, before: PretrainedConfig, after: PretrainedConfig) -> None:
    """Applies the changes between two configurations to a third, which keeps its own other settings."""
    for key in vars(before).keys() | vars(after).keys():
        old, new = getattr(before, key, None), getattr(after, key, None)
        if isinstance(new, PretrainedConfig) and isinstance(old, PretrainedConfig):
            if isinstance(getattr(config, key, None), PretrainedConfig):
                _follow(getattr(config, key), old, new)
        elif key not in vars(after):
            vars(config).pop(key, None)
        elif old != new:
            setattr(config, key, deepcopy(new))
