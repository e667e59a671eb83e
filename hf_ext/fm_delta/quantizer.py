"""Loading a compressed checkpoint with `from_pretrained`."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from hf_ext.fm_delta.config import FMDeltaConfig
from hf_ext.integration import compat
from hf_ext.integration.loading.quantizer import DecodingQuantizer
from hf_ext.storage.delta.source import DeltaCheckpoint
from hf_ext.storage.open import open_delta


class FMDeltaQuantizer(DecodingQuantizer):
    """Decodes a compressed checkpoint while `from_pretrained` loads it. The loaded model is an ordinary one."""

    quantization_config: FMDeltaConfig
    plain = (
        "This checkpoint is plain: load it without an FMDeltaConfig. To compress it, call hf_ext.fm_delta.enable(model, base) "
        "and save the model."
    )
    advice = "Run `hf-ext decompress` on the checkpoint first."

    def open(self, model: PreTrainedModel, files: list[Path]) -> DeltaCheckpoint:
        settings, hub = self.quantization_config, compat.hub_settings(PreTrainedModel)
        return open_delta(files, settings.base, settings.revision, hub)
