"""What stands under `quantization_config` in the config.json of a compressed checkpoint."""

from hf_ext.integration.quantizer import DecodingConfig
from hf_ext.storage.delta.folder import METHOD


class FMDeltaConfig(DecodingConfig):
    """Tells `from_pretrained` that the weights are differences from a base model. It takes what `DecodingConfig` takes."""

    quant_method = METHOD
