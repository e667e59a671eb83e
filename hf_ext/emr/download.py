"""Downloads a merge, or what a folder in the Hub's cache lacks of it."""

from __future__ import annotations

import os
from pathlib import Path

from hf_ext.emr.layout import task_folder
from hf_ext.emr.modulators import FILE
from hf_ext.errors import CheckpointError
from hf_ext.storage.config_file import CONFIG, storage_settings
from hf_ext.storage.hub import HUB, Hub, downloaded, first_line, repository_of, snapshot_of


def merge_folder(name: str | os.PathLike, hub: Hub = HUB) -> Path:
    """Returns the folder of a merge that is given as a folder or as a Hub id. In the Hub's cache, downloads the files of its
    tasks if they are not there: a loader downloads only those of the first. Raises CheckpointError if there is no such folder
    or repository, or a file of it could not be downloaded."""
    folder = downloaded(name, "The merge: ")
    tasks = storage_settings(folder).get("tasks")
    tasks = tasks if isinstance(tasks, list) else []  # anything else is refused when the merge is opened
    wanted = [folder / task_folder(str(task)) / file for task in tasks for file in (FILE, CONFIG)]
    snapshot = snapshot_of(folder)
    if snapshot is None or all(path.exists() for path in wanted):
        return folder
    from huggingface_hub import snapshot_download

    repository, failure, reason = repository_of(snapshot), None, ""
    try:
        snapshot_download(repository, revision=snapshot.name, **hub._replace(cache_dir=snapshot.parents[2])._asdict())
    except OSError as error:
        failure, reason = error, f": {first_line(error).rstrip('.')}"
    if lacking := [path for path in wanted if not path.exists()]:  # huggingface_hub 2 may return an incomplete snapshot
        raise CheckpointError(
            f"'{lacking[0].relative_to(folder)}' of the merge {repository} could not be downloaded{reason}. If the merge is "
            "private, give token=, sign in with `hf auth login`, or set HF_TOKEN."
        ) from failure
    return folder
