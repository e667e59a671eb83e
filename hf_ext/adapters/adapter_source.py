"""Saved PEFT adapters with their bases: loaded, or merged layer by layer without building the model in memory."""

from __future__ import annotations

from collections.abc import Collection, Set
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import PeftConfig, PeftModel, TaskType
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import load_peft_weights
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from hf_ext.errors import CheckpointError
from hf_ext.integration.config_change import plain
from hf_ext.integration.in_place import tensors_of
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.config_file import forget_encoding, is_merge
from hf_ext.storage.layout import ADAPTER
from hf_ext.storage.names import Names, Ties
from hf_ext.storage.safetensors_file import Entry, RawTensor
from hf_ext.storage.source import TensorSource
from hf_ext.storage.stored import split_task

AUTO_CLASSES = {
    TaskType.SEQ_CLS: "AutoModelForSequenceClassification",
    TaskType.TOKEN_CLS: "AutoModelForTokenClassification",
    TaskType.QUESTION_ANS: "AutoModelForQuestionAnswering",
    TaskType.CAUSAL_LM: "AutoModelForCausalLM",
    TaskType.SEQ_2_SEQ_LM: "AutoModelForSeq2SeqLM",
    TaskType.FEATURE_EXTRACTION: "AutoModel",
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # starts of PEFT's that take a part out of the base's weights
TRAINED = ".modules_to_save.default"  # PEFT puts it between a module that was trained whole and its weights


class AdapterSource(TensorSource):
    """The weights of a base with an adapter merged into them: LoRA, DoRA, (IA)³ and all others that PEFT can merge.

    Modules that were trained whole replace those of the base. `config` is the base's, with the adapter's numbers of labels
    and words.

    Args:
        folder: of the adapter, as PEFT saves it.
        base: the model that it was trained on.

    Raises:
        CheckpointError: the adapter cannot be merged (prompt tuning), or does not fit the base.
    """

    def __init__(self, folder: Path, base: TensorSource):
        self.name, self.base = str(folder), base
        settings = _settings_of(folder)
        self.config = _config_of(settings, base, load_peft_weights(str(folder), device="cpu"))
        skeleton = _skeleton(settings, self.config)
        fill_with_nothing(skeleton)
        self.config.architectures = [type(skeleton).__name__]
        try:
            model = PeftModel.from_pretrained(skeleton, folder, low_cpu_mem_usage=True, torch_device="cpu")
        except Exception as error:  # of settings of wrong types, too
            raise CheckpointError(f"The adapter {folder} does not fit the base {base}: {error}") from error
        _require_all_tensors(model, folder, base)
        layers = {path: module for path, module in skeleton.named_modules() if isinstance(module, BaseTunerLayer)}
        self._layers = {  # name of a weight -> the layer that makes it
            f"{_plain(path)}.{parameter}": layer for path, layer in layers.items() for parameter in _changed_by(layer)
        }
        ties = Ties(skeleton.all_tied_weights_keys)
        weights = self._weights_of(skeleton, layers.keys(), ties)
        self._given = {name: tensor for name, tensor in weights.items() if not _is_nothing(tensor)}
        of_base = Names(base.names())
        twins = {name: of_base.twin_of(name, ties) for name in weights if name not in self._given}
        self._twins = {name: twin for name, twin in twins.items() if twin is not None}
        if orphans := twins.keys() - self._twins.keys():
            self._require_converted(skeleton, orphans)
            used = set(self._twins.values())  # Transformers makes the orphans from other tensors, which keep the base's names
            self._twins |= {name: name for name in base.names() if name not in used}

    def _weights_of(self, skeleton: PreTrainedModel, layers: Collection[str], ties: Ties) -> dict[str, torch.Tensor]:
        """Returns all weights by the names that they have without PEFT: those that the adapter holds whole, and tensors of
        nothing for those of the base.

        Args:
            layers: names of the modules that the adapter changes.
        """
        groups = (self.base.distinct(group) for group in ties.groups(self.base.names()) if len(group) > 1)
        apart = {other for group in groups if len(group) > 1 for name in group for other in (name, *ties.others(name))}
        tied = {name for name in skeleton.all_tied_weights_keys if not self._layers.keys() & {name, *ties.others(name)}} - apart
        weights = {}
        for path, tensor in skeleton.state_dict().items():
            name, whole = _plain(path), ".modules_to_save." in path
            parts = path.split(".")
            adapter = any(part != "base_layer" and ".".join(parts[:i]) in layers for i, part in enumerate(parts))
            if adapter and not whole or ".original_module." in path or name in tied and not whole:
                continue
            if whole and ties.others(name):
                raise CheckpointError(
                    f"The adapter {self.name} trained the whole '{name}', which is tied to another weight in the base. "
                    "Merge it (merge_and_unload), save the model, and give that folder."
                )
            weights[name] = tensor
        return weights

    def _require_converted(self, skeleton: PreTrainedModel, orphans: Set[str]) -> None:
        """Raises CheckpointError unless loading makes these weights, which neither the adapter nor the base has, from other
        tensors, and the adapter changes none of them."""
        if not any(isinstance(entry, WeightConverter) for entry in get_model_conversion_mapping(skeleton)):
            raise CheckpointError(
                f"Neither the adapter {self.name} nor the base {self.base} has '{min(orphans)}', which a "
                f"{type(skeleton).__name__} requires. Save the adapter with this module in modules_to_save, or merge it "
                "(merge_and_unload) and save the model."
            )
        if stray := sorted(orphans & self._layers.keys()):
            raise CheckpointError(
                f"The adapter {self.name} changes '{stray[0]}', which has no counterpart in the files of the base "
                f"{self.base}. Merge it with merge_and_unload, save the model, and give that folder."
            )

    def require_intact(self) -> None:
        self.base.require_intact()

    def names(self) -> list[str]:
        return sorted({*self._given, *self._twins})

    def entry(self, name: str) -> Entry:
        if name in self._given:
            given = RawTensor.from_torch(self._given[name])
            return Entry(given.dtype, given.shape, 0, given.data.size)
        return self.base.entry(self._twins[name])

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        if name not in self._layers:
            return RawTensor.from_torch(self._given[name]) if name in self._given else self.base.read(self._twins[name])
        module, parameter = name.rpartition(".")[::2]
        weights = self._layers[name].get_base_layer().named_parameters(recurse=False)
        empty = {other: tensor for other, tensor in weights if _is_nothing(tensor)}  # PEFT saves embeddings with their base
        layer = deepcopy(self._layers[name], {id(tensor): tensor for tensor in empty.values()})
        inner = layer.get_base_layer()
        for other in empty:
            weight = self.base.read(self._twins[f"{module}.{other}"]).to_torch()
            setattr(inner, other, torch.nn.Parameter(weight, requires_grad=False))
        with torch.no_grad():
            layer.merge(adapter_names=["default"])
        return RawTensor.from_torch(getattr(layer.get_base_layer(), parameter))


def _changed_by(layer: BaseTunerLayer) -> list[str]:
    """Returns the names of the parameters that an adapter's layer may change. Layers of one parameter can be nested."""
    if parameter := getattr(layer, "parameter_name", None):
        return [parameter]
    return [name for name, _ in layer.get_base_layer().named_parameters(recurse=False)]


def _settings_of(folder: Path) -> PeftConfig:
    """Returns the configuration of an adapter that can be merged into the weights of its base, file by file.

    Raises:
        CheckpointError: it cannot.
    """
    if not any(folder.glob("adapter_model.*")):
        raise CheckpointError(f"{folder} has an adapter_config.json but no {ADAPTER}. Download or save the adapter again.")
    try:
        settings = PeftConfig.from_pretrained(folder)
        trained_on, auto_mapping = settings.base_model_name_or_path, settings.auto_mapping
        if not isinstance(trained_on, str | None) or not isinstance(auto_mapping, dict | None):
            raise TypeError("base_model_name_or_path or auto_mapping is of another type")
    except Exception as error:  # a stranger's file may hold anything
        raise CheckpointError(
            f"{folder} has no adapter_config.json that PEFT can read: {type(error).__name__}: {error}"
        ) from error
    if trained_on and (split_task(trained_on)[1] or is_merge(trained_on)):
        raise CheckpointError(
            f"{folder} is an adapter of a task of the merge {trained_on}, not of the base. Merge it into that task's model "
            "(merge_and_unload), save the model, and give that folder."
        )
    if settings.is_prompt_learning:
        raise CheckpointError(f"{folder} is a {settings.peft_type.value} adapter, which cannot be merged into weights.")
    if (start := getattr(settings, "init_lora_weights", None)) and str(start).startswith(CHANGES_BASE):
        raise CheckpointError(
            f"{folder} is a LoRA that PEFT started by {start}, which changes the base's weights, and saved without "
            "conversion. Save it with path_initial_model_for_weight_conversion, or merge it (merge_and_unload), save the "
            "model, and give that folder."
        )
    if getattr(settings, "trainable_token_indices", None) is not None:
        raise CheckpointError(
            f"{folder} trained single tokens (trainable_token_indices), which cannot be merged file by file. Merge it "
            "(merge_and_unload), save the model, and give that folder."
        )
    return settings


def _require_all_tensors(model: PeftModel, folder: Path, base: TensorSource) -> None:
    """Raises CheckpointError unless the adapter's file has exactly the tensors that an adapter of this base has.

    PEFT loads the tensors that fit and skips the others: those of a layer that the base does not have, for instance.
    """
    loaded = model.load_adapter(str(folder), "default", torch_device="cpu")
    # With bias="all", PEFT saves some tensors twice; it never does so with those of its layers.
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(model.peft_config["default"].peft_type, "")
    for names, reason in ((loaded.unexpected_keys, "only the adapter has"), (loaded.missing_keys, "the adapter does not have")):
        if names := sorted(name for name in names if prefix in name):
            name = names[0].replace(".default.", ".")
            raise CheckpointError(
                f"The adapter {folder} does not fit the base {base}: {reason} '{name}'. Give the base that it was trained on."
            )


def _plain(path: str) -> str:
    """Returns the name that a parameter has without PEFT."""
    return plain(path).replace(TRAINED, "")


def _skeleton(settings: PeftConfig, config: PretrainedConfig) -> PreTrainedModel:
    """Returns the model that the adapter was trained on, without weights."""
    name = AUTO_CLASSES.get(settings.task_type) or (settings.auto_mapping or {}).get("base_model_class")
    name = str(name or (config.architectures or ["AutoModel"])[0])
    kind: Any = getattr(transformers, name, None)
    is_auto = name in AUTO_CLASSES.values()
    if not is_auto and not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise CheckpointError(
            f"The adapter was trained on a {name}, which is no model class of Transformers. Merge it (merge_and_unload), save "
            "the model, and give that folder."
        )
    try:
        with torch.device("meta"):
            return kind.from_config(config) if is_auto else kind(config)
    except ValueError as error:  # the base has no such class
        raise CheckpointError(
            f"The adapter belongs to a model for {name}, and the base is a {config.model_type} model. Give the base that the "
            "adapter was trained on."
        ) from error


def fill_with_nothing(model: PreTrainedModel) -> None:
    """Replaces the tensors of a model on the meta device by tensors of the same shapes that share one zero in memory.

    PEFT moves adapters to the device of the base's weights, where this class computes with them.
    """
    for module in model.modules():
        for key, tensor in tensors_of(module):
            if tensor.is_meta:
                empty = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                setattr(module, key, torch.nn.Parameter(empty, requires_grad=False) if is_parameter else empty)


def _is_nothing(tensor: torch.Tensor) -> bool:
    """Checks whether `fill_with_nothing` made this tensor."""
    return not any(tensor.stride()) and tensor.numel() > 0


def _config_of(settings: PeftConfig, base: TensorSource, tensors: dict[str, torch.Tensor]) -> PretrainedConfig:
    """Returns the base's configuration, with the numbers of words and labels of the adapter's own modules."""
    folder = base.folder() if isinstance(base, Checkpoint) else base.paths[0].parent  # as the weights were read
    try:
        config = AutoConfig.from_pretrained(folder or base.name)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The base {base} has no config.json that Transformers can read, which is needed to merge an adapter: {error}"
        ) from error
    forget_encoding(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in _skeleton(settings, config).state_dict().items()}
    for key, tensor in tensors.items():
        name = _plain(key.removeprefix("base_model.model."))
        if name in shapes and shapes[name][1:] == tuple(tensor.shape[1:]) and shapes[name] != tuple(tensor.shape):
            if shapes[name][0] == config.get_text_config().vocab_size:
                config.get_text_config().vocab_size = tensor.shape[0]
            else:
                config.num_labels = tensor.shape[0]
    return config
