"""Loading a merge with `from_pretrained`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from hf_ext.emr.config import EMRConfig
from hf_ext.emr.folder import MergeFolder, task_folder
from hf_ext.emr.modulators import FILE
from hf_ext.emr.saving import MergedSaving
from hf_ext.emr.switching import Generate, SetTask
from hf_ext.errors import CheckpointError
from hf_ext.integration import compat
from hf_ext.integration.quantizer import DecodingQuantizer
from hf_ext.integration.save_hooks import PushToHub
from hf_ext.integration.weight_plan import Loaded
from hf_ext.storage.hub import Hub, first_line, snapshot_of
from hf_ext.storage.layout import CONFIG
from hf_ext.storage.safetensors_file import Entry, RawTensor
from hf_ext.storage.source import TensorSource


class EMRQuantizer(DecodingQuantizer):
    """Loads the first task of a merge, and adds the methods that switch to the others."""

    quantization_config: EMRConfig
    plain = "This checkpoint is not a merge. Load it without an EMRConfig."
    advice = "Write the task as a plain checkpoint first: `hf-ext extract`."

    def __init__(self, quantization_config: EMRConfig, **kwargs):
        if quantization_config.requested is not None:
            raise CheckpointError(f"A merge cannot be quantized while it loads. {self.advice}")
        super().__init__(quantization_config, **kwargs)
        self.plan: list[Loaded] = []

    def open(self, model: PreTrainedModel, files: list[Path]) -> TensorSource:
        settings, hub = self.quantization_config, compat.hub_settings()
        folder = _whole_folder(files[0].parent, settings.tasks, hub)
        self.merged = MergeFolder(folder, settings.base, settings.revision, hub)
        return _FirstTask(self.merged)

    def loaded(self, target: str, names: dict[str, list[str]], converter: WeightTransform) -> None:
        self.plan.append(Loaded.of(target, names, converter))

    def _process_model_after_weight_loading(self, model, **kwargs):
        super()._process_model_after_weight_loading(model, **kwargs)
        model.tasks = list(self.merged.tasks)
        model.active_task = self.merged.tasks[0]
        model.set_task = SetTask(model, self.merged, self.plan)
        model.save_pretrained = MergedSaving(model)
        if model.can_generate():
            model.generate = Generate(model)
        model.push_to_hub = PushToHub(model)
        return model


class _FirstTask(TensorSource):
    """The first task's tensors. Each tensor that it lacks comes from the first task that has it."""

    def __init__(self, merged: MergeFolder):
        self.name = str(merged.folder)
        self.merged = merged
        self.holder = {name: task for task in reversed(merged.tasks) for name in merged.files[task].names()}

    def names(self) -> list[str]:
        return self.merged.elected.names()

    def entry(self, name: str) -> Entry:
        return self.merged.entry(self.holder[name], name)

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        return self.merged.tensor(self.holder[name], name)


def _whole_folder(folder: Path, tasks: list[str] | None, hub: Hub) -> Path:
    """Returns the folder. In the Hub's cache, downloads the files of the tasks first, which Transformers did not download."""
    tasks = tasks if isinstance(tasks, list) else []  # anything else is refused when the merge is opened
    wanted = [folder / task_folder(str(task)) / name for task in tasks for name in (FILE, CONFIG)]
    snapshot = snapshot_of(folder)
    if snapshot is not None and not all(path.exists() for path in wanted):
        repository = snapshot.parents[1].name.removeprefix("models--").replace("--", "/")
        failure, reason = None, ""
        try:
            settings = hub._replace(cache_dir=snapshot.parents[2])._asdict()
            snapshot_download(repository, revision=snapshot.name, **settings)
        except OSError as error:
            failure, reason = error, f": {first_line(error).rstrip('.')}"
        if not all(path.exists() for path in wanted):  # huggingface_hub 2 may return an incomplete snapshot
            raise CheckpointError(
                f"The tasks of the merge {repository} could not be downloaded{reason}. If it is private, give token=, sign in "
                "with `hf auth login`, or set HF_TOKEN."
            ) from failure
    return folder
