"""Runs Python code in processes of their own, which start with PyTorch imported: otherwise most of a test's time.

Whatever reads the environment as it is imported (huggingface_hub, Transformers, PEFT) is left to the code. Where starting,
importing or the memory of a process is what is tested, `subprocess` runs it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed.tensor", "torch._inductor.compile_fx", "torch._dynamo.testing", "scipy.optimize", "bitsandbytes"]
)


def python(
    *arguments: object, cwd: str | os.PathLike = ".", env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess:
    """Runs `python -c CODE …`, `python -m MODULE …` or `python FILE …`, with this process's `sys.path`, and returns what
    `subprocess.run(…, capture_output=True, text=True)` returns."""
    command = [os.fspath(argument) if isinstance(argument, os.PathLike) else str(argument) for argument in arguments]
    with TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        process = _CONTEXT.Process(target=_run, args=(command, os.fspath(cwd), dict(env or os.environ), streams))
        process.start()
        process.join(timeout)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        texts = [stream.read_text() for stream in streams]
    if late:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    return subprocess.CompletedProcess(command, process.exitcode, *texts)


def on_ranks(function: Callable[..., None], *arguments: object, count: int = 2) -> list[int | None]:
    """Calls `function(rank, *arguments)` in a fork for each rank of a distributed job, and returns their exit codes."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=function, args=(rank, *arguments)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    return [rank.exitcode for rank in ranks]


def _run(command: list[str], cwd: str, env: dict[str, str], streams: list[Path]) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if command[0] == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), vars(main))
    elif command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")
