"""hf_ext: methods for fine-tuning, merging, shipping and serving models, as a plugin for Transformers and PEFT."""

from hf_ext import emr, fm_delta, pissa
from hf_ext.emr import EMRConfig
from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError, HfExtError, UnsavedChangesError
from hf_ext.fm_delta import FMDeltaConfig
from hf_ext.pissa import PissaConfig, QPissaConfig
from hf_ext.registration import register

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
    "UnsavedChangesError",
    "emr",
    "fm_delta",
    "pissa",
]

register()
