"""A streamed HTTP response with keepalives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from aiohttp import web

from cortex.tasks import run_once
from cortex.wire import sse

HEADERS = {
    "content-type": sse.CONTENT_TYPE,
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class EventStream:
    """An SSE response. Use as an async context manager.

    Nothing is sent before the first write, so that an early error can still be an HTTP error. After `keepalive_s`
    without a write a keepalive is sent, with the headers if they were not sent yet.
    """

    def __init__(
        self, request: web.Request, *, keepalive: bytes, keepalive_s: float, headers: Mapping[str, str]
    ) -> None:
        self.response = web.StreamResponse(headers={**HEADERS, **headers})
        self._request = request
        self._keepalive = keepalive
        self._keepalive_s = keepalive_s
        self._opening = asyncio.Lock()
        self._last_write_s = time.monotonic()
        self._ticker: asyncio.Task[None] | None = None

    @property
    def opened(self) -> bool:
        """Whether the headers were sent; from then on an error can only be an event of the stream."""
        return self.response.prepared

    async def __aenter__(self) -> Self:
        self._ticker = run_once(self._tick(), "keepalives of a stream")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)

    async def write(self, data: bytes) -> None:
        """Raises `ConnectionError` when the client has disconnected."""
        if not self.response.prepared:
            await self._open()
        self._last_write_s = time.monotonic()
        await self.response.write(data)

    async def _open(self) -> None:
        async with self._opening:
            if not self.response.prepared:
                await self.response.prepare(self._request)

    async def _tick(self) -> None:
        while True:
            idle_s = time.monotonic() - self._last_write_s
            if idle_s < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - idle_s)
                continue
            try:
                await self.write(self._keepalive)
            except ConnectionError:
                return  # the next `write` raises it too and ends the request
