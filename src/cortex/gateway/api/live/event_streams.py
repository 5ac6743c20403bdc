"""Streams of events to clients: how they begin, stay alive, and end. Some follow the work of a node by polls: a
download, a measurement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, Literal, Protocol, TypeVar

from cortex.gateway.ledger.meter import Metering
from cortex.http.head import STREAM_HEADERS
from cortex.http.request import Request
from cortex.http.server.exchange import Exchange
from cortex.wire import sse
from cortex.wire.error_encoding import from_code
from cortex.wire.errors import CortexError, LoadFailed, ModelNotFound

_Access = tuple[str, bool] | None
"""The id of a request's key, and whether it is an operator's; None when the key is not recognised."""


class EventStreams:
    """The open streams of one gateway. Used on the loop's thread only.

    A stream never ends by itself, so a shutdown, which waits for responses, ends all streams first. A stream ends when
    its key is revoked, has expired, or becomes or ceases to be an operator's.
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
        """Called regularly: end the streams of changed keys, and write a comment to the others every `keepalive_s`,
        because proxies close idle connections."""
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


POLL_S = 0.5
MAX_MISSED_POLLS = 60
"""The node may restart or be busy for this many polls before the work counts as failed."""


class WorkStatus(Protocol):
    """What a node reports about the work."""

    @property
    def state(self) -> Literal["running", "done", "failed", "cancelled"]: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def code(self) -> str | None: ...


StatusT = TypeVar("StatusT", bound=WorkStatus)


class FollowedWork(Generic[StatusT]):
    """One piece of work on one node. Owned by the task that runs `outcome`."""

    def __init__(
        self,
        start: Callable[[], Awaitable[StatusT]],
        poll: Callable[[], Awaitable[StatusT]],
        cancel: Callable[[], Awaitable[StatusT]],
        *,
        described: str,
        after_restart: str,
        prepare: Callable[[], Awaitable[None]] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        """`described` names the work, such as "the download on beast". `after_restart` is the error when the node no
        longer knows the work. The work starts after `prepare`, which ends when the work is cancelled."""
        self.status: StatusT | None = None
        self.cancelled = asyncio.Event()
        """Set to cancel the work."""
        self._start, self._poll, self._cancel = start, poll, cancel
        self._described = described
        self._after_restart = after_restart
        self._prepare = prepare
        self._poll_s = poll_s

    async def outcome(self) -> CortexError | None:
        """Why the work failed; None when it is done."""
        try:
            return await self._outcome()
        except CortexError as error:
            return error

    async def _outcome(self) -> CortexError | None:
        if not await self._prepared():
            return LoadFailed(f"{self._described} was cancelled")
        status = self.status = await self._start()
        num_missed = 0
        is_cancelling = False
        while status.state == "running":
            if is_cancelling:
                await asyncio.sleep(self._poll_s)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s):
                        await self.cancelled.wait()
            is_cancelling = self.cancelled.is_set()
            try:
                status = self.status = await (self._cancel() if is_cancelling else self._poll())
                num_missed = 0
            except ModelNotFound:
                return LoadFailed(self._after_restart)
            except CortexError:
                num_missed += 1
                if num_missed >= MAX_MISSED_POLLS:
                    raise
        if status.state == "done":
            return None
        return from_code(status.code or LoadFailed.code, status.reason or f"{self._described} was {status.state}")

    async def _prepared(self) -> bool:
        """Whether the work may start; False if it was cancelled before."""
        if self._prepare is None:
            return True
        preparing = asyncio.ensure_future(self._prepare())
        cancelled = asyncio.create_task(self.cancelled.wait())
        try:
            await asyncio.wait((preparing, cancelled), return_when=asyncio.FIRST_COMPLETED)
            if cancelled.done():
                return False
            await preparing
            return True
        finally:
            preparing.cancel()
            cancelled.cancel()
