"""What stands under `quantization_config` in the config.json of a merge."""

from __future__ import annotations

from hf_ext.emr.folder import METHOD
from hf_ext.integration.quantizer import DecodingConfig


class EMRConfig(DecodingConfig):
    """Tells `from_pretrained` that the folder holds several fine-tunes of one base model (EMR-Merging).

    Args:
        base, revision, dtype: as for `DecodingConfig`.
        tasks: the names of all tasks; the first is the one that loads.
    """

    quant_method = METHOD

    def __init__(
        self,
        base: str,
        revision: str | None = None,
        dtype: str | None = None,
        tasks: list[str] | None = None,
        **kwargs,
    ):
        super().__init__(base, revision, dtype, **kwargs)
        self.tasks = tasks
