"""Updates running vLLM and SGLang servers to a step, through their own HTTP interfaces."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from http.client import HTTPException
from typing import Literal, Protocol, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from hf_ext.errors import HfExtError, ServerError
from hf_ext.weight_sync.checkpoint import LocalCheckpoint
from hf_ext.weight_sync.places import Folder, Place, open_place
from hf_ext.weight_sync.sglang_layout import VersionReader, open_reader

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST = 600  # seconds that a server may take for one thing, such as ending its requests
LONGEST_PAUSE = 30.0  # seconds between two attempts after many failures


class Follower(Protocol):
    """A server or checkpoint that `follow` updates. `str()` gives its name in messages.

    It may also have a method `prepare(step)`, which `follow` calls before `update`, for the work that needs no pause.
    """

    def update(self, step: int) -> None: ...

    def has(self, step: int) -> bool: ...


class _Server:
    """A server with an HTTP interface."""

    _info: str  # the path of its answer that tells the version of its weights
    _unsuitable: str  # what is wrong if it does not know a request

    def __init__(self, url: str, api_key: str | None):
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def __str__(self) -> str:
        return self.url

    def has(self, step: int) -> bool:
        """Checks whether the server has the weights of a step. A server that was restarted has those that it started with.

        Raises:
            ServerError: the server cannot be reached.
        """
        answer = self._call(self._info)
        with suppress(ValueError, AttributeError):
            return json.loads(answer).get("weight_version") == str(step)
        return False

    def _call(self, path: str, content: dict | None = None) -> bytes:
        """Returns the server's answer to a POST request with some content, or else to a GET request."""
        data = None if content is None else json.dumps(content).encode()
        request = Request(f"{self.url}/{path}", data, self._headers)
        try:
            with urlopen(request, timeout=LONGEST) as answer:
                return answer.read()
        except HTTPError as error:
            text = self._unsuitable if error.code == 404 else f"{error.code} {error.read(500).decode(errors='replace')}"
            raise ServerError(f"{self.url} refused {request.selector}: {text}") from error
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.url} does not answer: {error}") from error


class VLLMServer(_Server):
    """A running server: `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "hf_ext"}'`.

    vLLM accepts new weights only in this development mode. Everyone who can reach the port can then change the weights, so do
    not expose the port.

    Args:
        url: address of the server, such as http://localhost:8000.
        place: place of the steps, which the server must be able to read under the same name: a folder, or a place on the Hub.
        requests: treatment of running requests at an update. "wait" waits until they are done, "keep" continues them with the
            new weights, "abort" aborts them.
        api_key: API key of the server; by default VLLM_API_KEY of the environment.
    """

    _info = "weight_info"
    _unsuitable = "it takes no weights. Start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config."

    def __init__(
        self,
        url: str,
        place: str | os.PathLike,
        requests: Literal["wait", "keep", "abort"] = "wait",
        api_key: str | None = None,
    ):
        super().__init__(url, api_key or os.environ.get("VLLM_API_KEY"))
        opened = open_place(place)
        self.requests = requests
        self.place = str(opened.path.absolute()) if isinstance(opened, Folder) else str(opened)

    def prepare(self, step: int) -> None:
        """Lets the server read a step while it serves, and waits until it has. A server that cannot is not prepared.

        Raises:
            ServerError: the server cannot be reached, cannot read the step, or takes longer than `LONGEST`.
        """
        content = {"method": "prepare_weights", "kwargs": {"place": self.place, "step": step}}
        begin, pause = time.monotonic(), 0.01
        while time.monotonic() < begin + LONGEST:
            try:
                workers = json.loads(self._call("collective_rpc", content))["results"]
                if all(worker["is_ready"] for worker in workers):
                    return
                errors = [worker["error"] for worker in workers if worker["error"]]
            except (ServerError, ValueError, LookupError, TypeError) as error:
                if isinstance(error, ServerError) and getattr(error.__cause__, "code", None) not in (404, 500):
                    raise
                return  # it does not know the call or, without this package, the method
            if errors:
                raise ServerError(f"{self} cannot read step {step}: {errors[0]}")
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        raise ServerError(f"{self} has not read step {step} in {LONGEST} seconds.")

    def update(self, step: int) -> None:
        """Updates the server to a step, which it reads before it pauses. If the update fails, it keeps its current weights.

        Raises:
            ServerError: the server cannot be reached, or rejects the update; the message contains its answer.
        """
        self.prepare(step)
        try:
            self._call(f"pause?mode={self.requests}", {})
        except ServerError:
            with suppress(ServerError):
                self._call("resume", {})
            raise
        try:
            self._call("init_weight_transfer_engine", {"init_info": {"place": self.place}})
            self._call("start_weight_update", {})
            self._call("update_weights", {"update_info": {"step": step}})
            self._call("finish_weight_update", {"weight_version": str(step)})
        finally:
            self._call("resume", {})


