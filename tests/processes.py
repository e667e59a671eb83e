"""Runs Python code in processes of their own, which start with PyTorch, Transformers and PEFT imported: otherwise most of a
test's time.

Transformers, PEFT and huggingface_hub read settings from the environment as they are imported. So one process imports them for
each set of settings (the variables HF_…, HUGGING… and TRANSFORMERS_…), and forks for each run. Where starting, importing or the
memory of a process is what is tested, `subprocess` runs it. All of them see no GPU: no fork of a process that has looked for
one can use it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed.tensor", "torch._inductor.compile_fx", "torch._dynamo.testing", "scipy.optimize", "bitsandbytes"]
)
_HOSTS = [
    "transformers.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama")),
    "peft",
]
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_SETTINGS = ("HF_", "HUGGING", "TRANSFORMERS_")
_AT_CALLS = ("HF_HOME", "HF_TOKEN")  # the token is read in each call; the folder of the parent's HF_HOME is a link


WITHOUT_THE_PLUGIN = """
import sys
import transformers
for target in sys.argv[1:]:
    auto, folder = target.split("@")
    try:
        getattr(transformers, auto).from_pretrained(folder)
    except Exception as error:
        print(type(error).__name__)
    else:
        print("loaded")
assert not any(name.startswith("hf_ext") for name in sys.modules)
"""


def _renew_threads() -> None:
    """Lets PyTorch make its pool of threads anew. In a fork it does so at the pool's first use, which fails, or never ends, if
    two threads are the first."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_renew_threads)


def python(
    *arguments: object,
    cwd: str | os.PathLike = ".",
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    hosts: bool = True,
) -> subprocess.CompletedProcess:
    """Runs `python -c CODE …`, `python -m MODULE …` or `python FILE …`, with this process's `sys.path`, and returns what
    `subprocess.run(…, capture_output=True, text=True)` returns. Without `hosts` only PyTorch is imported."""
    command = [os.fspath(argument) if isinstance(argument, os.PathLike) else str(argument) for argument in arguments]
    env = dict(os.environ if env is None else env) | _NO_GPU
    with TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        code = _Parent.of(env if hosts else {}).run(command, os.fspath(cwd), env, streams, timeout=timeout)
        texts = [stream.read_text() for stream in streams]
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    return subprocess.CompletedProcess(command, code, *texts)


def loads_without_plugin(*targets: str) -> tuple[list[str], str]:
    """Loads "AutoClass@folder" in a process without hf_ext; returns what happened to each, and stderr."""
    result = python("-c", WITHOUT_THE_PLUGIN, *targets)
    return result.stdout.split(), result.stderr


def on_ranks(function: Callable[..., None], *arguments: object, count: int = 2) -> list[int | None]:
    """Calls `function(rank, *arguments)` in a process for each rank of a distributed job, and returns their exit codes."""
    import torch

    context = _CONTEXT if torch.cuda.is_available() else multiprocessing.get_context("fork")
    ranks = [context.Process(target=_on_one_thread, args=(function, rank, *arguments)) for rank in range(count)]
    for rank in ranks:
        _start(rank)
    for rank in ranks:
        rank.join(120)
        rank.kill()
    return [rank.exitcode for rank in ranks]


def launched(rank: int, port: int, count: int = 2) -> None:
    """Makes this process one of a job, as `accelerate launch` and torchrun do: by environment variables."""
    from accelerate.state import AcceleratorState

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    AcceleratorState._reset_state(reset_partial_state=True)  # of the process that this one is a fork of


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _start(process: multiprocessing.process.BaseProcess) -> None:
    """Starts a process that sees no GPU. The first of `_CONTEXT` starts the server that forks the others."""
    with mock.patch.dict(os.environ, _NO_GPU):
        process.start()


def _on_one_thread(function: Callable[..., None], *arguments: object) -> None:
    import torch

    torch.set_num_threads(1)  # the threads of OpenMP are gone after a fork, and waiting for them would never end
    function(*arguments)


def peak_above(action: Callable[[], object]) -> int:
    """Returns the most bytes that this process holds during `action`, beyond those before; mapped files do not count."""

    def held() -> int:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(held())

    with suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)  # else `action` fills what this process has freed but not returned
    before, seen, done = held(), list[int](), threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = action()  # until the last look
    done.set()
    watcher.join()
    peak = max([*seen, held()]) - before
    del kept
    return peak


class _Parent:
    """A process that has imported the hosts under some settings, if any, and forks for each run."""

    all: dict[tuple, _Parent] = {}

    @classmethod
    def of(cls, env: dict[str, str]) -> _Parent:
        """Returns the parent for an environment, started when first needed."""
        ignored = (*_AT_CALLS, "HF_ENDPOINT") if env.get("HF_HUB_OFFLINE") == "1" else _AT_CALLS
        settings = tuple(sorted((name, env[name]) for name in env if name.startswith(_SETTINGS) and name not in ignored))
        key = (bool(env), settings)
        if key not in cls.all:
            cls.all[key] = cls(env)
        return cls.all[key]

    def __init__(self, env: dict[str, str]) -> None:
        self._folder = TemporaryDirectory()
        self._home = Path(self._folder.name, "home")
        if env:
            env = env | {"HF_HOME": str(self._home)}
        self._pipe, theirs = _CONTEXT.Pipe()
        _start(_CONTEXT.Process(target=_serve, args=(theirs, env)))
        theirs.close()
        atexit.register(self._pipe.close)  # so that the process ends before this one waits for it

    def run(self, command: list[str], cwd: str, env: dict[str, str], streams: list[Path], timeout: float) -> int | None:
        """Returns the exit code of a run, or None if it took longer than `timeout` seconds and was killed."""
        target = Path(os.path.abspath(cwd), env.get("HF_HOME", Path(self._folder.name, "empty")))
        target.mkdir(parents=True, exist_ok=True)  # huggingface_hub 1.17 cannot make it through the link
        self._home.unlink(missing_ok=True)
        self._home.symlink_to(target)
        self._pipe.send((command, cwd, env, streams, sys.path))
        child = self._pipe.recv()
        late = not self._pipe.poll(timeout)
        if late:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        code = self._pipe.recv()
        return None if late else code


def _serve(pipe, env: dict[str, str]) -> None:
    """Imports the hosts, and runs what comes through the pipe, each in a fork, which ends as any process of multiprocessing."""
    if env:
        os.environ.clear()
        os.environ.update(env)
        for name in _HOSTS:
            with suppress(ModuleNotFoundError):  # some environments have no hosts
                importlib.import_module(name)
    gc.freeze()
    while True:
        try:
            run = pipe.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            pipe.close()
            return _run(*run)
        pipe.send(child)
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _run(command: list[str], cwd: str, env: dict[str, str], streams: list[Path], path: list[str]) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
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
