"""Works on tensors before their results are requested, on all cores and within bounded memory."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import ContextVar
from threading import Event
from typing import TYPE_CHECKING, Generic, TypeVar

from hf_ext.storage.native import MissingExtension, _native
from hf_ext.storage.processors import available_cores

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

AHEAD = 256 * 1024 * 1024  # bytes of results that may wait for a reader
CORES = available_cores()

_limit: ContextVar[int | None] = ContextVar("limit", default=None)  # limits of cores for work that shares them
_closed: ContextVar[Event | None] = ContextVar("closed", default=None)  # set when nobody waits for this thread's result

Result = TypeVar("Result")


class Prefetcher(Generic[Result]):
    """A pool that runs `work(name)` on all cores before the result is requested, as long as waiting results stay below AHEAD
    bytes.

    Args:
        work: returns the result for a name; called from several threads.
        sizes: the bytes of each result, by name, in the order of the requests. Requests in another order are slower.
    """

    def __init__(self, work: Callable[[str], Result], sizes: dict[str, int]):
        self._work = work
        self._sizes = sizes
        self._coming = OrderedDict.fromkeys(sizes)  # in order, and without those that were requested earlier
        closed = Event()
        pool = ThreadPoolExecutor(cores(), initializer=_start_thread, initargs=(_limit.get(), closed))
        self._pool = pool
        self._close = weakref.finalize(self, _close, pool, closed, _torch_threads())  # also if its reader fails
        self._running: dict[str, Future[Result]] = {}
        self._ahead = 0
        self._start()

    def result(self, name: str) -> Result:
        """Returns the result for a name. Computes it in this thread if no other thread does."""
        future = self._running.pop(name, None)
        if future is None:
            self._coming.pop(name, None)
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
        """Stops working ahead. Running work ends at its next `check_awaited`."""
        self._close()
        self._pool.shutdown()

    def _start(self) -> None:
        while self._coming and (self._ahead < AHEAD or not self._running):
            name, _ = self._coming.popitem(last=False)
            self._ahead += self._sizes[name]
            self._running[name] = self._pool.submit(self._work, name)


def batches_of(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divides names into batches, in order, of at most so many bytes. One name may have more."""
    batches: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not batches or size > room:
            batches.append([])
            room = most
        batches[-1].append(name)
        room -= size
    return batches


class BatchPrefetcher(Generic[Result]):
    """A Prefetcher whose work takes several names at once.

    Args:
        work: returns the results for some names.
        sizes: as for Prefetcher.
        most: bytes of the results of a batch, unless one result has more.
    """

    def __init__(self, work: Callable[[list[str]], list[Result]], sizes: dict[str, int], most: int):
        batches = {names[0]: names for names in batches_of(sizes, most)}
        self._first_of = {name: first for first, names in batches.items() for name in names}
        bytes_of = {first: sum(sizes[name] for name in names) for first, names in batches.items()}
        self._batches = Prefetcher(lambda first: dict(zip(batches[first], work(batches[first]))), bytes_of)
        self._ready: dict[str, Result] = {}
        self.close = self._batches.close

    def result(self, name: str) -> Result:
        """Returns the result for a name."""
        if name not in self._ready:
            self._ready |= self._batches.result(self._first_of[name])
        return self._ready.pop(name)

    def __iter__(self) -> Iterator[tuple[str, Result]]:
        try:
            for name in self._first_of:
                yield name, self.result(name)
        finally:
            self.close()


def in_threads(work: Callable[[int], Result], count: int, threads: int) -> list[Result]:
    """Returns the results of `work` for 0, 1, … `count` - 1, computed in this many threads."""
    if threads < 2 or count < 2:
        return [work(i) for i in range(count)]
    before = _torch_threads()
    try:
        with ThreadPoolExecutor(min(threads, count), initializer=_start_thread, initargs=(_limit.get(), _closed.get())) as pool:
            return list(pool.map(work, range(count)))
    finally:
        _set_torch_threads(before)


def check_awaited() -> None:
    """Raises CancelledError if no thread waits for this thread's result. Long work calls it regularly; the extension calls it
    by itself."""
    closed = _closed.get()
    if closed is not None and closed.is_set():
        raise CancelledError


if not isinstance(_native, MissingExtension):
    _native.check_with(check_awaited)


def _close(pool: ThreadPoolExecutor, closed: Event, torch_threads: int | None) -> None:
    closed.set()
    pool.shutdown(wait=False, cancel_futures=True)  # this may be one of its threads
    _set_torch_threads(torch_threads)


def _torch_threads() -> int | None:
    """Returns this thread's number of threads of PyTorch; None if PyTorch is not imported. A thread takes the number that any
    thread set last, when it asks for its own first. So this thread has to ask before those of a pool set theirs: otherwise it
    would compute on one thread from then on."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else None


def _set_torch_threads(count: int | None) -> None:
    """Gives new threads this number of threads of PyTorch."""
    if count is not None:
        sys.modules["torch"].set_num_threads(count)


def _start_thread(limit: int | None, closed: Event | None) -> None:
    _limit.set(limit)
    _closed.set(closed)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # in this thread: PyTorch's own threads would wait for each other on busy cores


def threads_for(size: int) -> int:
    """Returns the number of threads for a result of this size in bytes: all cores if it fills the memory for waiting
    results."""
    return cores() if size > AHEAD // 16 else 1


def cores() -> int:
    """Returns the number of cores to use: those that this process may run on, or the limit of `at_most_cores`."""
    return min(CORES, _limit.get() or CORES)


@contextlib.contextmanager
def at_most_cores(count: int) -> Iterator[None]:
    """Limits the cores that work on tensors in the block, for calls from this thread.

    By default, loading, compressing, restoring, verifying, merging and switching use all cores that the process may use: those
    of its CPU affinity, or fewer by the CPU quota of its container. The results are the same on any number of cores.

    Args:
        count: 1 or more. A number above the default changes nothing.

    Raises:
        ValueError: `count` is less than 1.
    """
    if count < 1:
        raise ValueError(f"at_most_cores takes 1 or more, not {count}")
    token = _limit.set(count)
    try:
        yield
    finally:
        _limit.reset(token)


def progress(what: str, count: int | None, unit: str = "tensors", items: Iterable | None = None) -> tqdm:
    """Returns a progress bar, without an end if the count is None; around `items`, it counts them. A log file gets a line of it
    every ten seconds. Transformers' and huggingface_hub's settings hide it."""
    from huggingface_hub.utils import tqdm

    return tqdm(items, total=count, desc=f"{what} {unit}", mininterval=0.1 if sys.stderr.isatty() else 10)
