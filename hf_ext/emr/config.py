"""The `quantization_config` in the config.json of a merge."""

from __future__ import annotations

from hf_ext.integration.loading.quantizer import DecodingConfig
from hf_ext.storage.config_file import EMR


class EMRConfig(DecodingConfig):
    """The configuration by which `from_pretrained` recognizes a merge of several fine-tunes.

    Args:
        base, revision, dtype: as for `DecodingConfig`.
        tasks: the names of all tasks. The first one loads.
        digests: by task, the checksum of its file's header.
        task: the only entry in the folder of a task, besides the type: the task to load, of the merge one folder up.
    """

    quant_method = EMR

    def __init__(
        self,
        base: str | None = None,
        revision: str | None = None,
        dtype: str | None = None,
        tasks: list[str] | None = None,
        digests: dict[str, str] | None = None,
        task: str | None = None,
        **kwargs,
    ):
        super().__init__(base, revision, dtype, **kwargs)
        self.tasks, self.digests, self.task = tasks, digests, task
