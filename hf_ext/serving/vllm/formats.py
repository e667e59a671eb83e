"""The quantization configs by which vLLM knows compressed checkpoints and merges.

The loaded weights are the original ones: plain, so that no layer is quantized, or quantized, as their own format says.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.model_loader import register_model_loader

from hf_ext.serving.vllm.loader import StoredModelLoader
from hf_ext.storage.config_file import EMR, FM_DELTA


class StoredFormat(QuantizationConfig):
    """A format whose weights are decoded while they are loaded."""

    method: str

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config
        # Payloads mean nothing to vLLM's default loader. This replaces it in processes that load such a checkpoint, and in no
        # others; vLLM logs it.
        register_model_loader("auto")(StoredModelLoader)

    def __reduce__(self) -> tuple:
        return type(self), (self.config,)  # so that vLLM's other processes replace their default loader as well

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Returns the format; that of the original weights if these are quantized."""
        stored = cls(config)
        if not (original := config.get("quantization")):
            return stored
        theirs = get_quantization_config(original.get("quant_method", "")).from_config(original)
        kind = type(theirs)
        # vLLM's other processes get it pickled, and must replace their default loader as well.
        theirs.__class__ = type(kind.__name__, (kind,), {"__reduce__": lambda self: (cls.from_config, (config,))})
        return theirs

    def get_name(self) -> str:
        return self.method

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


class FMDeltaFormat(StoredFormat):
    method = FM_DELTA


class EMRFormat(StoredFormat):
    method = EMR


FORMATS: dict[str, type[StoredFormat]] = {FM_DELTA: FMDeltaFormat, EMR: EMRFormat}