class SGLangServer(_Server):
    """A running server: `sglang serve --model-path FOLDER`. It loads each step from a local checkpoint.

    The server needs nothing of this package. It must see the checkpoint's folder under the same name. Several servers may load
    one checkpoint, and each may have several workers.

    Args:
        url: address of the server, such as http://localhost:30000.
        checkpoint: the checkpoint to bring to the step first.
        requests: treatment of running requests at an update. "wait" waits until they are done, "abort" aborts them.
        api_key: API key of the server, that for administrators if it has one.
    """

    _info = "model_info"
    _unsuitable = "it is no SGLang server."

    def __init__(
        self, url: str, checkpoint: LocalCheckpoint, requests: Literal["wait", "abort"] = "wait", api_key: str | None = None
    ):
        if requests not in ("wait", "abort"):
            raise ValueError(f"SGLang's requests can wait or abort, not {requests}")
        super().__init__(url, api_key)
        self.checkpoint, self.requests = checkpoint, requests

    def prepare(self, step: int) -> None:
        """Updates the checkpoint. See `LocalCheckpoint.update` for errors."""
        self.checkpoint.update(step)

    def update(self, step: int) -> None:
        """Updates the checkpoint, then the server. If the checkpoint cannot be updated, the server is not told of the step.

        Raises:
            CheckpointError, CorruptFileError: see `LocalCheckpoint.update`.
            ServerError: the server cannot be reached, or rejects the update; the message contains its answer.
        """
        self.prepare(step)
        options = {"weight_version": str(step), "abort_all_requests": self.requests == "abort"}
        self._call("update_weights_from_disk", {"model_path": str(self.checkpoint)} | options)


class SGLangPullServer(_Server):
    """A running SGLang server with `/pull_weights`, which reads steps of `Publisher(place, layout="sglang", …)`.

    Released versions of SGLang lack the call; slime and miles add it. The server pulls a step while it serves.

    Args:
        url: address of the server.
        place: folder of the steps, which the server must see under the same name.
        folder: folder on the server's machine for its copy of the model, which it makes and changes.
        requests, api_key: as for `SGLangServer`; "retract" runs the requests again, and "in_place" continues them.
    """

    _info = "model_info"
    _unsuitable = "it cannot pull weights. Use LocalCheckpoint with SGLangServer, which any SGLang server can follow."

    def __init__(
        self,
        url: str,
        place: str | os.PathLike,
        folder: str | os.PathLike,
        requests: Literal["abort", "retract", "in_place"] = "retract",
        api_key: str | None = None,
    ):
        super().__init__(url, api_key)
        self.reader, self.folder, self.requests = VersionReader(Folder(os.path.abspath(place))), os.fspath(folder), requests

    def prepare(self, step: int) -> None:
        """Lets the server change its copy of the model, which it loads later.

        Raises:
            CheckpointError: the step is not at the place.
            ServerError: the server cannot be reached, or cannot read the step; the message contains its answer.
        """
        content = {"local_checkpoint_dir": self.folder, "source_dir": str(self.reader.place)}
        self._call("pull_weights", content | {"target_version": self.reader.number(step)})

    def update(self, step: int) -> None:
        """Brings the server to a step, for which it pauses once it has pulled it. Errors are those of `prepare`."""
        self.prepare(step)
        try:
            self._call("pause_generation", {"mode": self.requests})
            if self.requests != "in_place":
                self._call("flush_cache", {})
            self._call("update_weights_from_disk", {"model_path": self.folder, "weight_version": str(step)})
        finally:
            self._call("continue_generation", {})


