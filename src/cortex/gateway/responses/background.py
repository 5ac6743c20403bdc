"""Responses in the background: the client gets an id at once, and polls, follows or cancels the response with it.

The gateway that got the request runs it and renews it in the database, so that any gateway on the same database can
report it, cancel it, or detect that it was lost. A run is a normal request to a node, with a client that cannot
disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from cortex.gateway.proxy.admission import ReceivedRequest
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.routes import JSON_HEADERS
from cortex.gateway.responses.response_object import (
    WholeEvents,
    build_last_event,
    ended_body,
    head_of,
    last_event,
    response_in_event,
    without_output,
)
from cortex.gateway.responses.store import ResponseStore
from cortex.gateway.responses.tables import NewResponse, StoredResponse
from cortex.http.composed_body import no_room
from cortex.http.head import STREAM_HEADERS
from cortex.http.observer import Outcome
from cortex.http.request import Headers, Request
from cortex.http.server.detached import DetachedExchange
from cortex.http.server.exchange import Exchange
from cortex.system.tasks import SupervisedTask, Supervisor
from cortex.wire.dialects.openai_responses.kept import KeptResponse
from cortex.wire.dialects.openai_responses.response import response_body
from cortex.wire.errors import InvalidValue, Overloaded

log = logging.getLogger(__name__)

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Events of one run that are kept for followers."""
MAX_ERROR_BYTES = 1024 * 1024
"""Bytes kept of an error body."""
RENEW_S = 2.0
LOST_AFTER_S = 60.0
"""A run that was not renewed for this long has died with its gateway."""
LINGER_S = 60.0
"""How long a run stays in memory after its end, for clients that follow it late."""
MAX_UNWRITTEN_S = 3600.0
"""How long a completed run stays in memory while its end cannot be written."""


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


def current_body(stored: StoredResponse, now_s: float) -> bytes:
    """The response object to show. A run whose gateway is gone has failed."""
    is_alive = stored.renewed_s is not None and now_s - stored.renewed_s < LOST_AFTER_S
    if stored.is_finished or is_alive:
        return stored.body.encode()
    reason = "The gateway that ran this response ended before it was complete. Send the request again."
    return ended_body(stored.body, "failed", code="server_error", message=reason)


