"""An exchange whose client has no connection of its own for the response: it goes to a sink in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cortex.http.request import Headers, Request
from cortex.http.server.exchange import Exchange, ResponseTransport, SwitchedConnection


class DetachedSink(Protocol):
    """Gets a response without its framing."""

    def on_start(self, status: int) -> None:
        """The head; called once, first."""

    def on_data(self, data: bytes) -> None:
        """A part of the body."""

    def on_end(self) -> None:
        """The response is complete or was aborted. Not called for an exchange that was cancelled."""


class _SinkConnection:
    """In place of a client's connection; a `DeferredEnd` may stand before it."""

    def __init__(self, sink: DetachedSink) -> None:
        self.write = sink.on_data
        self.abort = sink.on_end

    @property
    def transport(self) -> ResponseTransport:
        return self

    def exchange_ended(self, keep_alive: bool) -> None:
        del keep_alive  # nothing is served after it
        self.abort()

    def upgrade(self, headers: Headers, switched: SwitchedConnection) -> None:
        del headers, switched
        raise RuntimeError("a detached exchange has no connection")


class DetachedExchange(Exchange):
    """Takes the response to a request that came on no connection of its own."""

    __slots__ = ("_sink",)

    def __init__(self, request: Request, sink: DetachedSink) -> None:
        super().__init__(request, _SinkConnection(sink))
        self._sink = sink

    def cancel(self) -> None:
        """End the request as if its client had disconnected."""
        self.client_disconnected()

    def start(self, status: int, headers: Headers, content_length: int | None = None, first: bytes = b"") -> None:
        del headers, content_length  # nobody reads them
        if self.closed:
            return
        if self.started:
            raise RuntimeError("the response has already been started")
        self.started = True
        self._sink.on_start(status)
        self.write(first)

    def write(self, data: bytes) -> None:
        if self.closed or not data:
            return
        if not self.started:
            raise RuntimeError("start the response before writing to it")
        self.connection.transport.write(data)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        return None

    def finish(self, keep_alive: bool = True) -> None:
        if not self.closed:
            self._end()
            self.connection.exchange_ended(keep_alive)

    def abort(self) -> None:
        if not self.closed:
            self._end()
            self.connection.transport.abort()
