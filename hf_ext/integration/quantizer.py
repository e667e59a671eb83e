"""Loading: Transformers meets payloads where it expects weights, and each is decoded when its turn comes.

Transformers calls a `HfQuantizer` by `quant_method` in config.json. The one here puts an operation before those that the model
itself applies to its checkpoint (merging experts, splitting projections), so these see plain tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from copy import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform, dot_natural_key
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.storage.delta.source import payload_name
from hf_ext.storage.prefetch import Prefetcher
from hf_ext.storage.source import TensorSource

ANY_NAME = "^(.+)"


class DecodingConfig(QuantizationConfigMixin):
    """What stands under `quantization_config` in the config.json of a checkpoint that is stored relative to a base model.

    Args:
        base: folder or Hub id of the base model.
        revision: the base's commit on the Hub; None for a folder.
        dtype: torch's name of the weights' float type, for `dtype="auto"`.
    """

    #: The loaded model is an ordinary one: Transformers drops the quantizer once the weights are in.
    dequantize = True
    quant_method: str

    def __init__(self, base: str, revision: str | None = None, dtype: str | None = None, **kwargs):
        kwargs.pop("quant_method", None)
        self.quant_method = type(self).quant_method
        self.base = base
        self.revision = revision
        self.dtype = dtype
        for key, value in kwargs.items():  # of a later version; kept when the config is saved again
            setattr(self, key, value)


class DecodingQuantizer(HfQuantizer):
    """Decodes a checkpoint while `from_pretrained` loads it.

    Attributes:
        plain: what to say of a config that comes with a plain checkpoint.
        advice: what to do where weights cannot be decoded while they load.

    Raises from `from_pretrained`:
        BaseModelError: the base is missing, or not the one the checkpoint was written against.
        CorruptFileError: a file is damaged, missing, from another save or from a newer version.
        CheckpointError: the weights are to be sharded while they load (tensor parallelism, ZeRO-3).
    """

    requires_calibration = False
    quantization_config: DecodingConfig
    plain: str
    advice: str

    def __init__(self, quantization_config: DecodingConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise CheckpointError(self.plain)
        self.tensors: Prefetcher | None = None
        self.error: HfExtError | None = None

    @abstractmethod
    def open(self, model: PreTrainedModel, files: list[Path]) -> TensorSource:
        """The plain tensors that these files stand for, by the names in them."""

    def validate_environment(self, *args, **kwargs):
        if is_deepspeed_zero3_enabled():
            raise CheckpointError(self._sharded("DeepSpeed ZeRO-3"))

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Asked for "auto" without a dtype in config.json, Transformers looks at the payloads' bytes.
        if dtype.is_floating_point or self.quantization_config.dtype is None:
            return dtype
        return getattr(torch, self.quantization_config.dtype)

    def _process_model_before_weight_loading(self, model, checkpoint_files: list[str] | None = None, **kwargs):
        if getattr(model.config, "distributed_config", None) is not None:
            raise CheckpointError(self._sharded("Tensor parallelism"))
        # An error in the middle of loading would reach the user as a generic one, so whatever can be checked is checked here.
        files = [Path(path) for path in checkpoint_files or [] if Path(path).suffix == ".safetensors"]
        if not files:
            raise CheckpointError(
                f"A checkpoint of {type(self.quantization_config).quant_method} is read from safetensors files, not from a "
                "state dict."
            )
        self.source = self.open(model, files)
        # Transformers loads in this order; decoding runs ahead of it.
        names = sorted(self.source.names(), key=dot_natural_key)
        sizes = {name: self.source.entry(name).nbytes for name in names}
        self.tensors = Prefetcher(self.source.read, sizes)
        return model

    def update_weight_conversions(self, weight_conversions: list, model) -> list:
        return [*weight_conversions, AnyTensor([ANY_NAME], [r"\1"], [Decode(self)], force_cpu=True)]

    def get_new_dtype(self, converter, param, dtype: torch.dtype | None) -> None:
        """The type a tensor is to have is told to the operation that decodes it; the payload itself is not cast."""
        decode = Decode(self, dtype, converter)
        if isinstance(converter, WeightConverter):
            others = [op for op in converter.operations if not isinstance(op, Decode)]
            converter.operations = [decode, *others]
            converter.force_cpu = True
        else:
            converter.quantization_operation = decode

    def loaded(self, target: str, names: dict[str, list[str]], converter: WeightTransform) -> None:
        """Called when the tensors `names` (by the converter's source pattern) have been decoded for the parameter `target`."""

    def _process_model_after_weight_loading(self, model, **kwargs):
        self.tensors.close()
        if self.error is not None:
            raise self.error
        model._weight_conversions = [entry for entry in model._weight_conversions if not isinstance(entry, AnyTensor)]
        del model.is_quantized
        _point_offloaded_ties_at_decoded_weights(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def _sharded(self, what: str) -> str:
        return f"{what} shards weights while it loads them, which these cannot be. {self.advice}"


class AnyTensor(WeightConverter):
    """For tensors that the model's own converters leave alone: decodes on the CPU, then moves (`force_cpu`).

    Transformers makes a deep copy for every tensor it loads, which costs more than many a tensor.
    """

    __slots__ = ()

    def __deepcopy__(self, memo) -> AnyTensor:
        other = copy(self)
        other.collected_tensors, other.layer_targets = defaultdict(list), defaultdict(set)
        return other


class Decode(ConversionOps):
    """Payloads to tensors of type `dtype`. A failure is kept for the end of loading, where it can be raised as it is."""

    def __init__(
        self, quantizer: DecodingQuantizer, dtype: torch.dtype | None = None, converter: WeightTransform | None = None
    ):
        self.quantizer = quantizer
        self.dtype = dtype
        self.converter = converter

    def __deepcopy__(self, memo) -> Decode:
        return Decode(self.quantizer, self.dtype, self.converter)

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **kwargs) -> dict[str, list[torch.Tensor]]:
        names: dict[str, list[str]] = {}
        decoded: dict[str, list[torch.Tensor]] = {}
        for pattern, tensors in input_dict.items():
            tensors = tensors if isinstance(tensors, list) else [tensors]
            names[pattern] = [payload_name(tensor) for tensor in tensors]
            decoded[full_layer_name if pattern == ANY_NAME else pattern] = [
                self._decode(tensor, name) for tensor, name in zip(tensors, names[pattern])
            ]
        self.quantizer.loaded(full_layer_name, names, self.converter)
        return decoded

    def _decode(self, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        if name is not None:
            try:
                tensor = self.quantizer.tensors.result(name).to_torch().to(tensor.device)
            except HfExtError as error:
                self.quantizer.error = self.quantizer.error or error
                return torch.empty(self.quantizer.source.entry(name).shape)
        return tensor.to(dtype=self.dtype)


def _point_offloaded_ties_at_decoded_weights(model: PreTrainedModel) -> None:
    """Transformers looks up an offloaded weight that is tied to another in the checkpoint's own file, where a payload stands
    instead of it; the other one's place is among the decoded weights."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    index = next((hook.weights_map.dataset.index for hook in hooks if getattr(hook, "weights_map", None) is not None), {})
    for target, source in model.all_tied_weights_keys.items():
        if source in index:
            index[target] = index[source]
