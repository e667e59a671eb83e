"""FM-Delta: a fine-tuned checkpoint stored as its lossless difference from the base model (NeurIPS 2024)."""

from hf_ext.fm_delta.base_search import BaseReport, find_base
from hf_ext.fm_delta.batch import BatchReport, compress_all
from hf_ext.fm_delta.callback import CompressCheckpoints
from hf_ext.fm_delta.compress import compress_checkpoint, decompress_checkpoint, verify
from hf_ext.fm_delta.config import FMDeltaConfig
from hf_ext.fm_delta.report import inspect
from hf_ext.fm_delta.saving import disable, enable
from hf_ext.fm_delta.series import compress_series, inspect_series, remove_checkpoint
from hf_ext.fm_delta.switching import switch

__all__ = [
    "BaseReport",
    "BatchReport",
    "CompressCheckpoints",
    "FMDeltaConfig",
    "compress_all",
    "compress_checkpoint",
    "compress_series",
    "decompress_checkpoint",
    "disable",
    "enable",
    "find_base",
    "inspect",
    "inspect_series",
    "remove_checkpoint",
    "switch",
    "verify",
]
