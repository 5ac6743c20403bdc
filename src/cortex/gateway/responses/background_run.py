"""A response in the background while it runs, and the clients that follow it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from cortex.gateway.responses.response_object import (
    WholeEvents,
    build_last_event,
    ended_body,
    last_event,
    response_in_event,
)
from cortex.http.head import STREAM_HEADERS
from cortex.http.observer import Outcome
from cortex.http.request import Headers
from cortex.http.server.detached import DetachedExchange
from cortex.http.server.exchange import Exchange
from cortex.wire.dialects.openai_responses.kept import KeptResponse

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Events of one run that are kept for followers."""
MAX_ERROR_BYTES = 1024 * 1024
"""Bytes kept of an error body."""


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str = "The node gave no reason."
    code: str | None = None


class _ErrorEvent(_ErrorBody, frozen=True):
    """The payload of an `error` event, or an error envelope."""

    error: _ErrorBody | None = None


class BackgroundRun:
    """One response in the background: the sink of its exchange, and the keeper of its request."""

    headers: Headers = ()
    capture = None

    def __init__(
        self,
        kept: KeptResponse,
        key_id: str,
        body: bytes,
        on_end: Callable[[BackgroundRun], None],
        *,
        streams: bool,
        max_bytes: int,
    ) -> None:
        """`body` is the response object at the start. With `streams` its events are kept for followers. An event of
        more than `max_bytes` ends the run."""
        self.kept = kept
        self.key_id = key_id
        self.body = body
        """The response object now."""
        self.ended_at: float | None = None
        self.exchange: DetachedExchange | None = None
        self.rejection: tuple[int, bytes] | None = None
        """Status and body of a response that is not a stream: the request was rejected."""
        self.is_announced = False
        """The client has received its id."""
        self.is_written = False
        """Its end is in the database."""
        self.settled = asyncio.Event()
        """Its end was written, or cannot be in time: clients may now see it, and may continue at another gateway."""
        self.num_body_bytes = 0
        """The bytes of its request body; they count as buffered until the run ends."""
        self.streams = streams
        self.events: list[bytes] = []
        self.followers: list[_Follower] = []
        self._on_end = on_end
        self._arriving = WholeEvents(max_bytes)
        self._num_event_bytes = 0
        self._status = 0
        self._error = b""

    # --- the sink of its exchange

    def on_start(self, status: int) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        if self._status != 200:
            self._error += data[: MAX_ERROR_BYTES - len(self._error)]
            if len(self._error) >= MAX_ERROR_BYTES and self.exchange is not None:
                self.exchange.cancel()  # the reason of an error is in its beginning
                self.on_end()
            return
        for event in self._arriving.push(data).split(b"\n\n"):
            if event.startswith(b":"):
                for follower in self.followers:
                    follower.keep_alive(event + b"\n\n")
            elif event:
                self._take(event + b"\n\n")
        if self._arriving.num_dropped:
            reason = "The response has an event that is larger than responses.max_entry_mb of the gateway."
            self.cancel(code="server_error", message=reason)

    def on_end(self) -> None:
        if self._status != 200:
            self.rejection = (self._status, self._error)
        if self.ended_at is None:
            self._fail(self._error)

    # --- the keeper of its request

    def ended(self, status: int, outcome: Outcome) -> None:
        """The exchange has reported everything already."""

    # --- for the runs

    def cancel(self, *, code: str | None = None, message: str = "") -> None:
        """End the run as cancelled, or as failed for a reason. The request to the node is aborted at once."""
        if self.ended_at is None:
            self._end(ended_body(self.body, "cancelled" if code is None else "failed", code=code, message=message))
            if self.exchange is not None:
                self.exchange.cancel()

    def settle(self) -> None:
        """Show the end to clients. Idempotent."""
        self.settled.set()
        for follower in list(self.followers):
            follower.pump()

    async def shown_body(self) -> bytes:
        """The response object now. The end is shown only once it is settled."""
        if self.ended_at is not None:
            await self.settled.wait()
        return self.body

    def follow(self, exchange: Exchange, headers: Headers, starting_after: int) -> None:
        """Send the events after number `starting_after` to a client, and all that follow."""
        exchange.start(200, (*STREAM_HEADERS, *headers))
        follower = _Follower(self, exchange, starting_after + 1)
        self.followers.append(follower)
        exchange.listen(follower)
        follower.pump()

    def _take(self, event: bytes) -> None:
        if self.ended_at is not None:
            return
        if self.streams:
            self._num_event_bytes += len(event)
            if self._num_event_bytes > MAX_EVENT_BYTES:
                reason = f"The response has more than {MAX_EVENT_BYTES} bytes of events; make it without `stream`."
                self.cancel(code="server_error", message=reason)
                return
            self.events.append(event)
        if event.startswith((b"event: response.created\n", b"event: response.in_progress\n")):
            self.body = response_in_event(_payload(event))
        elif payload := last_event(event):
            self._end(response_in_event(payload), is_reported=True)
        elif event.startswith(b"event: error\n"):
            self._fail(_payload(event))
        for follower in self.followers:
            follower.pump()

    def _fail(self, error: bytes) -> None:
        try:
            found = msgspec.json.decode(error, type=_ErrorEvent)
        except msgspec.DecodeError:
            found = _ErrorEvent()
        reason = found.error or found
        self._end(ended_body(self.body, "failed", code=reason.code or "server_error", message=reason.message))

    def _end(self, body: bytes, *, is_reported: bool = False) -> None:
        """The response has ended; `is_reported`: the last event says so."""
        self.body = body
        self.ended_at = time.monotonic()
        if self.streams and not is_reported:
            self.events.append(build_last_event(body, len(self.events)))
        for follower in self.followers:
            follower.pump()
        self._on_end(self)


class _Follower:
    """A client that gets the events of a run, at its own pace."""

    def __init__(self, run: BackgroundRun, exchange: Exchange, position: int) -> None:
        """`position` is the number of the first event to send."""
        self._run = run
        self._exchange = exchange
        self._position = position

    # --- the listener of its exchange

    def on_client_full(self) -> None:
        """`pump` has noticed."""

    def on_client_ready(self) -> None:
        self.pump()

    def on_client_disconnected(self) -> None:
        self._run.followers.remove(self)

    # --- for its run

    def pump(self) -> None:
        events, is_over = self._run.events, self._run.settled.is_set()
        is_last_held = self._run.ended_at is not None and not is_over
        num_shown = len(events) - is_last_held
        while self._position < num_shown and not self._exchange.paused:
            self._exchange.write(events[self._position])
            self._position += 1
        if is_over and self._position >= num_shown:
            self._exchange.finish()

    def keep_alive(self, comment: bytes) -> None:
        if self._position >= len(self._run.events) and not self._exchange.paused:
            self._exchange.write(comment)


def _payload(event: bytes) -> bytes:
    return event.partition(b"\ndata: ")[2].rstrip(b"\n")
