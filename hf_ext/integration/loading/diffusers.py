"""Loading with diffusers: `quant_method` in a model's config.json makes it call a quantizer, and the one here decodes weights.

diffusers hands each file's tensors to the quantizer before it checks their shapes. The loaded model is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.quantizers.auto import DiffusersAutoQuantizer
from diffusers.quantizers.base import DiffusersQuantizer

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.integration import compat, versions
from hf_ext.integration.loading.quantizer import DecodingConfig, DecodingForAnother, are_plain
from hf_ext.storage.config_file import FM_DELTA
from hf_ext.storage.delta.source import payload_name
from hf_ext.storage.open import open_delta
from hf_ext.storage.prefetch import Prefetcher
from hf_ext.storage.source import TensorSource

HOOKS = ("maybe_update_loaded_keys", "maybe_update_state_dict")  # which diffusers calls from version 0.39 on


class Method(str):
    """The name of a quantization method, as a member of diffusers' enumeration has it."""

    @property
    def value(self) -> str:
        return str(self)


class CompressedConfig(DecodingConfig):
    """The `quantization_config` of a compressed diffusers model. See `DecodingConfig` for its arguments."""

    quant_method = Method(FM_DELTA)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any):
        """Reads the entry of a config.json. Raises CheckpointError if `from_pretrained` was called with a
        `quantization_config`, which diffusers would ignore."""
        if original := config_dict.get("quantization"):
            return compat.quantization_after_decoding(original, cls(**config_dict), DiffusersAutoQuantizer.from_dict)
        if (requested := compat.requested_quantization(DiffusersAutoQuantizer)) is not None:
            raise CheckpointError(
                f"diffusers cannot quantize this checkpoint as its {type(requested).__name__} says, because the weights are "
                "compressed. Run `hf-ext decompress` on it first, or leave quantization_config= out."
            )
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)


class CompressedQuantizer(DecodingForAnother, DiffusersQuantizer):
    """Decodes a compressed checkpoint while `from_pretrained` of a diffusers model loads it.

    Raises:
        BaseModelError: from `from_pretrained`, as the errors below: the base is missing, or is another model than the
            checkpoint was compressed against.
        CorruptFileError: a file is damaged, missing, from another save or from a newer version.
        CheckpointError: this version of diffusers does not call a quantizer where weights can be decoded.
    """

    quantization_config: CompressedConfig
    auto = DiffusersAutoQuantizer
    is_serializable = is_trainable = is_compileable = True
    use_keep_in_fp32_modules = True  # as without a quantizer
    source: TensorSource | None = None
    dtype: torch.dtype | None = None

    def decode_for(self, theirs: DiffusersQuantizer) -> None:
        hooks = {name: getattr(theirs, name) for name in ("validate_environment", *HOOKS, "postprocess_model")}

        def validate_environment(*args: Any, **kwargs: Any) -> None:
            self.validate_environment()
            hooks["validate_environment"](*args, **kwargs)

        def maybe_update_loaded_keys(loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
            self.maybe_update_loaded_keys(loaded_keys, checkpoint_files)
            return hooks["maybe_update_loaded_keys"](loaded_keys, checkpoint_files)

        def maybe_update_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
            return hooks["maybe_update_state_dict"](dict(self.maybe_update_state_dict(state_dict).items()))

        def postprocess_model(model: Any, **kwargs: Any) -> Any:
            for name in hooks:
                delattr(theirs, name)
            return theirs.postprocess_model(model, **kwargs)

        for hook in (validate_environment, maybe_update_loaded_keys, maybe_update_state_dict, postprocess_model):
            setattr(theirs, hook.__name__, hook)

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not (self.pre_quantized and all(hasattr(DiffusersQuantizer, hook) for hook in HOOKS)):
            raise CheckpointError(
                f"Loading this checkpoint requires diffusers>=0.39 (found {versions.installed('diffusers')}), or a newer "
                "hf_ext if diffusers has changed since. Or: run `hf-ext decompress` on the checkpoint first."
            )

    def update_torch_dtype(self, torch_dtype: torch.dtype) -> torch.dtype:
        self.dtype = torch_dtype
        return torch_dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        files, config = [Path(file) for file in checkpoint_files], self.quantization_config
        try:
            self.source = open_delta(files, config.base, config.revision, compat.hub_settings(ModelMixin))
        except CorruptFileError:
            if not are_plain(files):
                raise
            return loaded_keys
        types = {self.source.entry(name).dtype for name in self.source.names()}
        if self.dtype is not None and "F8_E4M3" in types:  # which diffusers does not cast if there is a quantizer
            raise CheckpointError("Weights in float8 cannot be cast while they are decoded. Load them without torch_dtype=.")
        return loaded_keys

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict if self.source is None else Decoded(state_dict, self.source)

    def _process_model_before_weight_loading(self, model: ModelMixin, **kwargs: Any) -> None:
        compat.forget_quantization(model)

    def _process_model_after_weight_loading(self, model: ModelMixin, **kwargs: Any) -> ModelMixin:
        self.source = None
        return model

    def _dequantize(self, model: ModelMixin) -> ModelMixin:
        return model

    def get_cuda_warm_up_factor(self) -> int:
        return 2  # as without a quantizer


class Decoded(dict[str, torch.Tensor]):
    """A state dict whose tensors are decoded when they are read, some ahead. The payloads are those of one file; the source
    decodes them by the names in them, as diffusers may have renamed the keys."""

    def __init__(self, payloads: dict[str, torch.Tensor], source: TensorSource):
        super().__init__(payloads)
        self._names = {key: payload_name(payload) for key, payload in payloads.items()}
        self._tensors = Prefetcher(source.read, {name: source.entry(name).nbytes for name in self._names.values()})

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._tensors.result(self._names[key]).to_torch()

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        return ((key, self[key]) for key in self)
