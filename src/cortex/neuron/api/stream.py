"""A streamed HTTP response with keepalives."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from cortex.http.head import stream_headers
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.http.ticker import Ticker
from cortex.wire import sse


class EventSource(Protocol):
    """Produces the events of a stream, except between `pause` and `resume`."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class EventStream:
    """A response in events or lines. Use as an async context manager, which ends the response unless it raises.

    Nothing is sent before the first write, so that an early error can still be an HTTP error. After `keepalive_s`
    without a write a keepalive is sent, with the headers if they were not sent yet.
    """

    def __init__(
        self,
        exchange: Exchange,
        ticker: Ticker,
        *,
        keepalive: bytes,
        keepalive_s: float,
        headers: Headers = (),
        content_type: str = sse.CONTENT_TYPE,
        source: EventSource | None = None,
    ) -> None:
        """`source`: the producer of events, if it calls `send`."""
        self._exchange = exchange
        self._source = source
        self._ticker = ticker
        self._keepalive = keepalive
        self._keepalive_s = keepalive_s
        self._headers = (*stream_headers(content_type), *headers)
        self._has_written = False
        """Whether something was written since the last tick; cheaper per event than reading the clock."""
        self._written_at = ticker.loop.time()
        self._ready: asyncio.Future[None] | None = None
        """Set by a writer that waits until the client has read more."""

    @property
    def opened(self) -> bool:
        """Whether the headers were sent; from then on an error can only be an event of the stream."""
        return self._exchange.started

    async def __aenter__(self) -> Self:
        self._exchange.listen(self)
        self._ticker.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.discard(self)
        if kind is None:
            if not self._exchange.started:
                self._exchange.start(200, self._headers)
            self._exchange.finish()

    def send(self, data: bytes) -> None:
        """Never waits: `source` is paused while the client's buffer is full. A no-op for a disconnected client."""
        exchange = self._exchange
        self._has_written = True
        if exchange.started:
            exchange.write(data)
        else:
            exchange.start(200, self._headers, None, data)

    async def write(self, data: bytes) -> None:
        """Returns when the client's buffer has room for more."""
        self.send(data)
        if self._exchange.paused:
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready

    # --- the ticker's callback

    def on_tick(self, now: float) -> None:
        """Send a keepalive if nothing was written for a while and the client reads."""
        if self._has_written:
            self._has_written = False
            self._written_at = now
        exchange = self._exchange
        if now - self._written_at < self._keepalive_s or exchange.paused:
            return
        self._written_at = now
        if exchange.started:
            exchange.write(self._keepalive)
        else:
            exchange.start(200, self._headers, None, self._keepalive)

    # --- the listener of the exchange

    def on_client_full(self) -> None:
        if self._source is not None:
            self._source.pause()

    def on_client_ready(self) -> None:
        if self._source is not None:
            self._source.resume()
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def on_client_disconnected(self) -> None:
        """The task of the request is cancelled."""
