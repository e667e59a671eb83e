"""Places that steps are published to: folders, repositories and buckets on the Hub, or any object with the same two methods."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Protocol

import numpy as np
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from hf_ext.errors import CheckpointError
from hf_ext.storage.files import flush, write_atomically
from hf_ext.storage.mapped import MappedFile

HUB, BUCKETS = "hf://", "hf://buckets/"

Buffer = bytes | memoryview | mmap | np.ndarray


class Place(Protocol):
    """Files by name, as a `Publisher` writes and a `Subscriber` reads them."""

    def put(self, files: Mapping[str, bytes], remove: Collection[str] = ()) -> None:
        """Stores files in the order given, each whole or not at all, replacing those of the same names; then removes others.

        An index is the last file of its call. It names files of this call and of earlier ones.
        """

    def get(self, name: str) -> Buffer:
        """Returns a file's content: bytes, or a mapped file.

        Raises:
            FileNotFoundError: there is no file of this name.
        """


class Folder:
    """A folder on a local disk or on a network file system."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def put(self, files: Mapping[str, bytes], remove: Collection[str] = ()) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(self.path / name, partial(Path.write_bytes, data=content))
        flush(self.path)
        for name in remove:
            (self.path / name).unlink(missing_ok=True)

    def get(self, name: str) -> Buffer:
        path = self.path / name
        return MappedFile(path).data if path.stat().st_size else b""  # takes no descriptor: ranks and steps make many files


class Repository:
    """A model repository on the Hub, in whose main branch every step is a commit. It is created when it does not exist."""

    def __init__(self, repo_id: str):
        self.repo_id = repo_id
        self._api = HfApi()

    def __str__(self) -> str:
        return HUB + self.repo_id

    def put(self, files: Mapping[str, bytes], remove: Collection[str] = ()) -> None:
        added = [CommitOperationAdd(name, content) for name, content in files.items()]
        removed = [CommitOperationDelete(name) for name in remove]
        message = f"Publish {next(iter(files))}"
        commit = partial(self._api.create_commit, self.repo_id, [*added, *removed], commit_message=message)
        with _access(self):
            try:
                commit()
            except RepositoryNotFoundError:
                self._api.create_repo(self.repo_id, exist_ok=True)
                commit()

    def get(self, name: str) -> Buffer:
        with _downloading(self) as folder:  # the cache would keep every step
            try:
                self._api.hf_hub_download(self.repo_id, name, local_dir=folder)
            except (RemoteEntryNotFoundError, RepositoryNotFoundError) as error:
                raise FileNotFoundError(f"{self} has no file {name}") from error
            return Folder(folder).get(name)


class Bucket:
    """A bucket on the Hub, which keeps no history of removed files. Create it first: `hf buckets create NAME`."""

    def __init__(self, bucket_id: str):
        self.bucket_id = bucket_id
        self._api = HfApi()

    def __str__(self) -> str:
        return BUCKETS + self.bucket_id

    def put(self, files: Mapping[str, bytes], remove: Collection[str] = ()) -> None:
        *contents, index = [(content, name) for name, content in files.items()]
        with _access(self):
            if contents:
                self._api.batch_bucket_files(self.bucket_id, add=[*contents])
            self._api.batch_bucket_files(self.bucket_id, add=[index], delete=list(remove))

    def get(self, name: str) -> Buffer:
        with _downloading(self) as folder:
            try:
                self._api.download_bucket_files(self.bucket_id, [(name, Path(folder, name))], raise_on_missing_files=True)
            except EntryNotFoundError as error:
                raise FileNotFoundError(f"{self} has no file {name}") from error
            return Folder(folder).get(name)


def open_place(place: str | os.PathLike | Place) -> Place:
    """Returns a place for a folder's path, `hf://owner/name`, or `hf://buckets/owner/name`; any other object as it is."""
    if isinstance(place, str) and "://" in place:
        kind = BUCKETS if place.startswith(BUCKETS) else HUB
        name = place.removeprefix(kind).rstrip("/")
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise CheckpointError(
                f"'{place}' is not a place: give a folder, {HUB}owner/name or {BUCKETS}owner/name."
            ) from error
        return Bucket(name) if kind == BUCKETS else Repository(name)
    return Folder(place) if isinstance(place, str | os.PathLike) else place


@contextmanager
def _access(place: Place) -> Iterator[None]:
    """Raises OSError if the Hub cannot be reached or refuses. Its client raises errors of other kinds, and one that is a
    FileNotFoundError, which would say that nothing is published."""
    try:
        yield
    except (HTTPError, LocalEntryNotFoundError) as error:
        raise OSError(f"Access to {place} failed: {error}") from error


@contextmanager
def _downloading(place: Place) -> Iterator[str]:
    """Yields a folder to download a file to. Mapped, the file outlives its name."""
    with _access(place), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield folder
