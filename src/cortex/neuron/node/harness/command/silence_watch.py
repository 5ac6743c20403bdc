"""Watches for responses of which nothing arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cortex.system.tasks import run_once


class SilenceWatch:
    """Has a server checked each time that a response is awaited for `after_s`. Belongs to the loop's thread."""

    def __init__(self, after_s: float, check: Callable[[], Awaitable[None]]) -> None:
        self._after_s = after_s
        self._check = check
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """By request."""

    def begin(self, request_id: str) -> None:
        """The request was sent."""
        self._timers[request_id] = asyncio.get_running_loop().call_later(self._after_s, self._overdue, request_id)

    def end(self, request_id: str) -> None:
        """Some of the response has arrived, or it is awaited no more. May be called repeatedly."""
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

    def clear(self) -> None:
        """No response is awaited any more."""
        for request_id in list(self._timers):
            self.end(request_id)

    def _overdue(self, request_id: str) -> None:
        run_once(self._check_and_go_on(request_id), "check a silent server")

    async def _check_and_go_on(self, request_id: str) -> None:
        await self._check()
        if request_id in self._timers:
            self.begin(request_id)
