"""Holds back the end of a response until something else has happened, as a write to a database."""

from __future__ import annotations

import asyncio

from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange, ExchangeConnection, ResponseTransport, SwitchedConnection


class DeferredEnd:
    """Stands between an exchange and its connection. Used on the loop's thread.

    Everything passes until `hold`. What the exchange writes from then on, its end included, is kept until `release`,
    which may come more than once. After `max_held_s`, and beyond `max_bytes`, everything is released by itself.
    """

    def __init__(self, connection: ExchangeConnection, max_bytes: int, max_held_s: float) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._max_held_s = max_held_s
        self._held: list[bytes] = []
        self._num_held_bytes = 0
        self._is_holding = False
        self._is_released = False
        self._timer: asyncio.TimerHandle | None = None
        self._keep_alive: bool | None = None
        """How the exchange ended while it was held; None: it has not."""

    @classmethod
    def of(cls, exchange: Exchange, max_bytes: int, max_held_s: float) -> DeferredEnd:
        """For the response of `exchange`, which has not begun."""
        held = cls(exchange.connection, max_bytes, max_held_s)
        exchange.connection = held
        return held

    def hold(self) -> None:
        """Keep what is written from now on. Idempotent."""
        if not self._is_released and not self._is_holding:
            self._is_holding = True
            self._timer = asyncio.get_running_loop().call_later(self._max_held_s, self.release)

    def release(self) -> None:
        """Send what was kept. Nothing is held from now on."""
        self._is_released = True
        if not self._is_holding:
            return
        self._stop()
        held, self._held = self._held, []
        if held:
            self._connection.transport.write(b"".join(held))
        if self._keep_alive is not None:
            self._connection.exchange_ended(self._keep_alive)

    # --- the connection of the exchange

    @property
    def transport(self) -> ResponseTransport:
        return self

    def exchange_ended(self, keep_alive: bool) -> None:
        if self._is_holding:
            self._keep_alive = keep_alive
        else:
            self._connection.exchange_ended(keep_alive)

    def upgrade(self, headers: Headers, switched: SwitchedConnection) -> None:
        self._connection.upgrade(headers, switched)

    # --- its transport

    def write(self, data: bytes) -> None:
        if not self._is_holding:
            self._connection.transport.write(data)
            return
        self._held.append(data)
        self._num_held_bytes += len(data)
        if self._num_held_bytes > self._max_bytes:
            self.release()

    def abort(self) -> None:
        self._is_released = True
        self._stop()
        self._held.clear()
        self._connection.transport.abort()

    def _stop(self) -> None:
        self._is_holding = False
        if self._timer is not None:
            self._timer.cancel()
