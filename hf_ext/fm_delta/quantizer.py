"""Loading: Transformers meets payloads where it expects weights, and each is decoded when its turn comes.

Transformers calls a `HfQuantizer` by `quant_method` in config.json. This one puts an operation before those that the model
itself applies to its checkpoint (merging experts, splitting projections), so these see plain tensors.
"""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, dot_natural_key
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.quantizers.base import HfQuantizer

from hf_ext.errors import CheckpointError, HfExtError
from hf_ext.fm_delta.codec import is_payload, peek_header
from hf_ext.fm_delta.compress import WorkAhead, decode_tensor, matching_base
from hf_ext.fm_delta.config import FMDeltaConfig
from hf_ext.fm_delta.format import CompressedFile, check_shards

ANY_NAME = "^(.+)"


class FMDeltaQuantizer(HfQuantizer):
    """Decodes a compressed checkpoint while `from_pretrained` loads it; nothing of it stays on the model.

    Raises from `from_pretrained`:
        BaseModelError: the base is missing, or not the one the checkpoint was compressed against.
        CorruptFileError: a file is damaged, missing, from another save or from a newer version.
        CheckpointError: the weights are to be sharded while they load (tensor parallelism, ZeRO-3).
    """

    requires_calibration = False
    quantization_config: FMDeltaConfig

    def __init__(self, quantization_config: FMDeltaConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise CheckpointError(
                "FM-Delta is no way to load a plain checkpoint: to compress it, call hf_ext.fm_delta.enable(model, base) and "
                "save the model."
            )
        self.tensors: WorkAhead | None = None
        self.error: HfExtError | None = None

    def validate_environment(self, *args, **kwargs):
        if is_deepspeed_zero3_enabled():
            raise CheckpointError(_sharded("DeepSpeed ZeRO-3"))

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Asked for "auto" without a dtype in config.json, Transformers looks at the payloads' bytes.
        if dtype.is_floating_point or self.quantization_config.dtype is None:
            return dtype
        return getattr(torch, self.quantization_config.dtype)

    def _process_model_before_weight_loading(self, model, checkpoint_files: list[str] | None = None, **kwargs):
        if getattr(model.config, "distributed_config", None) is not None:
            raise CheckpointError(_sharded("Tensor parallelism"))
        # An error in the middle of loading would reach the user as a generic one, so whatever can be checked is checked here.
        files = [CompressedFile(path) for path in checkpoint_files or [] if Path(path).suffix == ".safetensors"]
        if not files:
            raise CheckpointError("A checkpoint compressed by FM-Delta is read from safetensors files, not from a state dict.")
        check_shards(files)
        settings = self.quantization_config
        base = matching_base(files[0].base, settings.base, settings.revision, files[0].path.parent)
        file_of = {name: file for file in files for name in file.headers}
        # Transformers loads in this order; decoding runs ahead of it.
        sizes = {name: file_of[name].size(name) for name in sorted(file_of, key=dot_natural_key)}
        self.tensors = WorkAhead(lambda name: decode_tensor(file_of[name], base, name), sizes)
        return model

    def update_weight_conversions(self, weight_conversions: list, model) -> list:
        return [*weight_conversions, AnyTensor([ANY_NAME], [r"\1"], [Decode(self)], force_cpu=True)]

    def get_new_dtype(self, converter, param, dtype: torch.dtype | None) -> None:
        """The type a tensor is to have is told to the operation that decodes it; the payload itself is not cast."""
        decode = Decode(self, dtype)
        if isinstance(converter, WeightConverter):
            others = [op for op in converter.operations if not isinstance(op, Decode)]
            converter.operations = [decode, *others]
            converter.force_cpu = True
        else:
            converter.quantization_operation = decode

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

    def __init__(self, quantizer: FMDeltaQuantizer, dtype: torch.dtype | None = None):
        self.quantizer = quantizer
        self.dtype = dtype

    def __deepcopy__(self, memo) -> Decode:
        return Decode(self.quantizer, self.dtype)

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **kwargs) -> dict[str, list[torch.Tensor]]:
        return {
            (full_layer_name if pattern == ANY_NAME else pattern): [self._decode(tensor) for tensor in _as_list(tensors)]
            for pattern, tensors in input_dict.items()
        }

    def _decode(self, payload: torch.Tensor) -> torch.Tensor:
        tensor = payload
        if is_payload(payload):
            header = peek_header(payload.reshape(-1).cpu().numpy())
            try:
                tensor = self.quantizer.tensors.result(header.name).to_torch().to(payload.device)
            except HfExtError as error:
                self.quantizer.error = self.quantizer.error or error
                return torch.empty(header.shape)
        return tensor.to(dtype=self.dtype)


def _point_offloaded_ties_at_decoded_weights(model: PreTrainedModel) -> None:
    """Transformers looks up an offloaded weight that is tied to another in the checkpoint's own file, where a payload stands
    instead of it; the other one's place is among the decoded weights."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    index = next((hook.weights_map.dataset.index for hook in hooks if getattr(hook, "weights_map", None) is not None), {})
    for target, source in model.all_tied_weights_keys.items():
        if source in index:
            index[target] = index[source]


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]


def _sharded(what: str) -> str:
    return (
        f"{what} shards weights while it loads them, which compressed ones cannot be. "
        "Run `hf-ext decompress` on the checkpoint first."
    )
