"""Requests to several models that one engine holds one at a time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

TURN = 2.0  # seconds that a model may answer on while requests to another one wait


class Turns:
    """Lets requests pass while the engine holds the weights of their model.

    A model's turn ends when no request to it is left, or after TURN seconds if requests to another model wait. The next turn is
    that of the model whose first request has waited longest, so requests to one model are answered together.

    Args:
        check: raises what is wrong with a model, before its requests wait for a turn. The engine goes on meanwhile.
        switch: loads a model while no request runs. If it raises, requests to that model get its error.
        current: the model that is loaded; None if none is complete.
    """

    def __init__(self, check: Callable[[str], Awaitable[None]], switch: Callable[[str], Awaitable[None]], current: str | None):
        self.current = current
        self._check, self._switch = check, switch
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._since = time.monotonic()
        self._switching: asyncio.Task[None] | None = None

    async def enter(self, name: str) -> None:
        """Waits until the engine holds the model `name`. It then keeps it until `leave` is called.

        Raises the errors of `check` and `switch`.
        """
        if name != self.current and name not in self._waiting:
            await self._check(name)
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
                self._running[name] -= 1
            self._schedule()
            raise

    async def enter_unless(self, left: asyncio.Future[Any], name: str) -> bool:
        """Waits as `enter` does, but only until `left` is done. Returns false if no turn came before, so that none must end."""
        entering: asyncio.Future[Any] = asyncio.create_task(self.enter(name))
        try:
            await asyncio.wait({entering, left}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not entering.cancel() and entering.exception() is None:  # the turn came at the same moment
                self.leave(name)
            raise
        return not entering.cancel() and entering.result() is None

    def leave(self, name: str) -> None:
        """Ends what `enter` or `enter_unless` began."""
        self._running[name] -= 1
        self._schedule()

    def _may_enter(self, name: str) -> bool:
        if name != self.current or self._switching is not None:
            return False
        is_over = time.monotonic() - self._since > TURN
        return not (is_over and any(other != name for other in self._waiting))

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
            if name != self.current:
                await self._switch(name)
        except Exception as caught:
            error = caught
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
