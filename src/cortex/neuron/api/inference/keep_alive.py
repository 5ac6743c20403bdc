"""Unloads a model after a response whose request has `keep_alive: 0`, as Ollama's clients send."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cortex.neuron.node.node import Node
from cortex.wire.errors import CortexError
from cortex.wire.node.orders import UnloadRequest
from cortex.wire.requests import GenerateRequest

log = logging.getLogger(__name__)


class KeepAliveUnloads:
    """Counts the requests of each model, so that none leaves while another request runs. Owns a task per unload."""

    def __init__(self, backend: Node) -> None:
        self._backend = backend
        self._running: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def request(self, request: GenerateRequest, *, is_of_gateway: bool) -> Iterator[None]:
        """A context for the response. Has no effect for a gateway, which decides itself which models to unload."""
        model = request.model
        self._running[model] += 1
        try:
            yield
        finally:
            self._running[model] -= 1
            is_last = not self._running[model]
            if is_last:
                del self._running[model]
            if is_last and request.keep_alive_s == 0 and not is_of_gateway:
                task = asyncio.create_task(self._unload(model))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _unload(self, model: str) -> None:
        try:
            await self._backend.unload(UnloadRequest(model_id=model))
        except CortexError as error:
            log.info("%s was not unloaded: %s", model, error.message)
