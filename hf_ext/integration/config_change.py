"""Changes of a model's configuration, and of what depends on it, when other weights replace its weights in place."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig, PreTrainedModel

from hf_ext.errors import CheckpointError
from hf_ext.integration import compat

# Entries of a configuration that may differ: labels, vocabulary, names, dropout, defaults of generation and of the outputs.
FREE = re.compile(
    r"architectures|label|problem_type|vocab_size|token_id|name|version|dtype|drop|finetuning_task|task_specific|use_cache|"
    r"checkpointing|output_(attentions|hidden|router|scores|logits)|return_dict|initializer|max_length|min_length|num_beams|temperature|top_[kp]|penalty|do_sample|suppress_tokens|auto_map"
)
LABELS, NAMES = ("id2label", "label2id"), ("architectures", "transformers_version", "dtype", "_name_or_path")

WRAPPERS = (".base_layer", ".original_module")  # PEFT puts these between a module and its weights


def plain(path: str) -> str:
    """Returns the name that a module or a weight has without PEFT."""
    for wrapper in WRAPPERS:
        path = path.replace(wrapper, "")
    return path


class ConfigChange(NamedTuple):
    """The differences between two models, apart from their weights."""

    before: PretrainedConfig  # the configuration
    after: PretrainedConfig  # the other one, the same object if they are equal
    shapes: dict[str, torch.Size] | None  # of the second model's tensors, if its modules have other sizes
    sizes: list[tuple[str, str, Any]]  # attributes of modules (out_features, num_labels), as path, attribute and new value
    generation: GenerationConfig | None  # the second model's generation settings, if they differ

    def apply(self, model: PreTrainedModel) -> None:
        """Updates a model's configuration, and the attributes that its modules took from it."""
        if self.before is not self.after:
            modules = {plain(path): module for path, module in model.named_modules()} if self.sizes else {}
            for path, key, value in self.sizes:
                if path in modules:
                    setattr(modules[path], key, value)
            configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
            for config in configs.values():
                if type(config) is not type(self.after):  # a part's, updated within the whole model's
                    continue
                _follow(config, self.before, self.after)
                if hasattr(config, "problem_type"):  # models set it themselves, by the labels of the first batch
                    config.problem_type = self.after.problem_type
        if self.generation is not None:
            model.generation_config = deepcopy(self.generation)


def difference(first: dict, second: dict) -> tuple[str, Any, Any] | None:
    """Returns the first entry that keeps two models from becoming each other in place, with its two values; None if there is
    none."""
    first, second = _entries(first), _entries(second)
    keys = [key for key in sorted(first.keys() | second.keys()) if not FREE.search(key)]
    return next(((key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)), None)


def change_between(
    model: PreTrainedModel, configs: tuple[dict, dict], generation: tuple[dict | None, dict | None]
) -> ConfigChange:
    """Returns the change from one config.json and its generation settings, if it has any, to another. Raises CheckpointError if
    modules of the two models cannot become each other, or the generation settings are invalid."""
    kind = type(model.config)
    before = after = compat.config_of(kind, configs[0])
    shapes, sizes, settings = None, [], None
    if configs[0] != configs[1]:
        after = compat.config_of(kind, configs[1])
        if _structure(configs[0]) != _structure(configs[1]) or before.num_labels != after.num_labels:
            texts = map(json.dumps, configs)
            (before, first), (after, second) = (_skeleton(type(model), kind, text) for text in texts)  # type: ignore[arg-type]
            shapes = {name: tensor.shape for name, tensor in second.state_dict().items()}
            sizes = _sizes(dict(first.named_modules()), dict(second.named_modules()))
    if generation[0] != generation[1] and model.can_generate():
        try:
            settings = compat.generation_of(generation[1]) if generation[1] else GenerationConfig.from_model_config(after)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"The generation_config.json to switch to cannot be read: {error}") from error
    return ConfigChange(before, after, shapes, sizes, settings)


@lru_cache(maxsize=4)  # of those that a program switches between
def _skeleton(
    model: type[PreTrainedModel], kind: type[PretrainedConfig], text: str
) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Returns the configuration of a config.json, as the class of a model changes it, and its model without weights."""
    config = compat.config_of(kind, json.loads(text))
    return config, compat.without_weights(model, config)


def _structure(config: dict) -> dict:
    return {key: value for key, value in config.items() if key not in (*LABELS, *NAMES)}


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
        differs = type(before).__name__ != type(after).__name__  # parametrized modules have a class each
        # The constructor derived other state from these attributes.
        deep = tuple in map(type, changed.values()) or changed and compat.unsaved_buffers(after)
        if differs or deep:
            what = f"a {type(before).__name__} and a {type(after).__name__}" if differs else f"of other {', '.join(changed)}"
            raise CheckpointError(
                f"'{path}' is {what} in the two models, so that one cannot become the other. Load it with from_pretrained."
            )
        sizes += [(path, key, value) for key, value in changed.items()]
    return sizes


def _entries(config: dict, prefix: str = "") -> dict[str, object]:
    """Returns the entries of a config.json, with the defaults of its class, by their path."""
    if not prefix and config.get("model_type") in CONFIG_MAPPING:
        config = compat.config_of(CONFIG_MAPPING[config["model_type"]], config).to_dict()
    flat: dict[str, object] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        flat |= _entries(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def _follow(config: PretrainedConfig, before: PretrainedConfig, after: PretrainedConfig) -> None:
    """Applies the changes between two configurations to a third, which keeps its own other settings."""
    for key in vars(before).keys() | vars(after).keys():
        old, new = vars(before).get(key), vars(after).get(key)  # some properties of this name raise errors
        if isinstance(new, PretrainedConfig) and isinstance(old, PretrainedConfig):
            if isinstance(part := vars(config).get(key), PretrainedConfig):
                _follow(part, old, new)
        elif key not in vars(after):
            vars(config).pop(key, None)
        elif old != new:
            setattr(config, key, deepcopy(new))
