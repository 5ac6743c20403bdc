"""Admits HTTP requests while the node serves. Once closed, it rejects new requests and those that still wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from cortex.wire.errors import ShuttingDown

T = TypeVar("T")


class DrainGate:
    """Counts the requests inside, so that a shutdown knows when the last one has ended. Belongs to one loop."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._num_requests = 0

    @property
    def num_requests(self) -> int:
        return self._num_requests

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """From now on `enter` raises, and so does every `wait_for` in progress."""
        self._closing.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Counts one request. Raises `ShuttingDown` when closed."""
        if self.closed:
            raise _shutting_down()
        self._num_requests += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if self._num_requests == 0:
                self._empty.set()

    async def wait_for(self, awaited: Awaitable[T]) -> T:
        """The result of `awaited`. If the gate closes first, cancels it and raises `ShuttingDown`."""
        task = asyncio.ensure_future(awaited)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _shutting_down()
        finally:
            closing.cancel()
            task.cancel()

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no request is inside, at most `timeout_s`. Returns whether none is."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("This node is shutting down; try again, on another node or once it is back.", retry_after_s=5)
