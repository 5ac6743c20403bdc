"""Who may come in. Open while the node serves; once closed, nobody enters and waiting guests leave at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from cortex.wire.errors import ShuttingDown

T = TypeVar("T")


class DrainGate:
    """Belongs to one loop. Counts the requests inside, so that a shutdown knows when the last one left."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    @property
    def inside(self) -> int:
        return self._inside

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """From now on nobody enters, and whoever is in `wait_for` is sent away."""
        self._closing.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """One request's stay. Raises `ShuttingDown` when closed."""
        if self.closed:
            raise _closed()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    async def wait_for(self, awaited: Awaitable[T]) -> T:
        """The result of `awaited`, unless the doors close first: then it is cancelled and `ShuttingDown` raised."""
        task = asyncio.ensure_future(awaited)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _closed()
        finally:
            closing.cancel()
            task.cancel()

    async def drained(self, timeout_s: float) -> bool:
        """Waits until nobody is inside, at most `timeout_s`; whether that came about."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


def _closed() -> ShuttingDown:
    return ShuttingDown("This node is shutting down; try again, on another node or once it is back.", retry_after_s=5)
