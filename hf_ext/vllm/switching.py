"""One server for many fine-tunes of a base: requests name them in `model`, and the server switches between them in place.

The parts of vLLM that this uses: an endpoint plugin, whose middleware sees each request after authentication; `collective_rpc`
of `reload_weights`; `pause_generation`, which also clears the caches of the model before; and the list behind /v1/models.
"""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from collections import Counter

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.logger import init_logger

from hf_ext.errors import CheckpointError
from hf_ext.vllm.models import StoredModel, changed, read_models

logger = init_logger(__name__)

TURN = 2.0  # seconds that a model may answer on while requests to another one wait
WITHOUT_WEIGHTS = {"/tokenize", "/detokenize"}


class ModelSwitching:
    """vLLM's endpoint plugin. It is active where `VLLM_PLUGINS` names `hf_ext` and the server's extra config has `models`."""

    name = "hf_ext"
    required_tasks = None

    def __init__(self) -> None:
        self.switcher: Switcher | None = None

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(_OneModelAtATime, plugin=self)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        extra = dict(args.model_loader_extra_config or {})
        if engine_client is None or not extra.get("models"):
            return
        if (args.api_server_count or 1) > 1:
            raise CheckpointError(
                "Several models need one API server, which knows what each request waits for: --api-server-count 1."
            )
        paths = state.openai_serving_models.base_model_paths
        first = StoredModel(args.model, args.revision, extra.get("task"))
        models = {path.name: (args.model, first) for path in paths}
        for name, stored in read_models(extra["models"]).items():
            if name in models:
                raise CheckpointError(f"The name '{name}' is given to two models. Choose another --served-model-name.")
            models[name] = (name, stored)
            paths.append(BaseModelPath(name=name, model_path=stored.path))
        self.switcher = Switcher(engine_client, models, paths)


class SwitchError(Exception):
    """A model cannot be served now. The text says why."""


class Switcher:
    """Lets requests pass while the engine holds the weights of their model.

    A model's turn ends when no request to it is left, or after TURN seconds if requests to another model wait. The next turn is
    that of the model whose first request has waited longest.

    Args:
        engine: vLLM's engine.
        models: for each name of a model, its name for `reload_weights`, and where it is stored. The first one is loaded.
        paths: vLLM's list of its models. The first one names the model in responses, so the current one is kept there.
    """

    def __init__(self, engine: EngineClient, models: dict[str, tuple[str, StoredModel]], paths: list[BaseModelPath]):
        self.engine, self.models, self.paths = engine, models, paths
        self.default = self.current = next(iter(models))
        self.is_whole = True  # false after a switch that failed, until all weights are loaded again
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._since = 0.0
        self._switching: asyncio.Task | None = None

    async def enter(self, name: str) -> None:
        """Waits until the engine holds the model `name`. It then keeps it until `leave` is called.

        Raises:
            SwitchError: the model cannot be loaded. The server goes on with the one that it had.
        """
        if self._may_enter(name):
            self._running[name] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(turn)
        self._schedule()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # the turn came at the same moment
                self.leave(name)
            self._schedule()
            raise

    def leave(self, name: str) -> None:
        """Ends what `enter` began."""
        self._running[name] -= 1
        self._schedule()

    def _may_enter(self, name: str) -> bool:
        is_here = name == self.current and self.is_whole and self._switching is None
        return is_here and not (self._others_wait() and time.monotonic() - self._since > TURN)

    def _others_wait(self) -> bool:
        return any(waiting for name, waiting in self._waiting.items() if name != self.current)

    def _schedule(self) -> None:
        """Starts the next turn if requests wait for one and the last one is over."""
        waiting = {name: [turn for turn in turns if not turn.done()] for name, turns in self._waiting.items()}
        self._waiting = {name: turns for name, turns in waiting.items() if turns}
        if self._waiting and self._switching is None and not self._running.total():
            self._switching = asyncio.create_task(self._next_turn())

    async def _next_turn(self) -> None:
        name = next(iter(self._waiting))  # names stand in the order of their first requests
        error = None
        try:
            await self._switch(name)
        except Exception as caught:
            error = SwitchError(str(caught))
        self._since, self._switching = time.monotonic(), None
        for turn in self._waiting.pop(name, []):
            if turn.done():  # its client has left
                continue
            if error is None:
                self._running[name] += 1
                turn.set_result(None)
            else:
                turn.set_exception(error)
        self._schedule()

    async def _switch(self, name: str) -> None:
        before, began = self.current, time.monotonic()
        if name == before and self.is_whole:
            return
        if name != before:
            await asyncio.to_thread(self._require_fitting, name)
        await self.engine.pause_generation(mode="wait", clear_cache=True)
        try:
            await self._load(name)
        except Exception as error:
            if name != before:
                await self._load(before)
            logger.error("Switching to %s failed: %s. The server goes on with %s.", name, error, before)
            raise
        finally:
            if self.is_whole:
                await self.engine.resume_generation()
        logger.info("Switched to %s in %.2f s.", name, time.monotonic() - began)

    async def _load(self, name: str) -> None:
        self.is_whole = False
        await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": self.models[name][0]})
        self.current, self.is_whole = name, True
        here = next(place for place, path in enumerate(self.paths) if path.name == name)
        self.paths.insert(0, self.paths.pop(here))

    def _require_fitting(self, name: str) -> None:
        """Raises what is wrong with a model as far as its headers show it, before any weight changes."""
        source = self.models[name][1].open()
        next(changed(self.models[self.current][1].open(), source), None)


class _OneModelAtATime:
    """Middleware that lets a request pass when it is the turn of its model."""

    def __init__(self, app: ASGIApp, plugin: ModelSwitching):
        self.app = app
        self.plugin = plugin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        switcher = self.plugin.switcher
        is_post = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] not in WITHOUT_WEIGHTS
        if switcher is None or not (is_post or scope["type"] == "websocket"):
            await self.app(scope, receive, send)
        elif is_post:
            await self._post(switcher, scope, receive, send)
        else:
            await switcher.enter(switcher.default)
            try:
                await self.app(scope, receive, send)
            finally:
                switcher.leave(switcher.default)

    async def _post(self, switcher: Switcher, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        name = _model_of(body) or switcher.default
        left = asyncio.ensure_future(receive())  # all that comes after the body: the client has left
        messages = iter([{"type": "http.request", "body": body}])

        async def again() -> Message:
            return next(messages, None) or await asyncio.shield(left)

        try:
            if name not in switcher.models:
                await self.app(scope, again, send)  # vLLM answers that there is no such model
                return
            entering = asyncio.create_task(switcher.enter(name))
            await asyncio.wait({entering, left}, return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                entering.cancel()
                return
            try:
                await entering
            except SwitchError as error:
                content = {"message": str(error), "type": "ServiceUnavailableError", "param": "model", "code": 503}
                await JSONResponse({"error": content}, 503)(scope, again, send)
                return
            try:
                await self.app(scope, again, send)
            finally:
                switcher.leave(name)
        finally:
            left.cancel()


def _model_of(body: bytes) -> str | None:
    """Returns the model that a request names; None if it names none."""
    try:
        request = json.loads(body)
    except ValueError:
        return None
    name = request.get("model") if isinstance(request, dict) else None
    return name if isinstance(name, str) else None
