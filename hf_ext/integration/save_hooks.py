"""Replacements for `save_pretrained` and `push_to_hub` on one model, which save it in another form."""

from __future__ import annotations

import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi
from transformers import PreTrainedModel

from hf_ext.integration.cards import CARD, add_tags

HUB_OPTIONS = ("repo_id", "private", "revision", "commit_message", "commit_description", "create_pr")


def is_diffusers_model(model: object) -> bool:
    """Checks whether a model is one of diffusers, without importing that."""
    return (diffusers := sys.modules.get("diffusers")) is not None and isinstance(model, diffusers.ModelMixin)


class Saving(ABC):
    """Replaces `save_pretrained` of one model, with the same signature. A plain object, so that copies and pickles of the model
    keep it."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        # A pipeline of diffusers passes only options that it finds here.
        self.__signature__ = inspect.signature(type(model).save_pretrained)

    def __call__(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs |= {"is_main_process": is_main_process, "state_dict": state_dict}
        is_saved_here = (
            is_main_process if is_diffusers_model(self.model) else self.model.should_save_on_this_rank(is_main_process)
        )
        if not is_saved_here:
            # This process only helps to gather the weights.
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
        """Saves the model as its class does."""
        type(self.model).save_pretrained(self.model, folder, **kwargs)

    def push(
        self, folder: Path, names: list[str], repo_id: str | None = None, tags: Iterable[str] = (), **options: Any
    ) -> CommitInfo:
        """Uploads the files of this save, as `save_pretrained(push_to_hub=True)` does, once all exist. The options are those of
        `upload`."""
        tags = [*(getattr(self.model, "model_tags", None) or []), *tags]
        if tags and CARD in names:
            add_tags(folder, tags)
        options.setdefault("commit_message", "Upload model")
        return upload(folder, repo_id or folder.name, allow_patterns=[*names, CARD], **options)


def upload(
    folder: Path,
    repo_id: str,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    **options: Any,
) -> CommitInfo:
    """Uploads a folder to a repository on the Hub, which is created if it does not exist. A card that is in it stays. The
    options are further arguments of `HfApi.upload_folder`."""
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    ignored = [CARD] if api.file_exists(repo_id, CARD, revision=revision) else None
    options |= {"repo_id": repo_id, "revision": revision, "create_pr": create_pr, "ignore_patterns": ignored}
    return api.upload_folder(folder_path=folder, **options)


class PushToHub:
    """Replaces `push_to_hub` of a model whose `save_pretrained` is a `Saving`. The class's method would replace its card."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __call__(
        self, repo_id: str, *, max_shard_size: int | str | None = "50GB", tags: str | list[str] | None = None, **options: Any
    ) -> CommitInfo:
        with TemporaryDirectory() as place:
            folder = Path(place)
            self.model.save_pretrained(folder, max_shard_size=max_shard_size)
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            options = {key: value for key, value in options.items() if value is not None}
            tags = [tags] if isinstance(tags, str) else tags or []
            return self.model.save_pretrained.push(folder, names, repo_id=repo_id, tags=tags, **options)
