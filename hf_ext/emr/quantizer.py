"""Loading a merge with `from_pretrained`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedModel

from hf_ext.emr.config import EMRConfig
from hf_ext.emr.folder import MergeFolder, open_merge
from hf_ext.emr.generation import Generate
from hf_ext.emr.layout import name_of_task
from hf_ext.emr.saving import MergedSaving
from hf_ext.emr.switching import SetTask
from hf_ext.errors import CheckpointError
from hf_ext.integration import compat
from hf_ext.integration.in_place import untie
from hf_ext.integration.loading.quantizer import DecodingQuantizer
from hf_ext.integration.save_hooks import PushToHub
from hf_ext.storage.delta.device_decode import read_on
from hf_ext.storage.safetensors_file import Entry, RawTensor
from hf_ext.storage.source import TensorSource

if TYPE_CHECKING:
    import torch

    from hf_ext.integration.loading.weight_plan import Loaded


class EMRQuantizer(DecodingQuantizer):
    """Loads a task of a merge, the first one by default, and adds the methods that switch to the others."""

    quantization_config: EMRConfig
    plain = "This checkpoint is not a merge. Load it without an EMRConfig."
    advice = "Write the task as a plain checkpoint first: `hf-ext extract`."

    def __init__(self, quantization_config: EMRConfig, **kwargs):
        if quantization_config.requested is not None:
            raise CheckpointError(f"A merge cannot be quantized while it loads. {self.advice}")
        super().__init__(quantization_config, **kwargs)
        self.plan: list[Loaded] = []

    def open(self, model: PreTrainedModel, files: list[Path]) -> TensorSource:
        settings, hub = self.quantization_config, compat.hub_settings(PreTrainedModel)
        folder = files[0].parent if settings.task is None else Path(os.path.realpath(files[0].parent))
        self.merged = open_merge(folder, settings.base, settings.revision, hub)
        self.task = settings.task or self.merged.tasks[0]
        self.merged.require_task(self.task)
        return _OneTask(self.merged, self.task)

    def loaded(self, target: str, names: dict[str, list[str]], converter: Any) -> None:
        from hf_ext.integration.loading.weight_plan import Loaded

        self.plan.append(Loaded.of(target, names, converter))

    def _process_model_after_weight_loading(self, model, **kwargs):
        super()._process_model_after_weight_loading(model, **kwargs)
        if self.source is None:
            return model
        if self.decoding is None:  # the plain way, which calls `loaded` for nothing
            with contextlib.suppress(*compat.HOST_CHANGED):
                from hf_ext.integration.loading.weight_plan import plan_of

                self.plan = plan_of(model, self.source.names())[0]
        untie(model, self.plan)
        model.tasks = list(self.merged.tasks)
        model.active_task = self.task
        model.name_or_path = name_of_task(model.name_or_path, self.merged.folder, self.task, model.tasks)
        model.set_task = SetTask(model, self.merged, self.plan)
        model.save_pretrained = MergedSaving(model)
        if model.can_generate():
            model.generate = Generate(model)
        model.push_to_hub = PushToHub(model)
        return model


class _OneTask(TensorSource):
    """A task's tensors. Each tensor that it lacks comes from the first task that has it."""

    def __init__(self, merged: MergeFolder, task: str):
        self.name, self.digest = str(merged.folder), repr([task, *(file.record for file in merged.files.values())])
        self.merged = merged
        self.holder: dict[str, str] = {}
        for other in (*reversed(merged.tasks), task):
            file = merged.files[other]
            self.holder |= dict.fromkeys([*file.names(), *file.record.ties], other)

    def names(self) -> list[str]:
        return self.merged.elected.names()

    def entry(self, name: str) -> Entry:
        return self.merged.entry(self.holder[name], name)

    def read(self, name: str, out: np.ndarray | None = None) -> RawTensor:
        return self.merged.tensor(self.holder[name], name)

    def read_on(self, names: Sequence[str], device: torch.device) -> list[torch.Tensor]:
        return read_on(self, names, lambda name: self.merged.coded(self.holder[name], name), self.merged.base, device)
