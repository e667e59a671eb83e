"""The Hub for all commands: the access token, and the repository that a result is uploaded to."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import mkdtemp

from hf_ext.errors import HfExtError

TOKEN = "HF_TOKEN"


@contextlib.contextmanager
def signed_in(token: str | None) -> Iterator[None]:
    """Uses an access token for all requests to the Hub in the block, those of other libraries and child processes included."""
    before = os.environ.get(TOKEN)
    if token:
        os.environ[TOKEN] = token
    try:
        yield
    finally:
        if token:
            os.environ.pop(TOKEN)
            if before is not None:
                os.environ[TOKEN] = before


def create_repository(repo_id: str, private: bool = False) -> str:
    """Creates a model repository if it does not exist. Returns its id, with the user's name if `repo_id` has none.

    Raises:
        HfExtError: the user cannot create it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    from hf_ext.storage.hub import first_line

    try:
        return HfApi().create_repo(repo_id, private=private or None, exist_ok=True).repo_id
    except (HTTPError, ValueError, OSError) as error:  # invalid names are ValueErrors
        raise HfExtError(f"The repository {repo_id} cannot be written, so nothing was done: {first_line(error)}") from error


def require_shared(base: str | None, base_id: str | None = None) -> None:
    """Checks that others can read the base of a model that is to be uploaded.

    Args:
        base_id: Hub id that is recorded for a local base.

    Raises:
        HfExtError: it is a folder of this machine.
    """
    if base and (os.path.isabs(base) or os.path.isdir(base)) and not base_id:
        raise HfExtError(
            f"Others cannot read the base {base}. Give the base by its Hub id; `hf-ext compress` also takes it as --base-id."
        )


def upload(folder: str | Path, repo_id: str, ignored: Iterable[str] = ()) -> None:
    """Uploads a folder to an existing model repository. A generated card never replaces a user's card there.

    Args:
        ignored: patterns of files to leave out.

    Raises:
        HfExtError: the base is a folder of this machine, or the upload fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    from hf_ext.integration.card_marks import CARD, is_ours
    from hf_ext.integration.model_cards import may_be_pushed
    from hf_ext.storage.config_file import storage_settings
    from hf_ext.storage.hub import first_line

    try:
        require_shared(storage_settings(Path(folder)).get("base"))
        keep = is_ours(Path(folder, CARD)) and not may_be_pushed(Path(folder), repo_id)
        patterns = [*ignored, *([CARD] if keep else [])]
        HfApi().upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=patterns)
    except (HfExtError, HTTPError, ValueError, OSError) as error:  # invalid cards are ValueErrors
        raise HfExtError(f"{folder} is written, but its upload to {repo_id} failed: {first_line(error)}") from error


class Destination:
    """The place of a command's result: a folder, a model repository on the Hub, or both. `str()` gives the folder.

    Args:
        out: the folder. Without it, the result is written to a temporary one, which stays if the upload fails.
        repo_id: the repository.
        private: create the repository as a private one.
    """

    def __init__(self, out: str | None, repo_id: str | None = None, private: bool = False):
        self.out, self.repo_id, self.private = out, repo_id, private
        self._folder, self._ignored = out, list[str]()

    def folder(self, ignored: Iterable[str] = ()) -> str:
        """Returns the folder to write. Creates the repository, so that a mistake in its name is found before any work.

        Args:
            ignored: patterns of files not to upload.
        """
        self._ignored = [*ignored]
        if self.repo_id:
            self.repo_id = create_repository(self.repo_id, self.private)
        self._folder = self._folder or mkdtemp(prefix="hf-ext-")
        return self._folder

    def upload(self) -> bool:
        """Uploads the folder, if there is a repository and the command has written the folder."""
        if not (self.repo_id and self._folder):
            return False
        upload(self._folder, self.repo_id, self._ignored)
        self.discard()
        return True

    def discard(self) -> None:
        """Deletes a temporary folder."""
        if self.out is None and self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __str__(self) -> str:
        return self.out or ""
