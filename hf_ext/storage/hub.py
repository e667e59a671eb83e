"""Access to the Hub: settings, downloads, and errors that name the repository."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from hf_ext.errors import BaseModelError


class Hub(NamedTuple):
    """Hub access settings.

    Attributes:
        token: replaces the saved one (`hf auth login`) and that of HF_TOKEN.
        cache_dir: folder of downloads.
        local_files_only: use what was downloaded before and send no requests.
    """

    token: str | bool | None = None
    cache_dir: str | os.PathLike | None = None
    local_files_only: bool = False

    def download(self, name: str, file: str, revision: str | None) -> Path:
        """Returns a file of a repository, from the cache if it is there. Raises the errors of `huggingface_hub`."""
        return Path(hf_hub_download(name, file, revision=revision, **self._asdict()))


HUB = Hub()  # settings of the environment


@contextlib.contextmanager
def reaching(name: str, revision: str | None) -> Iterator[None]:
    """Turns errors of `huggingface_hub` in the block into a BaseModelError that names the repository."""
    try:
        yield
    except (HFValidationError, RepositoryNotFoundError, EntryNotFoundError) as error:
        private = isinstance(error, RepositoryNotFoundError)
        advice = " If it is private, sign in with `hf auth login` or set HF_TOKEN." if private else ""
        raise BaseModelError(
            f"'{name}' is neither a folder nor a Hub repository with safetensors weights that can be reached "
            f"(revision {revision or 'main'}): {first_line(error)}{advice}"
        ) from error
    except (HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise BaseModelError(f"'{name}' could not be downloaded: {first_line(error)}") from error


def is_local(name: str | os.PathLike) -> bool:
    """Returns whether a name stands for a path, existing or not, rather than for a repository on the Hub."""
    name = os.fspath(name)
    return os.path.exists(name) or name.startswith((".", "/", "~"))


def absolute(name: str | os.PathLike) -> str:
    """Returns a folder's absolute path, which stays valid in any working directory; a Hub id as it is."""
    return os.path.abspath(name) if os.path.isdir(name) else os.fspath(name)


def snapshot_of(folder: Path) -> Path | None:
    """Returns the snapshot of a repository in the Hub's cache that a folder is, or lies in; None if it does not."""
    return next((path for path in (folder, *folder.parents) if path.match("models--*/snapshots/*")), None)


def first_line(error: Exception) -> str:
    """Returns an error's first line; huggingface_hub writes several."""
    return str(error).strip().split("\n")[0]
