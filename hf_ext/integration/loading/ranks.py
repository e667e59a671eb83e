"""The processes of a distributed job that load one model together: the first of each node decodes for the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch.distributed as dist

from hf_ext.errors import CheckpointError, HfExtError

WAIT = timedelta(hours=2)  # for a process that decodes a large model


@contextmanager
def together() -> Iterator[Callable[[Callable[[], Any]], list[Any]]]:
    """Yields a function that runs an action in each process of the job, and returns the results of all, by rank. If the action
    fails in one process, the function raises in all of them: there its error, elsewhere a copy of it."""
    if not (dist.is_available() and dist.is_initialized()):
        yield lambda action: [action()]
        return
    group = dist.new_group(backend="gloo", timeout=WAIT)  # NCCL would exchange objects through the GPU

    def run(action: Callable[[], Any]) -> list[Any]:
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        sent = failure if isinstance(failure, HfExtError | None) else CheckpointError(f"{type(failure).__name__}: {failure}")
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, sent), group=group)
        if failure is not None:
            raise failure
        for number, (_, received) in enumerate(outcomes):
            if received is not None:
                received.add_note(f"Raised by the process of rank {number}.")
                raise received
        return [result for result, _ in outcomes]

    try:
        yield run
    finally:
        dist.destroy_process_group(group)


def rank() -> int:
    """Returns the rank of this process in its job."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def node() -> str:
    """Returns an id that is the same for processes which can open each other's files under /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


def links_to(files: Mapping[str, IO[bytes]]) -> TemporaryDirectory:
    """Returns a folder with links to open files, by name. The files themselves need no names."""
    folder = TemporaryDirectory(prefix="hf_ext-", ignore_cleanup_errors=True)
    for name, file in files.items():
        Path(folder.name, name).symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    return folder
