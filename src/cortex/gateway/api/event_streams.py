"""Streams of events to clients: how they begin, stay alive, and end."""

from __future__ import annotations

from collections.abc import Callable

from cortex.gateway.ledger.meter import Metering
from cortex.http.request import Request
from cortex.http.response_head import STREAM_HEADERS
from cortex.http.server.exchange import Exchange
from cortex.wire import sse
from cortex.wire.errors import CortexError

_Access = tuple[str, bool] | None
"""The id of a request's key, and whether it is an operator's; None when the key is not recognised."""


class EventStreams:
    """The open streams of one gateway. Used on the loop's thread only.

    A stream never ends by itself, so a shutdown ends them all first: it would wait for them otherwise. A stream ends
    when its key is revoked, has expired, or becomes or ceases to be an operator's.
    """

    def __init__(self, clock: Callable[[], float], metering: Metering) -> None:
        self._clock = clock
        self._metering = metering
        self._open: dict[Exchange, Callable[[], None]] = {}
        self._access: dict[Exchange, _Access] = {}
        self._kept_alive_at = clock()

    def begin(self, exchange: Exchange) -> None:
        """Send the head of the response. Events may be written from now on."""
        exchange.start(200, STREAM_HEADERS)
        exchange.write(sse.COMMENT)

    def keep(self, exchange: Exchange, unsubscribe: Callable[[], None]) -> None:
        """Keep the stream open, and call `unsubscribe` once, when it has ended. Its key was checked in this turn of
        the loop."""
        self._open[exchange] = unsubscribe
        self._access[exchange] = self._access_of(exchange.request)
        exchange.on_disconnect(lambda: self._ended(exchange))

    def tick(self, keepalive_s: float) -> None:
        """Called regularly: end the streams of keys that have changed, and write a comment to every other one once in
        `keepalive_s`, because proxies close idle ones."""
        for exchange, access in tuple(self._access.items()):
            if self._access_of(exchange.request) != access:
                self._end(exchange)
        if self._clock() - self._kept_alive_at < keepalive_s:
            return
        self._kept_alive_at = self._clock()
        for exchange in self._open:
            if not exchange.paused:
                exchange.write(sse.COMMENT)

    def close(self) -> None:
        """End every stream. Browsers connect again by themselves."""
        for exchange in tuple(self._open):
            self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        self._ended(exchange)
        exchange.finish(keep_alive=False)

    def _ended(self, exchange: Exchange) -> None:
        self._access.pop(exchange, None)
        unsubscribe = self._open.pop(exchange, None)
        if unsubscribe is not None:
            unsubscribe()

    def _access_of(self, request: Request) -> _Access:
        try:
            key = self._metering.meter.key(request)
        except CortexError:
            return None
        return ("", True) if key is None else (key.id, key.operator)
