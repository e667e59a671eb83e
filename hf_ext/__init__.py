"""hf_ext: methods for fine-tuning, merging, shipping and serving models, as a plugin for Transformers and PEFT."""

import hf_ext.requirements  # noqa: F401, I001
import hf_ext.quiet_imports  # noqa: F401
from hf_ext import emr, fm_delta, pissa, trans_lora, uni_med
from hf_ext.emr import EMRConfig
from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError, HfExtError, ServerError, UnsavedChangesError
from hf_ext.fm_delta import FMDeltaConfig
from hf_ext.pissa import PissaConfig, QPissaConfig
from hf_ext.registration import register
from hf_ext.trans_lora.config import TransLoraConfig
from hf_ext.trans_lora.trainer import TransLoraTrainer
from hf_ext.uni_med.configuration_uni_med import UniMedConfig
from hf_ext.uni_med.modeling_uni_med import UniMedForConditionalGeneration
from hf_ext.uni_med.processing_uni_med import UniMedProcessor

__version__ = "0.1.0"

__all__ = [
    "BaseModelError",
    "CheckpointError",
    "CorruptFileError",
    "EMRConfig",
    "FMDeltaConfig",
    "HfExtError",
    "PissaConfig",
    "QPissaConfig",
    "ServerError",
    "TransLoraConfig",
    "TransLoraTrainer",
    "UniMedConfig",
    "UniMedForConditionalGeneration",
    "UniMedProcessor",
    "UnsavedChangesError",
    "emr",
    "fm_delta",
    "pissa",
    "trans_lora",
    "uni_med",
]

register()
