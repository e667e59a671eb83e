"""One server for many fine-tunes of a base: requests name them in `model`, and the server switches between them in place.

The parts of vLLM that this uses: an endpoint plugin, whose middleware sees each request after authentication; `collective_rpc`
of `reload_weights`; `pause_generation`, which also clears the caches of the model before; and the list behind /v1/models.
"""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.logger import init_logger

from hf_ext.errors import CheckpointError
from hf_ext.serving.vllm.models import StoredModel, read_models, require_same_shapes
from hf_ext.serving.vllm.turns import Turns
from hf_ext.storage.source import TensorSource

logger = init_logger(f"vllm.{__name__}")

#: How the paths of requests begin that need a model's weights.
INFERENCE = (
    *("/v1/", "/v2/", "/cohere/", "/inference/", "/pooling", "/classify", "/score", "/generative_scoring", "/rerank"),
    "/invocations",
)
LARGEST_BODY = 1 << 28  # bytes of a request, which waits in memory for its turn
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")


class ModelSwitching:
    """vLLM's endpoint plugin. It is active where `VLLM_PLUGINS` names `hf_ext` and the server's extra config has `models`."""

    name = "hf_ext"
    required_tasks = None

    def __init__(self) -> None:
        self.models: ServedModels | None = None

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(_OneModelAtATime, plugin=self)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        extra = args.model_loader_extra_config or {}
        if engine_client is None or not extra.get("models"):
            return
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise CheckpointError("Several API servers cannot agree on the model in memory. Set --api-server-count 1.")
        paths = state.openai_serving_models.base_model_paths
        first = StoredModel(args.model, args.revision, extra.get("task"))
        models = {path.name: (args.model, first) for path in paths}
        for name, stored in read_models(extra["models"]).items():
            if name in models:
                raise CheckpointError(f"Two models have the name '{name}'. Choose another --served-model-name.")
            models[name] = (name, stored)
            paths.append(BaseModelPath(name=name, model_path=stored.path))
        shapes = await asyncio.to_thread(first.open)
        self.models = ServedModels(engine_client, models, paths, shapes, has_adapters=bool(args.enable_lora))


class ServedModels:
    """The models of a server, one of which is in the engine's memory.

    Args:
        models: for each name of a model, its name for `reload_weights`, and where it is stored. The first one is loaded.
        paths: vLLM's list of its models. The first one names the model in responses, so the loaded one is kept there.
        shapes: the tensors of the first model, of which only names and shapes are read. It is opened once, so that the other
            models can be served if its files are gone.
        has_adapters: whether other names than those of models may be names of LoRAs of the first model.
    """

    def __init__(
        self,
        engine: EngineClient,
        models: dict[str, tuple[str, StoredModel]],
        paths: list[BaseModelPath],
        shapes: TensorSource,
        has_adapters: bool,
    ):
        self.engine, self.models, self.paths, self.shapes = engine, models, paths, shapes
        self.has_adapters = has_adapters
        self.default = self._last = next(iter(models))
        self.turns = Turns(self._check, self._switch, self.default)

    async def _check(self, name: str) -> None:
        """Raises what is wrong with a model as far as its headers show it."""
        await asyncio.to_thread(lambda: require_same_shapes(self.shapes, self.models[name][1].open()))

    async def _switch(self, name: str) -> None:
        before, began = self._last, time.monotonic()
        await self.engine.pause_generation(mode="wait", clear_cache=True)
        try:
            await self._load(name)
        except Exception as error:
            logger.error("Switching to %s failed: %s", name, error)
            await self._load(before)
            logger.info("The server goes on with %s.", before)
            raise
        finally:
            await self.engine.resume_generation()
        logger.info("Switched from %s to %s in %.2f s.", before, name, time.monotonic() - began)

    async def _load(self, name: str) -> None:
        self.turns.current = None  # until all weights are there
        await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": self.models[name][0]})
        self.turns.current = self._last = name
        place = next(place for place, path in enumerate(self.paths) if path.name == name)
        self.paths.insert(0, self.paths.pop(place))


class _OneModelAtATime:
    """Middleware that lets a request pass when it is the turn of its model."""

    def __init__(self, app: ASGIApp, plugin: ModelSwitching):
        self.app, self.plugin = app, plugin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        models = self.plugin.models
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if models is None or not path.startswith(INFERENCE) or scope.get("method", "POST") != "POST":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(models, scope, receive, send)
        else:
            await models.turns.enter(models.default)
            try:
                await self.app(scope, receive, send)
            finally:
                models.turns.leave(models.default)

    async def _http(self, models: ServedModels, scope: Scope, receive: Receive, send: Send) -> None:
        parts, size = list[bytes](), 0
        try:
            async for part in Request(scope, receive).stream():
                parts.append(part)
                if (size := size + len(part)) > LARGEST_BODY:
                    text = f"The request has more than {LARGEST_BODY} bytes. Send less at once."
                    await _error(text, "BadRequestError", None, 413)(scope, receive, send)
                    return
        except ClientDisconnect:
            return
        body = b"".join(parts)
        name = await _model_of(scope, body) or models.default
        left = asyncio.ensure_future(receive())  # after the body, a server only hears that the client has left
        messages = iter([{"type": "http.request", "body": body}])

        async def again() -> Message:
            return next(messages, None) or await asyncio.shield(left)

        try:
            if name not in models.models:
                if not models.has_adapters:
                    await self.app(scope, again, send)  # vLLM answers that there is no such model
                    return
                name = models.default  # which adapters are for
            try:
                has_turn = await models.turns.enter_unless(left, name)
            except Exception as error:
                text = f"The model '{name}' cannot be served: {error}"
                await _error(text, "ServiceUnavailableError", "model", 503)(scope, again, send)
                return
            if has_turn:
                try:
                    await self.app(scope, again, send)
                finally:
                    models.turns.leave(name)
        finally:
            left.cancel()


def _error(text: str, kind: str, parameter: str | None, code: int) -> JSONResponse:
    """Returns an error in the form of OpenAI's interface."""
    return JSONResponse({"error": {"message": text, "type": kind, "param": parameter, "code": code}}, code)


async def _model_of(scope: Scope, body: bytes) -> str | None:
    """Returns the model that a request names, in JSON or in a form; None if it names none."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    request = Request(scope, receive)
    try:
        is_form = request.headers.get("content-type", "").startswith(FORMS)
        fields = await request.form() if is_form else json.loads(body)
    except (ValueError, RecursionError, HTTPException, MultiPartException):  # vLLM answers what is wrong
        return None
    name = fields.get("model") if isinstance(fields, Mapping) else None
    return name if isinstance(name, str) else None
