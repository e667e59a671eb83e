"""What stands under `quantization_config` in the config.json of a merge."""

from __future__ import annotations

from hf_ext.emr.artifact import METHOD
from hf_ext.loading import DecodingConfig


class EMRConfig(DecodingConfig):
    """Tells `from_pretrained` that the folder holds several fine-tunes of one base model (EMR-Merging).

    Args:
        task: the task to load, if not the first: `from_pretrained(folder, quantization_config=EMRConfig(task="sst2"))`.
        base: folder or Hub id of the base model.
        revision: the base's commit on the Hub; None for a folder.
        dtype: torch's name of the weights' float type, for `dtype="auto"`.
        tasks: the names of all tasks.
    """

    quant_method = METHOD

    def __init__(
        self,
        task: str | None = None,
        base: str | None = None,
        revision: str | None = None,
        dtype: str | None = None,
        tasks: list[str] | None = None,
        **kwargs,
    ):
        super().__init__(base, revision, dtype, **kwargs)
        self.task = task
        self.tasks = tasks

    def get_loading_attributes(self) -> dict[str, str]:
        """What a config passed to `from_pretrained` adds to that of the checkpoint."""
        return {"task": self.task} if self.task else {}
