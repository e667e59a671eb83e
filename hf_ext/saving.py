"""Saving in another form through the calls people already make: what stands in for `save_pretrained` on one model."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import PreTrainedModel
from transformers.utils.hub import create_and_tag_model_card

HUB_OPTIONS = ("repo_id", "private", "revision", "commit_message", "commit_description", "create_pr")


class Saving(ABC):
    """An instance attribute `save_pretrained` of a model, of the class method's signature. It is a plain object, so that copies
    and pickles of the model carry it along."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __call__(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs |= {"is_main_process": is_main_process, "state_dict": state_dict}
        if not self.model.should_save_on_this_rank(is_main_process):
            # This process only takes part in gathering the weights.
            with TemporaryDirectory() as nowhere:
                self.plain_save(nowhere, **kwargs)
            return
        hub_options = {key: kwargs.pop(key) for key in HUB_OPTIONS if key in kwargs}
        names = self.save(Path(save_directory), **kwargs)
        if push_to_hub:
            self.push(Path(save_directory), names, token=kwargs.get("token"), **hub_options)

    @abstractmethod
    def save(self, folder: Path, **kwargs: Any) -> list[str]:
        """Writes the folder and returns what it wrote, as paths relative to it."""

    def plain_save(self, folder: str | os.PathLike, **kwargs: Any) -> None:
        """What the model's class does."""
        type(self.model).save_pretrained(self.model, folder, **kwargs)

    def push(
        self,
        folder: Path,
        names: list[str],
        token: str | bool | None = None,
        repo_id: str | None = None,
        private: bool | None = None,
        **options: Any,
    ) -> None:
        """Uploads what this save has written, as `save_pretrained(push_to_hub=True)` does, after all of it is in place."""
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id or folder.name, private=private, exist_ok=True).repo_id
        create_and_tag_model_card(repo_id, self.model.model_tags, token=token).save(folder / "README.md")
        options.setdefault("commit_message", "Upload model")
        api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=[*names, "README.md"], **options)
