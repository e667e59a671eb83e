"""FM-Delta: a fine-tuned checkpoint stored as its lossless difference from the base model (NeurIPS 2024)."""

from hf_ext.fm_delta.compress import compress_checkpoint, decompress_checkpoint, verify
from hf_ext.fm_delta.config import FMDeltaConfig
from hf_ext.fm_delta.report import inspect
from hf_ext.fm_delta.saving import disable, enable

__all__ = ["FMDeltaConfig", "compress_checkpoint", "decompress_checkpoint", "disable", "enable", "inspect", "verify"]
