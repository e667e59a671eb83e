"""Runs work in a process of its own, and kills it at a chosen step."""

import ctypes
import errno
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

_FORKS = threading.Lock()  # filelock refuses a fork while another thread forks


def in_child(work: Callable[[], object]) -> tuple[int | None, str]:
    """Runs `work` in a process; returns its exit code (negative: the signal) and what it returned or raised."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def report():
        try:
            sender.send(str(work()))
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=report)
    with _FORKS:
        child.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(60) else "no answer"
    except EOFError:
        answer = ""
    child.join(60)
    return child.exitcode, answer


def killed_at(call: int, module: object, name: str, work: Callable[[], object], tears: bool = False) -> bool:
    """Runs `work` in a process that is killed as it calls a function of a module for the `call`-th time, counted from 0. With
    `tears` half of the bytes that the call shall change are changed. Returns false if there are fewer calls."""
    function, left = getattr(module, name), call

    def dying(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            if tears:
                arguments[0][: arguments[0].size // 2] ^= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    with mock.patch.object(module, name, dying):
        code, answer = in_child(work)
    assert code == -signal.SIGKILL or answer == "None", answer
    return code != 0


def die_or_compress(source: Path, *arguments: object):
    """Compresses a model of `compress_all`. Kills its process, as the system does for want of memory, if the model is `two`."""
    from hf_ext.fm_delta import batch

    if source.name == "two":
        os.kill(os.getpid(), signal.SIGKILL)
    return batch.compress_model(source, *arguments)


def dying_at(n: int, folder: Path, work: Callable[[], object], fail: bool = False) -> tuple[int | None, str]:
    """Runs `work` in a process that is killed as it opens, makes, renames or removes something in `folder`, or in a temporary
    folder for it, for the n-th time; its exit code is 0 if there are fewer. With `fail` that change of a file or folder raises
    OSError instead. The exit code is 3 if `work` writes to a file that others read, instead of replacing it whole."""
    events = {"open", *(f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir"))}
    events |= set() if fail else {"os.chmod", "os.link", "shutil.rmtree"}  # which may fail without harm
    concerned = re.compile(rf"{re.escape(str(folder.parent))}/\.?{re.escape(folder.name)}(/|\.|$)")
    visible = re.compile(rf"{re.escape(str(folder))}(/[^./][^/]*)+")

    def watched():
        left = n

        def watch(event: str, arguments: tuple) -> None:
            nonlocal left
            exchange = (
                event == "ctypes.dlsym" and arguments[1] == "renameat2" and not fail
            )  # looked up before each exchange of two folders
            if not exchange and (event not in events or not concerned.match(str(arguments[0]))):
                return
            writes = event != "open" or bool(set(str(arguments[1] or "")) & set("wax+"))
            if event == "open" and writes and visible.fullmatch(str(arguments[0])):
                os._exit(3)
            if fail and (not writes or event == "os.mkdir" and os.path.isdir(arguments[0])):
                return
            left -= 1
            if left == 0 and fail:
                raise OSError(errno.EIO, "injected")
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        return work()

    return in_child(watched)


def killed(
    folder: Path,
    start: Path | None,
    work: Callable[[], object],
    stride: int,
    fail: bool = False,
    is_changed: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """Runs `work` again and again, each time with `folder` as a copy of `start` (absent, if None) and killed `stride` steps
    later. Yields the step after each kill; ends after the first run that was not killed, which must raise nothing. With `fail`
    the step raises OSError instead, and `work` must raise a CheckpointError that names the folder. With `is_changed`, kills at
    each step from the one on that changes the folder."""
    step = 1
    while step < 1000:
        shutil.rmtree(folder, ignore_errors=True)
        if start:
            shutil.copytree(start, folder)
        code, answer = dying_at(step, folder, work, fail)
        is_over = code == 0 and not (fail and re.match(f"CheckpointError: .*{re.escape(str(folder))}", answer))
        if not is_over:
            assert fail or code == -signal.SIGKILL, (step, code, answer)
            yield step
        if is_changed and stride > 1 and (is_over or is_changed()):
            step, stride = step - stride, 1
        elif is_over:
            assert step > 10 and not re.match(r"\w+Error:|no answer|$", answer), answer
            return
        step += stride
    raise AssertionError("the work takes more steps than expected")


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process find no `renameat2`, as on a system that cannot exchange two folders in one step."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: None)
