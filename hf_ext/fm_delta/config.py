"""The `quantization_config` in the config.json of a compressed checkpoint."""

from hf_ext.integration.loading.quantizer import DecodingConfig
from hf_ext.storage.config_file import FM_DELTA


class FMDeltaConfig(DecodingConfig):
    """The configuration by which `from_pretrained` recognizes compressed weights. See `DecodingConfig` for its arguments."""

    quant_method = FM_DELTA
