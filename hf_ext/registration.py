"""The only module that writes into other libraries' registries. It adds entries and replaces nothing."""

from __future__ import annotations

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from hf_ext.checkpoint import ENCODINGS
from hf_ext.emr.config import EMRConfig
from hf_ext.emr.quantizer import EMRQuantizer
from hf_ext.fm_delta.compress import ENCODING
from hf_ext.fm_delta.config import FMDeltaConfig
from hf_ext.fm_delta.format import KEY
from hf_ext.fm_delta.quantizer import FMDeltaQuantizer


def register() -> None:
    """Makes Transformers know the methods of this package. Calling it again does nothing."""
    ENCODINGS[KEY] = ENCODING
    for config, quantizer in ((FMDeltaConfig, FMDeltaQuantizer), (EMRConfig, EMRQuantizer)):
        method = config.quant_method
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(method)(config)
        if method not in AUTO_QUANTIZER_MAPPING:
            register_quantizer(method)(quantizer)
