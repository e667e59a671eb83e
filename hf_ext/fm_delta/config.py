"""What stands under `quantization_config` in the config.json of a compressed checkpoint."""

from __future__ import annotations

from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_ext.fm_delta.compress import METHOD


class FMDeltaConfig(QuantizationConfigMixin):
    """Tells `from_pretrained` that the weights are differences from a base model.

    Args:
        base: folder or Hub id of the base model.
        revision: the base's commit on the Hub; None for a folder.
        dtype: torch's name of the weights' float type, for `dtype="auto"`.
    """

    #: The loaded model is an ordinary one: Transformers drops the quantizer once the weights are in.
    dequantize = True

    def __init__(self, base: str, revision: str | None = None, dtype: str | None = None, **kwargs):
        kwargs.pop("quant_method", None)
        self.quant_method = METHOD
        self.base = base
        self.revision = revision
        self.dtype = dtype
        for key, value in kwargs.items():  # of a later version; kept when the config is saved again
            setattr(self, key, value)