def follow(
    place: str | os.PathLike | Place,
    servers: Sequence[Follower],
    stop_at_step: int | None = None,
    poll_interval: float = 1.0,
    tell: Callable[[str], object] = logger.info,
    give_up_after: float | None = None,
) -> int:
    """Updates servers to each new step until all are at step `stop_at_step` or beyond; by default without end.

    An update goes to the newest step, and skips steps that were published during the previous update. A slow server delays no
    other one, unless both load the same `LocalCheckpoint`. A server that was restarted is updated again. Errors are logged.
    What failed is tried again, first after `poll_interval` seconds, then after pauses that double up to 30 seconds.

    Args:
        place: place of the steps.
        servers: servers and local checkpoints to update at the same time.
        poll_interval: seconds between two checks of the place and of each server.
        tell: function that receives messages about the progress.
        give_up_after: seconds for which the place or a server may fail before its error is raised; by default without end.

    Returns:
        The step.

    Raises:
        HfExtError, OSError: a server, a checkpoint or the place has failed for `give_up_after` seconds.
    """
    reader, reading = open_reader(place), _Attempts(poll_interval, give_up_after, tell)
    attempts = [_Attempts(poll_interval, give_up_after, tell) for _ in servers]
    reached = [-1 for _ in servers]  # their steps; -1: none, or unknown
    running: dict[int, tuple[int, Future[str]]] = {}  # by the server's number: the step that it is being brought to
    sources = [id(getattr(server, "checkpoint", server)) for server in servers]  # a folder must not change while one loads it
    newest, is_first_look = -1, True

    with ThreadPoolExecutor(len(servers)) as pool:
        while True:
            next_look = time.monotonic() + poll_interval
            if reading.is_due():
                reader = open_reader(place) if newest < 0 else reader  # in the layout that is there by now
                steps = reading.result(reader.steps, "The place is read again.")
                newest = max(steps or (), default=-1)
                if steps == [] and is_first_look:
                    tell(f"{place} has no steps yet, or does not exist. Waiting for the first.")
                is_first_look = is_first_look and steps is None
            loading = {sources[number]: step for number, (step, _) in running.items()}
            for number, server in enumerate(servers):
                is_free = number not in running and loading.get(sources[number], newest) == newest
                if newest >= 0 and is_free and attempts[number].is_due():
                    running[number] = newest, pool.submit(_update, server, newest, reached[number] == newest)
            wait((updating for _, updating in running.values()), poll_interval)
            for number, (step, updating) in list(running.items()):
                if updating.done():
                    del running[number]
                    duration = attempts[number].result(updating.result, f"Step {step} is tried again.")
                    reached[number] = -1 if duration is None else step
                    if duration:
                        tell(f"{servers[number]} is at step {step} ({duration}).")
            if stop_at_step is not None and min(reached) >= stop_at_step:
                return min(reached)
            time.sleep(max(next_look - time.monotonic(), 0))


def _update(server: Follower, step: int, was_there: bool) -> str:
    """Brings a server to a step. Returns how long that took, for a message; "" if the server was there and still is."""
    if was_there and server.has(step):
        return ""
    begin = time.monotonic()
    prepare = getattr(server, "prepare", None)
    if prepare is not None:
        prepare(step)
    prepared = time.monotonic()
    server.update(step)
    seconds = f"{time.monotonic() - prepared:.2f} s"
    return f"updated in {seconds}" if prepare is None else f"prepared in {prepared - begin:.2f} s, paused for {seconds}"


class _Attempts:
    """The attempts at something that may fail, with longer and longer pauses."""

    def __init__(self, pause: float, give_up_after: float | None, tell: Callable[[str], object]):
        self._shortest, self._give_up_after, self._tell = pause, give_up_after, tell
        self._pause, self._next, self._failing_since = pause, 0.0, math.inf

    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def result(self, work: Callable[[], T], then: str) -> T | None:
        """Returns the result of an attempt; None if it fails. Raises its error after the longest time of failures.

        Args:
            then: what follows after a failure, for the message.
        """
        try:
            result = work()
        except (HfExtError, OSError) as error:
            now = time.monotonic()
            self._failing_since = min(self._failing_since, now)
            if self._give_up_after is not None and now - self._failing_since >= self._give_up_after:
                raise
            self._next, self._pause = now + self._pause, min(2 * self._pause, max(LONGEST_PAUSE, self._shortest))
            self._tell(f"{error} {then}")
            return None
        self._pause, self._next, self._failing_since = self._shortest, 0.0, math.inf
        return result
