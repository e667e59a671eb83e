"""Tells running vLLM servers to take a step, over vLLM's own HTTP interface."""

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

    The mode is what vLLM asks for to accept new weights. Whoever reaches the port can then change them, so keep it to yourself.

    Args:
        url: such as http://localhost:8000.
        place: where the steps are, reachable from the server under the same name: a folder or one on the Hub.
        requests: what becomes of those under way at an update: "wait" lets them end first, "keep" lets them go on with the new
            weights, "abort" ends them.
        api_key: of the server, by default the environment's VLLM_API_KEY.
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
        """Brings the server to a step. If that fails, it goes on with the weights that it has.

        Raises:
            ServerError: it cannot be reached, or refuses; the message holds its answer.
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
    """Brings servers to each new step until all are at step `last` or beyond; by default without end.

    An update takes the newest step, so those that came during the update before are skipped. Errors are logged, and tried
    again.

    Args:
        place: of the steps.
        servers: are updated at the same time.
        every: seconds from one look at the place to the next.
        tell: is called with what happens.

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
