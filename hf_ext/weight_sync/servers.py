"""Updates running vLLM servers to a step, through vLLM's own HTTP interface."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from hf_ext.errors import HfExtError, ServerError
from hf_ext.weight_sync.places import Folder, Place, open_place
from hf_ext.weight_sync.subscriber import Subscriber

logger = logging.getLogger(__name__)

LONGEST = 600  # seconds that a server may take for one thing, such as ending its requests


class VLLMServer:
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

    def __init__(
        self,
        url: str,
        place: str | os.PathLike,
        requests: Literal["wait", "keep", "abort"] = "wait",
        api_key: str | None = None,
    ):
        found = open_place(place)
        self.url, self.requests = url.rstrip("/"), requests
        self.place = str(found.path.absolute()) if isinstance(found, Folder) else str(found)
        key = api_key or os.environ.get("VLLM_API_KEY")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def update(self, step: int) -> None:
        """Updates the server to a step. If the update fails, the server keeps its current weights.

        Raises:
            ServerError: the server cannot be reached, or rejects the update; the message contains its answer.
        """
        try:
            self._post(f"pause?mode={self.requests}")
        except ServerError:
            with suppress(ServerError):
                self._post("resume")
            raise
        try:
            self._post("init_weight_transfer_engine", {"init_info": {"place": self.place}})
            self._post("start_weight_update")
            self._post("update_weights", {"update_info": {"step": step}})
            self._post("finish_weight_update", {"weight_version": str(step)})
        finally:
            self._post("resume")

    def _post(self, path: str, content: dict | None = None) -> None:
        request = Request(f"{self.url}/{path}", json.dumps(content or {}).encode(), self._headers)
        try:
            urlopen(request, timeout=LONGEST).close()
        except HTTPError as error:
            if error.code == 404:
                text = "it takes no weights. Start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config."
            else:
                text = f"{error.code} {error.read(500).decode(errors='replace')}"
            raise ServerError(f"{self.url} refused {request.selector}: {text}") from error
        except OSError as error:
            raise ServerError(f"{self.url} does not answer: {error}") from error


def follow(
    place: str | os.PathLike | Place,
    servers: Sequence[VLLMServer],
    last: int | None = None,
    every: float = 1.0,
    tell: Callable[[str], object] = logger.info,
) -> int:
    """Updates servers to each new step until all are at step `last` or beyond; by default without end.

    An update goes to the newest step, and skips steps that were published during the previous update. Errors are logged, and
    the update is tried again.

    Args:
        place: place of the steps.
        servers: servers to update at the same time.
        every: seconds between two checks of the place.
        tell: function that receives messages about the progress.

    Returns:
        The step.
    """
    steps, reached = Subscriber(place), dict.fromkeys(servers, -1)
    with ThreadPoolExecutor(len(servers)) as pool:
        while True:
            try:
                newest = max(steps.steps(), default=-1)
            except (HfExtError, OSError) as error:
                newest = -1
                tell(f"{error} The place is read again.")
            behind = [server for server in servers if newest >= 0 and reached[server] != newest]
            updates = {server: pool.submit(server.update, newest) for server in behind}
            for server, update in updates.items():
                try:
                    update.result()
                except ServerError as error:
                    tell(f"{error} Step {newest} is tried again.")
                else:
                    reached[server] = newest
                    tell(f"{server.url} is at step {newest}.")
            if last is not None and min(reached.values()) >= last:
                return min(reached.values())
            time.sleep(every)
