"""An exchange whose client does not wait: the response goes to a sink in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from cortex.http.request import Headers, Request
from cortex.http.server.exchange import Exchange, ResponseTransport


class DetachedSink(Protocol):
    """Gets a response without its framing."""

    def on_start(self, status: int) -> None:
        """The head; called once, first."""

    def on_data(self, data: bytes) -> None:
        """A part of the body."""

    def on_end(self) -> None:
        """The response is complete or was aborted. Not called for an exchange that was cancelled."""


class _NoConnection:
    """In place of a client's connection."""

    @property
    def transport(self) -> ResponseTransport:
        raise RuntimeError("a detached exchange has no connection")

    def exchange_ended(self, keep_alive: bool) -> None:
        """Nothing is served after it."""

    def upgrade(self, *_: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raise RuntimeError("a detached exchange has no connection")


class DetachedExchange(Exchange):
    """Takes the response to a request whose client already has a first response and asks for this one later."""

    __slots__ = ("_sink",)

    def __init__(self, request: Request, sink: DetachedSink) -> None:
        super().__init__(request, _NoConnection())
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
        if first:
            self._sink.on_data(first)

    def write(self, data: bytes) -> None:
        if self.closed or not data:
            return
        if not self.started:
            raise RuntimeError("start the response before writing to it")
        self._sink.on_data(data)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        return None

    def finish(self, keep_alive: bool = True) -> None:
        del keep_alive
        if not self.closed:
            self._end()
            self._sink.on_end()

    def abort(self) -> None:
        self.finish()
