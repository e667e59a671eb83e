"""Loading: Transformers reads payloads where it expects weights, and each payload is decoded when its turn comes.

`quant_method` in config.json makes Transformers call a `HfQuantizer`. The one here puts an operation in front of those that the
model itself applies to its checkpoint (merging experts, splitting projections), so that these receive plain tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from copy import copy, deepcopy
from functools import cache
from pathlib import Path
from re import escape
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.integration import compat, versions
from hf_ext.storage.delta.source import payload_name
from hf_ext.storage.prefetch import Prefetcher
from hf_ext.storage.safetensors_file import RawTensor
from hf_ext.storage.source import TensorSource

logger = logging.get_logger(__name__)

Converter = TypeVar("Converter", bound=WeightConverter)


class DecodingConfig(QuantizationConfigMixin):
    """The `quantization_config` in the config.json of a checkpoint that is stored relative to a base model.

    Args:
        base: folder or Hub id of the base model; None if the weights are stored without one.
        revision: the base's commit on the Hub; None for a folder.
        dtype: torch's name of the weights' float type, for `dtype="auto"`.
    """

    #: The loaded model is an ordinary one: Transformers drops the quantizer once the weights are loaded.
    dequantize = True
    quant_method: str
    #: The `quantization_config` that `from_pretrained` was called with.
    requested: Any = None

    def __init__(self, base: str | None, revision: str | None = None, dtype: str | None = None, **kwargs):
        kwargs.pop("quant_method", None)
        self.quant_method = type(self).quant_method
        self.base = base
        self.revision = revision
        self.dtype = dtype
        for key, value in kwargs.items():  # a later version's settings: kept when the config is saved again
            setattr(self, key, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """Reads the entry of a config.json. `from_pretrained(…, quantization_config=…)` then quantizes the decoded weights."""
        config = super().from_dict(config_dict, return_unused_kwargs, **kwargs)
        requested = compat.requested_quantization()
        if requested is not None and not isinstance(requested, DecodingConfig):
            # Transformers compares the names of the two classes, and warns that it ignores the requested config.
            name = type(requested).__name__
            config.__class__ = type(name, (cls,), {"requested": requested})
            logger.warning_once(f"The weights are decoded, then quantized as this {name} says: it is not ignored.")
        return config


class DecodingQuantizer(HfQuantizer):
    """Decodes a checkpoint while `from_pretrained` loads it.

    Attributes:
        plain: error message for a plain checkpoint that is loaded with this config.
        advice: what to do where weights cannot be decoded during loading.

    Raises from `from_pretrained`:
        BaseModelError: the base is missing, or is another model than the checkpoint was written against.
        CorruptFileError: a file is damaged, missing, from another save or from a newer version.
        CheckpointError: loading would shard the weights (tensor parallelism, ZeRO-3).
    """

    requires_calibration = False
    quantization_config: DecodingConfig
    plain: str
    advice: str
    source: TensorSource
    tensors: Prefetcher[RawTensor]

    def __init__(self, quantization_config: DecodingConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise CheckpointError(self.plain)
        self.error: HfExtError | None = None
        self.then: HfQuantizer | None = None
        if quantization_config.requested is not None:
            self.then = AutoHfQuantizer.from_config(quantization_config.requested, pre_quantized=False)
            for method in ("update_device_map", "adjust_max_memory", "param_element_size", "param_needs_quantization"):
                setattr(self, method, getattr(self.then, method))

    @abstractmethod
    def open(self, model: PreTrainedModel, files: list[Path]) -> TensorSource:
        """Returns the plain tensors that these files encode, by the names in the files."""

    def validate_environment(self, *args, **kwargs):
        _require_transformers(self.advice)
        if is_deepspeed_zero3_enabled():
            raise CheckpointError(self._sharded("DeepSpeed ZeRO-3"))
        if self.then is not None:
            self.then.validate_environment(*args, **kwargs)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # For dtype="auto" without a dtype in config.json, Transformers takes the payloads' type, uint8.
        if not dtype.is_floating_point and self.quantization_config.dtype is not None:
            stored = self.quantization_config.dtype
            named = getattr(torch, stored, None) if isinstance(stored, str) else None
            if not isinstance(named, torch.dtype):
                raise CheckpointError(f"config.json is damaged: {stored!r} is not a dtype. Download or save the folder again.")
            dtype = named
        return dtype if self.then is None else self.then.update_dtype(dtype)

    def preprocess_model(self, model, dtype: torch.dtype | None = None, **kwargs):
        self.prefix = model.base_model_prefix
        self.expected = _expected(model, dtype)
        super().preprocess_model(model, dtype=dtype, **kwargs)
        if self.then is not None:
            self.then.preprocess_model(model, dtype=dtype, **kwargs)

    def _process_model_before_weight_loading(self, model, checkpoint_files: list[str] | None = None, **kwargs):
        if getattr(model.config, "distributed_config", None) is not None:
            raise CheckpointError(self._sharded("Tensor parallelism"))
        # Transformers replaces errors during loading by a generic one, so everything that can be checked is checked here.
        files = [Path(path) for path in checkpoint_files or [] if Path(path).suffix == ".safetensors"]
        if not files:
            raise CheckpointError(
                f"A checkpoint of {type(self.quantization_config).quant_method} is read from safetensors files, not from a "
                "state dict."
            )
        self.source = self.open(model, files)
        # Decoding runs ahead of loading, in the same order.
        names = sorted(self.source.names(), key=dot_natural_key)
        sizes = {name: self.source.entry(name).nbytes for name in names}
        self.tensors = Prefetcher(self.source.read, sizes)
        return model

    def update_parallel_plan(self, model, plan) -> None:
        """Does nothing, as decoding adds no parameters to the model. Transformers would walk through all parameters, twice."""

    def update_weight_conversions(self, weight_conversions: list, model=None) -> list:
        # Transformers 5.16 to 5.20 pass no model.
        for converter in weight_conversions:
            if isinstance(converter, WeightConverter):
                converter.operations = [Decode(self, converter), *converter.operations]
                converter.force_cpu = self.works_on_cpu
                converter.quantization_operation = Quantize(self)
        kept = self._names_kept(weight_conversions)
        others = [AnyTensor(rf"^{escape(renamed)}$", name, self) for renamed, name in kept.items()]
        return [*weight_conversions, *others, AnyTensor("^(.+)", r"\1", self)]

    def _names_kept(self, conversions: list[WeightTransform]) -> dict[str, str]:
        """Returns the tensors to load under their own names because their new names are not in the model, by new name.

        Transformers loads these without any converter, so without decoding them.
        """
        conversions = deepcopy(conversions)  # renaming leaves marks on them
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        return {
            rename_source_key(name, renamings, [])[0]: name
            for name in self.source.names()
            if name in self.expected
            and rename_source_key(name, renamings, converters, self.prefix, self.expected)[0] not in self.expected
        }

    @property
    def works_on_cpu(self) -> bool:
        """Returns true if weights move to their device after all operations. Quantization runs on that device."""
        return compat.converts_on_cpu() and self.then is None

    def quantize(self, tensors: dict[str, Any], model: PreTrainedModel, **kwargs) -> dict[str, Any]:
        """Quantizes decoded parameters, by their names in the model, where the requested quantization concerns them."""
        if self.then is None:
            return tensors
        quantized: dict[str, Any] = {}
        for name, tensor in tensors.items():
            if self.then.param_needs_quantization(model, name):
                operation = self.then.get_quantize_ops()
                quantized |= operation.convert({name: tensor}, **kwargs | {"model": model, "full_layer_name": name})
            else:
                quantized[name] = tensor
        return quantized

    def loaded(self, target: str, names: dict[str, list[str]], converter: WeightConverter) -> None:
        """Called when the tensors `names` (by the converter's source pattern) have been decoded for the parameter `target`."""

    def _process_model_after_weight_loading(self, model, **kwargs):
        self.tensors.close()
        if self.error is not None:
            raise self.error
        # Saving reverts the model's own converters, never ours.
        model._weight_conversions = [entry for entry in model._weight_conversions if not isinstance(entry, AnyTensor)]
        for entry in model._weight_conversions:
            if isinstance(entry, WeightConverter):
                entry.operations = own_operations(entry)
                entry.quantization_operation = None
        del model.is_quantized
        if self.then is not None:
            model.hf_quantizer, model.is_quantized = self.then, True
            model.quantization_method = self.then.quantization_config.quant_method
            self.then.postprocess_model(model, **kwargs)
        _point_offloaded_ties_at_decoded_weights(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def _sharded(self, technique: str) -> str:
        return f"{technique} shards weights during loading, but encoded weights cannot be sharded. {self.advice}"


class AnyTensor(WeightConverter):
    """Decodes tensors that no converter of the model takes."""

    __slots__ = ()

    def __init__(self, source: str, target: str, quantizer: DecodingQuantizer):
        super().__init__([source], [target], [Decode(quantizer, self)], force_cpu=quantizer.works_on_cpu)

    def convert(self, layer_name: str, *args, loading_info: Any = None, **kwargs) -> dict[str, Any]:
        converted = super().convert(layer_name, *args, loading_info=loading_info, **kwargs)
        # Up to Transformers 5.22, weights with a quantizer may have any shape.
        (decoded,) = converted[layer_name]
        quantizer = self.operations[0].quantizer
        expected = quantizer.expected[layer_name]
        if decoded.shape == expected.shape:
            return quantizer.quantize(converted, **kwargs)
        loading_info.missing_keys.discard(layer_name)
        loading_info.mismatched_keys.add((layer_name, decoded.shape, expected.shape))
        return {}

    def __deepcopy__(self, memo) -> AnyTensor:
        # Transformers makes a deep copy for every tensor it loads, which can cost more than loading it.
        return unused(self)


class Decode(ConversionOps):
    """Decodes payloads to the type of the parameter. Keeps an error until loading ends, where it can be raised as it is."""

    def __init__(self, quantizer: DecodingQuantizer, converter: WeightConverter):
        self.quantizer = quantizer
        self.converter = converter

    def __deepcopy__(self, memo) -> Decode:
        return self

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **kwargs) -> dict[str, list[torch.Tensor]]:
        names: dict[str, list[str]] = {}
        decoded: dict[str, list[torch.Tensor]] = {}
        dtype = self.quantizer.expected[full_layer_name].dtype
        for pattern, tensors in input_dict.items():
            tensors = tensors if isinstance(tensors, list) else [tensors]
            # `loaded` uses the names only where every tensor is a payload, so that none is None.
            names[pattern] = [payload_name(tensor) for tensor in tensors]  # type: ignore[misc]
            decoded[full_layer_name if isinstance(self.converter, AnyTensor) else pattern] = [
                self._decode(tensor, name, dtype) for tensor, name in zip(tensors, names[pattern])
            ]
        self.quantizer.loaded(full_layer_name, names, self.converter)
        return decoded

    def _decode(self, tensor: torch.Tensor, name: str | None, dtype: torch.dtype) -> torch.Tensor:
        if name is not None:
            try:
                tensor = self.quantizer.tensors.result(name).to_torch().to(tensor.device)
            except HfExtError as error:
                self.quantizer.error = self.quantizer.error or error
                return torch.empty(self.quantizer.source.entry(name).shape)
        return tensor.to(dtype=dtype)


class Quantize(ConversionOps):
    """Quantizes what a converter of the model has made of decoded tensors."""

    def __init__(self, quantizer: DecodingQuantizer):
        self.quantizer = quantizer

    def __deepcopy__(self, memo) -> Quantize:
        return self

    def convert(self, input_dict: dict[str, Any], **kwargs) -> dict[str, Any]:
        return self.quantizer.quantize(input_dict, **kwargs)


@cache  # looking the version up takes a millisecond
def _require_transformers(advice: str) -> None:
    versions.require("Loading this checkpoint", "transformers>=5.16.1", advice=advice)


def own_operations(converter: WeightConverter) -> list[ConversionOps]:
    """Returns a converter's operations without ours."""
    return [operation for operation in converter.operations if not isinstance(operation, Decode)]


def unused(converter: Converter) -> Converter:
    """Returns a shallow copy of a converter that has not collected any tensors."""
    converter = copy(converter)
    converter.collected_tensors, converter.layer_targets = defaultdict(list), defaultdict(set)
    return converter


def _expected(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Returns each parameter and buffer on the meta device, in the type that it is loaded in: some models keep float32."""
    expected = {name: tensor.detach().to("meta") for name, tensor in model.state_dict().items()}
    if plan := model._get_dtype_plan(dtype):
        patterns, glob_of_group, _ = build_glob_alternation(list(plan))
        for name in expected:
            if match := patterns.search(name):
                expected[name] = expected[name].to(plan[glob_of_group[match.lastgroup]])
    return expected


def _point_offloaded_ties_at_decoded_weights(model: PreTrainedModel) -> None:
    """Lets an offloaded weight share the decoded copy on disk of the weight that it is tied to.

    Transformers reads such a weight from the checkpoint's own file, which holds the payload."""
    maps = (getattr(getattr(module, "_hf_hook", None), "weights_map", None) for module in model.modules())
    index: dict[str, Any] = next((weights.dataset.index for weights in maps if weights is not None), {})
    for target, source in model.all_tied_weights_keys.items():
        if source in index:
            index[target] = index[source]
