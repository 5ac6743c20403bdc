"""Admits HTTP requests while the node serves. Once closed, it rejects new and waiting requests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cortex.wire.errors import ShuttingDown

T = TypeVar("T")


class DrainGate:
    """Counts the requests inside, so that a shutdown knows when the last one has ended. Belongs to one loop."""

    def __init__(self) -> None:
        self._is_closed = False
        self._waiting: set[asyncio.Task[Any]] = set()
        """Tasks within `wait_for`."""
        self._interrupted: frozenset[asyncio.Task[Any]] = frozenset()
        """Tasks among them that `close` has cancelled."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._num_requests = 0

    @property
    def num_requests(self) -> int:
        return self._num_requests

    @property
    def closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """From now on `enter` raises, and so does every `wait_for` in progress."""
        if not self._is_closed:
            self._is_closed = True
            self._interrupted = frozenset(self._waiting)
            for task in self._interrupted:
                task.cancel()

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

    async def wait_for(self, awaited: Coroutine[Any, Any, T]) -> T:
        """The result of `awaited`. If the gate is closed or closes first, cancels it and raises `ShuttingDown`. It runs
        in the caller's task, as within `asyncio.timeout`: each request waits several times."""
        if self._is_closed:
            awaited.close()
            raise _shutting_down()
        task = asyncio.current_task()
        assert task is not None
        if task in self._waiting:  # within another call, which `close` interrupts
            return await awaited
        num_cancels = task.cancelling()
        self._waiting.add(task)
        try:
            return await awaited
        except asyncio.CancelledError:
            if task in self._interrupted and task.uncancel() <= num_cancels:
                raise _shutting_down() from None
            raise
        finally:
            self._waiting.discard(task)

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
