"""Work on tensors ahead of whoever asks for the results, on all cores and within bounded memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Generic, TypeVar

import torch
from transformers.utils.logging import tqdm

AHEAD = 256 * 1024 * 1024  # bytes of tensors worked on before they are asked for
CORES = os.cpu_count() or 1

_limit: ContextVar[int | None] = ContextVar("limit", default=None)  # of cores, where they are shared with other work

Result = TypeVar("Result")


class WorkAhead(Generic[Result]):
    """Runs `work(name)` on all cores before its result is asked for, while what is ahead stays below AHEAD bytes.

    Args:
        sizes: the bytes of each result, by name, in the order in which they will be asked for (in any other it is slower).
    """

    def __init__(self, work: Callable[[str], Result], sizes: dict[str, int]):
        self._work = work
        self._sizes = sizes
        self._coming = iter(sizes)
        self._pool = ThreadPoolExecutor(cores(), initializer=_start_thread, initargs=(_limit.get(),))
        self._running: dict[str, Future[Result]] = {}
        self._ahead = 0
        self._start()

    def result(self, name: str) -> Result:
        future = self._running.pop(name, None)
        if future is None:
            return self._work(name)
        result = future.result()
        self._ahead -= self._sizes[name]
        self._start()
        return result

    def __iter__(self) -> Iterator[tuple[str, Result]]:
        try:
            for name in self._sizes:
                yield name, self.result(name)
        finally:
            self.close()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(torch.get_num_threads())  # for the threads to come, which take the number that was set last

    def _start(self) -> None:
        while (self._ahead < AHEAD or not self._running) and (name := next(self._coming, None)) is not None:
            self._ahead += self._sizes[name]
            self._running[name] = self._pool.submit(self._work, name)


def _start_thread(limit: int | None) -> None:
    _limit.set(limit)
    torch.set_num_threads(1)  # of this thread: PyTorch's own would wait for each other on cores that are all at work


def threads_for(size: int) -> int:
    """A tensor that fills the room ahead is worked on by all cores together, others by one each."""
    return cores() if size > AHEAD // 16 else 1


def cores() -> int:
    """How many cores the work may take: all, or what `at_most_cores` leaves it."""
    return min(CORES, _limit.get() or CORES)


@contextlib.contextmanager
def at_most_cores(count: int) -> Iterator[None]:
    """Limits the cores that work started in the block takes, in this thread and in those that work for it."""
    token = _limit.set(count)
    try:
        yield
    finally:
        _limit.reset(token)


def progress(what: str, count: int | None) -> tqdm:
    """A bar that counts tensors; None if how many is not known."""
    return tqdm(total=count, desc=f"{what} tensors")
