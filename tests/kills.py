"""Runs work in a process of its own, and kills it at a chosen step."""

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path


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
    child.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(60) else "no answer"
    except EOFError:
        answer = ""
    child.join(60)
    return child.exitcode, answer


def die_or_compress(job):
    """Compresses a model of `compress_all`. Kills its process, as the system does for want of memory, if the model is `two`."""
    from hf_ext.fm_delta import batch

    if Path(job.source).name == "two":
        os.kill(os.getpid(), signal.SIGKILL)
    return batch.compress_job(job)


def dying_at(n: int, folder: Path, work: Callable[[], object]) -> tuple[int | None, str]:
    """Runs `work` in a process that is killed as it opens, makes, renames or removes something in `folder`, or in a temporary
    folder for it, for the n-th time; its exit code is 0 if there are fewer."""
    events = {"open", "shutil.rmtree", "hf_ext.exchange"}
    events |= {f"os.{name}" for name in ("mkdir", "rename", "link", "chmod", "remove", "rmdir")}
    concerned = re.compile(rf"{re.escape(str(folder.parent))}/\.?{re.escape(folder.name)}(/|\.|$)")

    def watched():
        left = n

        def watch(event: str, arguments: tuple) -> None:
            nonlocal left
            if event in events and concerned.match(str(arguments[0])):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        return work()

    return in_child(watched)
