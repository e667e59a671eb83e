"""The `save_pretrained` of a model that was loaded from a merge."""

from __future__ import annotations

import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger

from hf_ext.emr.layout import files_of, older_files, task_folder
from hf_ext.emr.switching import SetTask
from hf_ext.errors import CheckpointError
from hf_ext.integration.cards import CARD, has_card
from hf_ext.integration.save_hooks import Saving
from hf_ext.storage.config_file import is_merge
from hf_ext.storage.files import require_another_folder, staged_folder
from hf_ext.storage.hub import absolute, name_from
from hf_ext.storage.open import record_base

logger = get_logger(__name__)

SET_BY_RUNNING = ("architectures", "dtype", "problem_type", "transformers_version", "use_cache")


class MergedSaving(Saving):
    """Writes the whole merge again. If weights were changed, writes the model as it is, as a plain checkpoint. If the model has
    an adapter, Transformers writes the adapter alone."""

    def save(self, folder: Path, **kwargs: Any) -> list[str]:
        switch: SetTask = self.model.set_task
        task = self.model.active_task
        require_another_folder(folder, switch.merged.base.paths)
        changed = "the state dict given" if kwargs.get("state_dict") is not None else switch.changed()
        adapter = getattr(self.model, "_hf_peft_config_loaded", False)
        of_tasks = [switch.merged.folder / task_folder(name) for name in self.model.tasks]
        of_merge = [*of_tasks, switch.merged.folder] if adapter or changed else of_tasks
        if folder.is_dir() and any(folder.samefile(path) for path in of_merge if path.is_dir()):
            raise CheckpointError(
                f"{folder} belongs to the merge: saving there would replace its files. Save to another folder."
            )
        if adapter or changed:
            if adapter:
                logger.warning(
                    f"{folder} becomes the folder of an adapter; weights of the model itself are not saved. The adapter is one "
                    f"of task '{task}' of the merge {switch.merged.folder}. To load it without the merge, write that task "
                    f"(hf-ext extract {switch.merged.folder} --task {task} --out PLAIN) and load the adapter onto it."
                )
            else:
                logger.warning(
                    f"The weights were changed since task '{task}' was loaded ({changed}): {folder} becomes a plain checkpoint "
                    "of this one model. To add it to the merge, call hf_ext.emr.add_task."
                )
            with staged_folder(folder) as stage:
                self.plain_save(stage, **kwargs)
                return [path.relative_to(stage).as_posix() for path in sorted(stage.rglob("*")) if path.is_file()]
        files = files_of(switch.merged.folder, switch.merged.reopened().files)
        if (switch.merged.folder / CARD).is_file() and not has_card(folder):
            files.append(Path(CARD))
        if edited := _edited(self.model):
            logger.warning(
                f"Changes of {', '.join(edited)} in the configuration are not saved: each task of a merge keeps its own "
                "configuration. To save the changes, extract the task (hf_ext.emr.extract) and save it alone."
            )
        if variant := kwargs.get("variant"):
            logger.warning(f"variant={variant!r} has no effect: the files of a merge keep their names.")
        with staged_folder(folder, older_files(folder)) as stage:
            for path in files:
                (stage / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(switch.merged.folder / path, stage / path)
            if not (folder.is_dir() and folder.samefile(switch.merged.folder)):
                base = switch.merged.base  # the copied path may be relative to the folder of the merge
                record_base(stage, name_from(folder, absolute(base.name)), base.revision)
        return [path.as_posix() for path in files]

    def push(self, folder: Path, names: list[str], *args: Any, **options: Any) -> CommitInfo:
        base = self.model.set_task.merged.base.name
        if is_merge(folder) and os.path.isdir(base):
            logger.warning(
                f"The base {base} is a local folder: others cannot load the pushed merge. Merge again, with the base's Hub id."
            )
        return super().push(folder, names, *args, **options)


def _edited(model: PreTrainedModel) -> list[str]:
    """Returns the settings of the configuration that a user changed since the active task became active."""
    config = model.set_task.merged.task_config(model.active_task)
    stored = type(model.config).from_dict(deepcopy(config))
    keys = [key for key in config if key not in SET_BY_RUNNING]
    return [key for key in keys if getattr(model.config, key, None) != getattr(stored, key, None)]
