"""A place among the requests that the server of a model runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cortex.neuron.engine.request import EngineRequest, StepOutput
from cortex.neuron.node.node import Node
from cortex.wire.errors import CortexError


class ServerSlot:
    """Owned by one request's task: `wait`, then send the request, and `release` however it ends."""

    def __init__(self, backend: Node, model: str, request_id: str, principal: str, level: int) -> None:
        """`level`: of its class. Raises what `Node.generate` raises."""
        self.on_lost: Callable[[CortexError], None] | None = None
        """Called if the server is lost after `wait` has returned."""
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._generation = backend.generate(model, EngineRequest(request_id, (), 1, principal=principal, level=level))
        self._generation.follow(self._receive, self._fail)

    async def wait(self) -> None:
        """Returns when the request may be sent. Raises CortexError."""
        await self._granted

    def release(self) -> None:
        """May be called repeatedly."""
        self._generation.cancel()

    def _receive(self, _: Sequence[StepOutput]) -> None:
        if not self._granted.done():
            self._granted.set_result(None)

    def _fail(self, error: CortexError) -> None:
        if not self._granted.done():
            self._granted.set_exception(error.with_traceback(None))
        elif self.on_lost is not None:
            self.on_lost(error)


class NoSlot:
    """Used instead of a `ServerSlot` for a request that needs no work of the model and does not wait."""

    on_lost: Callable[[CortexError], None] | None = None

    async def wait(self) -> None:
        """Returns at once."""

    def release(self) -> None:
        """There is nothing to release."""