class BackgroundRuns:
    """The runs of this gateway."""

    def __init__(self, inference: Inference, store: ResponseStore, tasks: Supervisor) -> None:
        self._inference = inference
        self._store = store
        self._tasks = tasks
        self._runs: dict[str, BackgroundRun] = {}
        """Active runs, and those that ended within `LINGER_S`."""
        self._num_starting = 0
        """Requests that have reserved a place among the runs."""
        self._writing: set[asyncio.Task[None]] = set()
        self._renewing: SupervisedTask | None = None

    def start(self) -> None:
        self._renewing = self._tasks.every(RENEW_S, "background responses", self._renew)

    async def close(self, grace_s: float = 0.0) -> None:
        """Wait for running responses for up to `grace_s`; the others end as failed."""
        deadline = time.monotonic() + grace_s
        while self._running() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for run in self._running():
            run.cancel(code="shutting_down", message="The gateway was shut down. Send the request again.")
        if self._renewing is not None:
            self._renewing.cancel()
            await self._renewing.ended()
        await asyncio.gather(*self._writing, return_exceptions=True)

    def find(self, key_id: str, id: str) -> BackgroundRun | None:
        """The run of a response that belongs to the key, while it is in memory."""
        run = self._runs.get(id)
        return run if run is not None and run.key_id == key_id else None

    def forget(self, id: str) -> None:
        """The response was deleted: end its run."""
        if run := self._runs.pop(id, None):
            run.cancel()

    async def begin(
        self,
        received: ReceivedRequest,
        streamed: ReceivedRequest,
        *,
        kept: KeptResponse,
        key_id: str,
        stored_input: bytes,
    ) -> None:
        """Run `streamed`, which is `received` as a node gets it. The client gets the queued response, or its events.

        Raises the CortexError of a request that cannot run.
        """
        num_running = len(self._running()) + self._num_starting
        if num_running >= self._store.section.max_background:
            raise Overloaded(
                f"{num_running} responses run in the background, which is the limit "
                "(responses.max_background); try again later.",
                retry_after_s=10.0,
            )
        buffered, num_bytes = self._inference.services.buffered, len(streamed.body)
        if not buffered.has_room(num_bytes):
            raise no_room()
        self._num_starting += 1  # before anything is awaited, so that no other request takes the same place
        buffered.num_bytes += num_bytes
        run: BackgroundRun | None = None
        try:
            run = await self._begin(received, streamed, kept, key_id, stored_input)
        finally:
            self._num_starting -= 1
            if run is None or run.ended_at is not None:
                buffered.num_bytes -= num_bytes
            else:
                run.num_body_bytes = num_bytes

    async def _begin(
        self,
        received: ReceivedRequest,
        streamed: ReceivedRequest,
        kept: KeptResponse,
        key_id: str,
        stored_input: bytes,
    ) -> BackgroundRun | None:
        """The run; None for a request that was rejected."""
        parsed = await self._inference.services.parser.parse("openai_responses", streamed.body, received.client)
        request = kept.described(parsed.head)
        created = int(self._store.clock())
        body = response_body(request, id=kept.id, created=created, model=request.model) | {"status": "queued"}
        queued = msgspec.json.encode(body)
        if len(stored_input) + len(queued) > self._store.max_entry_bytes:
            raise InvalidValue(
                "background: the request is too large to be stored (responses.max_entry_mb).", param="input"
            )
        await self._store.add(
            NewResponse(
                kept.id, key_id, kept.previous_response_id, "queued", stored_input, queued, kept.conversation_id
            )
        )
        streams, max_bytes = received.envelope.summary.stream, self._store.max_entry_bytes
        run = BackgroundRun(kept, key_id, queued, self._ended, streams=streams, max_bytes=max_bytes)
        run.exchange = DetachedExchange(_without_body(received.exchange.request), run)
        self._runs[kept.id] = run
        self._inference.serve(msgspec.structs.replace(streamed, exchange=run.exchange), run)
        headers = received.route.id_headers(received.id)
        if run.rejection is not None:
            del self._runs[kept.id]
            await self._store.delete(key_id, kept.id)
            status, error = run.rejection
            received.exchange.respond(status, (*JSON_HEADERS, *headers), error)
            return None
        run.is_announced = True
        if run.streams:
            run.follow(received.exchange, headers, starting_after=-1)
        else:
            received.exchange.respond(200, (*JSON_HEADERS, *headers), queued)
        return run

    def _running(self) -> list[BackgroundRun]:
        return [run for run in self._runs.values() if run.ended_at is None]

    def _ended(self, run: BackgroundRun) -> None:
        self._inference.services.buffered.num_bytes -= run.num_body_bytes
        run.num_body_bytes = 0
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._write_end(run))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        # If only this gateway continues the response, the next request follows its end in the store anyway.
        is_awaited = self._store.database.is_shared or run.kept.conversation_id is not None
        loop.call_later(self._inference.services.limits.max_held_s if is_awaited else 0, run.settle)

    async def _write_end(self, run: BackgroundRun) -> None:
        try:
            if run.is_announced:
                await self._write(run)
        finally:
            run.settle()

    async def _write(self, run: BackgroundRun) -> None:
        body = run.body
        if len(body) > self._store.max_entry_bytes:
            self._store.too_large()
            reason = "The response is larger than responses.max_entry_mb of the gateway."
            body = without_output(ended_body(run.body, "failed", code="server_error", message=reason))
        try:
            await self._store.finish(run.kept.id, run.key_id, head_of(body).status, body)
            run.is_written = True
        except Overloaded:
            log.warning("the end of background response %s is kept in memory until it can be stored", run.kept.id)
        except Exception:  # one that can never be stored must not stop the others; it is shown as failed
            log.exception("the end of background response %s could not be stored", run.kept.id)
            run.is_written = True

    async def _renew(self) -> None:
        now = time.monotonic()
        for id, run in list(self._runs.items()):
            age_s = 0.0 if run.ended_at is None else now - run.ended_at
            if age_s > RENEW_S and not run.is_written:
                await self._write_end(run)
            if age_s > (LINGER_S if run.is_written else MAX_UNWRITTEN_S):
                self._runs.pop(id, None)
        running = [run.kept.id for run in self._running()]
        with contextlib.suppress(Overloaded):  # reported by the store
            for id in await self._store.renew(running) if running else ():
                self.forget(id)


def _without_body(request: Request) -> Request:
    """`request` without its body, which may be large and is sent from another copy."""
    return Request(request.method, request.path, request.query, request.headers, b"", request.client)
