"""Decoding during loading: operations that turn a payload into a weight where Transformers expects a weight.

They stand in front of the operations that a model itself applies to its checkpoint (merging experts, splitting projections), so
that these receive plain tensors. This file depends on internals of Transformers' loading; where they have changed, importing or
calling it raises AttributeError, ImportError or TypeError, and `DecodingQuantizer` decodes to plain files instead.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future
from re import escape
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform, build_glob_alternation
from transformers.quantizers.base import HfQuantizer

from hf_ext.errors import HfExtError
from hf_ext.integration import compat
from hf_ext.integration.loading.renaming import destinations
from hf_ext.storage.delta.device_decode import decoding_device, reading
from hf_ext.storage.delta.source import payload_name


class Decoding:
    """The decoding of one checkpoint for one model.

    Args:
        quantizer: the `DecodingQuantizer` that opened the checkpoint, and hears of each parameter that is loaded.
        model: on the meta device.
        conversions: the model's own, which get a `Decode` in front of their operations.

    Attributes:
        conversions: for Transformers to load with.
        error: the first error in the data. Transformers would replace it by a generic one if it were raised during loading.
    """

    def __init__(self, quantizer: Any, model: PreTrainedModel, conversions: list[WeightTransform]):
        self.quantizer, self.model_conversions = quantizer, list(conversions)
        self.expected = _expected(quantizer.weights, model, quantizer.dtype)
        # Weights move to their device after all operations. Quantization runs on that device.
        self.works_on_cpu = compat.converts_on_cpu() and quantizer.then is None
        self.quantize = Quantize(quantizer.then)
        self.error: HfExtError | None = None
        source = quantizer.source
        places = destinations(source.names(), conversions, model.base_model_prefix, self.expected)
        # Transformers loads tensors that keep their names without any converter, so without decoding them.
        kept = {place.kept: name for name, place in places.items() if place.kept is not None}
        unchanged = [AnyTensor(rf"^{escape(renamed)}$", name, self) for renamed, name in kept.items()]
        self.conversions = [*conversions, *unchanged, AnyTensor("^(.+)", r"\1", self)]
        for converter in conversions:  # changed last: the plain way needs them as they are
            if isinstance(converter, WeightConverter):
                converter.operations = [Decode(self, converter), *converter.operations]
                converter.force_cpu = self.works_on_cpu
                converter.quantization_operation = self.quantize
        # Decoding runs ahead of loading, in the same order.
        self.device = decoding_device(quantizer.devices if self.works_on_cpu else ())
        self.tensors = reading(source, places, self.device)

    def decode(self, name: str, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor in this type, on the device of its payload, or on that on which it is decoded. Keeps an error until
        loading ends, where it can be raised as it is."""
        try:
            tensor = self.tensors.result(name)
            return tensor.to(payload.device if self.device.type == "cpu" else self.device, dtype)
        except HfExtError as error:
            self.error = self.error or error
            return torch.empty(self.quantizer.source.entry(name).shape)

    def finish(self, model: PreTrainedModel) -> None:
        """Raises the error in the data, if there was one; else leaves the model with its own conversions, for saving."""
        self.tensors.close()
        if self.error is not None:
            raise self.error
        for entry in self.model_conversions:
            if isinstance(entry, WeightConverter):
                entry.operations = model_operations(entry)
                entry.quantization_operation = None
        # Transformers 5.24 deletes these when it removes the quantization config.
        model._weight_conversions = [entry for entry in self.model_conversions if entry.was_used()]
        compat.point_offloaded_ties_at_decoded_weights(model)


class AnyTensor(WeightConverter):
    """Decodes tensors that no converter of the model takes. One converter serves all of them: Transformers makes a deep copy
    for every tensor, which can cost more than loading it."""

    __slots__ = ("decoding", "payloads")

    def __init__(self, source: str, target: str, decoding: Decoding):
        super().__init__([source], [target], [Decode(decoding, self)], force_cpu=decoding.works_on_cpu)
        self.decoding = decoding
        self.payloads: dict[str, list[tuple[str, Any]]] = defaultdict(list)

    def __deepcopy__(self, memo) -> AnyTensor:
        return self

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        self.payloads[target_key].append((source_key, future))

    def convert(self, layer_name: str, *args, loading_info: Any = None, **kwargs) -> dict[str, Any]:
        ((name, future),) = self.payloads.pop(layer_name)
        payload = future.result() if isinstance(future, Future) else future()
        decoding = self.decoding
        expected = decoding.expected[layer_name]
        decoded = decoding.decode(name, payload, expected.dtype)
        decoding.quantizer.loaded(layer_name, {name: [name]}, self)
        # Up to Transformers 5.22, weights with a quantizer may have any shape.
        if decoded.shape == expected.shape:
            return decoding.quantize.convert({layer_name: decoded}, **kwargs)
        loading_info.missing_keys.discard(layer_name)
        loading_info.mismatched_keys.add((layer_name, decoded.shape, expected.shape))
        return {}


class Decode(ConversionOps):
    """Decodes payloads to the type of the parameter, for a converter of the model."""

    def __init__(self, decoding: Decoding, converter: WeightConverter):
        self.decoding = decoding
        self.converter = converter

    def __deepcopy__(self, memo) -> Decode:
        return self

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **kwargs) -> dict[str, list[torch.Tensor]]:
        names: dict[str, list[str]] = {}
        decoded: dict[str, list[torch.Tensor]] = {}
        dtype = self.decoding.expected[full_layer_name].dtype
        for pattern, payloads in input_dict.items():
            payloads = payloads if isinstance(payloads, list) else [payloads]
            names[pattern] = [payload_name(payload) for payload in payloads]
            decoded[pattern] = [self.decoding.decode(*pair, dtype) for pair in zip(names[pattern], payloads)]
        self.decoding.quantizer.loaded(full_layer_name, names, self.converter)
        return decoded


class Quantize(ConversionOps):
    """Quantizes decoded parameters, by their names in the model, where the requested quantization concerns them."""

    def __init__(self, quantizer: HfQuantizer | None):
        self.quantizer = quantizer

    def __deepcopy__(self, memo) -> Quantize:
        return self

    def convert(self, input_dict: dict[str, Any], model: PreTrainedModel, **kwargs) -> dict[str, Any]:
        if self.quantizer is None:
            return input_dict
        quantized: dict[str, Any] = {}
        for name, tensor in input_dict.items():
            if self.quantizer.param_needs_quantization(model, name):
                operation = self.quantizer.get_quantize_ops()
                quantized |= operation.convert({name: tensor}, **kwargs | {"model": model, "full_layer_name": name})
            else:
                quantized[name] = tensor
        return quantized


def model_operations(converter: WeightConverter) -> list[ConversionOps]:
    """Returns a converter's operations for the model, without `Decode`."""
    return [operation for operation in converter.operations if not isinstance(operation, Decode)]


def _expected(weights: dict[str, torch.Tensor], model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Returns the weights in the types that they are loaded in: some models keep float32."""
    if plan := model._get_dtype_plan(dtype):
        patterns, glob_of_group, _ = build_glob_alternation(list(plan))
        matches = {name: patterns.search(name) for name in weights}
        return {
            name: weight.to(plan[glob_of_group[match.lastgroup]]) if (match := matches[name]) else weight
            for name, weight in weights.items()
        }
    return weights
