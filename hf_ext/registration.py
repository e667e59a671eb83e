"""The only module that writes into other libraries' registries. It adds entries and replaces nothing."""

from __future__ import annotations

from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import register_peft_method
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    Blip2VisionConfig,
    Blip2VisionModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING
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
from hf_ext.pissa.config import QPissaConfig
from hf_ext.pissa.model import QPissaModel
from hf_ext.uni_med.configuration_uni_med import UniMedConfig
from hf_ext.uni_med.modeling_uni_med import UniMedForConditionalGeneration
from hf_ext.uni_med.processing_uni_med import UniMedProcessor


def register() -> None:
    """Makes Transformers and PEFT know the methods of this package. Calling it again does nothing."""
    ENCODINGS[KEY] = ENCODING
    for config, quantizer in ((FMDeltaConfig, FMDeltaQuantizer), (EMRConfig, EMRQuantizer)):
        method = config.quant_method
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(method)(config)
        if method not in AUTO_QUANTIZER_MAPPING:
            register_quantizer(method)(quantizer)
    if "QPISSA" not in PeftType.__members__:
        _add_peft_type("QPISSA")
    if PeftType("QPISSA") not in PEFT_TYPE_TO_TUNER_MAPPING:
        register_peft_method(name="qpissa", config_cls=QPissaConfig, model_cls=QPissaModel, prefix="lora_")
    if UniMedConfig.model_type not in CONFIG_MAPPING:
        if Blip2VisionConfig not in MODEL_MAPPING:  # the tower of the paper, which Transformers has only inside BLIP-2
            AutoModel.register(Blip2VisionConfig, Blip2VisionModel, exist_ok=True)
        AutoConfig.register(UniMedConfig.model_type, UniMedConfig)
        AutoModelForImageTextToText.register(UniMedConfig, UniMedForConditionalGeneration)
        AutoProcessor.register(UniMedConfig, UniMedProcessor)


def _add_peft_type(name: str) -> None:
    """PEFT registers methods only under members of its enumeration, and looks them up by member."""
    member = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    PeftType._member_map_[name] = PeftType._value2member_map_[name] = member
    PeftType._member_names_.append(name)
    type.__setattr__(PeftType, name, member)
