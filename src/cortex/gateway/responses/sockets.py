"""The Responses API over WebSockets: each `response.create` of a connection becomes a request like any other.

Keys, limits, routing and accounting are those of `POST /v1/responses`. The connection remembers its latest responses,
so that its client can continue them even if they are not stored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from cortex.gateway.proxy.routes import INPUT_TOKENS, RESPONSES, InferenceRoute, error_response
from cortex.gateway.proxy.services import Services
from cortex.gateway.responses.response_object import (
    WholeEvents,
    head_of,
    last_event,
    new_response_id,
    response_in_event,
)
from cortex.gateway.responses.stateful import StatefulInference
from cortex.http.composed_body import no_room
from cortex.http.limits import ClientLimits, ClientShares
from cortex.http.request import Request
from cortex.http.server import websocket
from cortex.http.server.detached import DetachedExchange
from cortex.http.server.exchange import Exchange
from cortex.http.server.websocket import WebSocket
from cortex.parsing import items
from cortex.parsing.items import StoredTexts
from cortex.system.tasks import run_once
from cortex.wire.dialects.openai_responses import socket_events
from cortex.wire.dialects.openai_responses.socket_events import ClientEvent
from cortex.wire.errors import CortexError, RateLimitExceeded

log = logging.getLogger(__name__)

MAX_EVENTS = 64
"""Events of one client that wait or are being served."""
MAX_RUNNING = 16
"""Responses of one connection at a time."""
MAX_REMEMBERED = 8
MAX_REMEMBERED_BYTES = 16 << 20
"""Bytes of conversations that one connection remembers."""
MAX_REMEMBERED_BYTES_PER_CLIENT = 64 << 20
MAX_REMEMBERED_BYTES_IN_ALL = 512 << 20
_MAX_EVENT_BYTES = 64 << 20
_MAX_ERROR_BYTES = 1 << 20
_OF_HANDSHAKES = (b"upgrade", b"connection", b"content-type", b"content-length", b"x-request-id")


class ResponseSockets:
    """Opens the connections. One per gateway."""

    def __init__(self, services: Services, stateful: StatefulInference, limits: ClientLimits) -> None:
        self._services = services
        self._stateful = stateful
        self._limits = limits
        self._shares = ClientShares(MAX_REMEMBERED_BYTES_IN_ALL, MAX_REMEMBERED_BYTES_PER_CLIENT)
        """Bytes that all connections remember, by key or address."""

    def open(self, exchange: Exchange) -> None:
        """Upgrade a connection whose client was authenticated. Raises the CortexError of an invalid handshake."""
        services, request = self._services, exchange.request
        key = services.admission.meter.key(request)
        socket = WebSocket(self._limits, services.buffered)
        client = key.id if key is not None else request.client
        remembered = RememberedResponses(self._shares, client)
        socket.listen(ResponseSocket(socket, services, self._stateful, request, client, remembered))
        exchange.upgrade(websocket.accept_headers(request), socket)


class ResponseSocket:
    """One connection. Requests of one lane run in turn, those of different lanes concurrently."""

    def __init__(
        self,
        socket: WebSocket,
        services: Services,
        stateful: StatefulInference,
        request: Request,
        client: str,
        remembered: RememberedResponses,
    ) -> None:
        """`request`: the handshake, whose key applies to every response. `client`: see `client_of`."""
        self.socket = socket
        self.services = services
        self.remembered = remembered
        self._stateful = stateful
        self._client = client
        self._request = request
        self._headers = [
            *(
                pair
                for pair in request.headers
                if pair[0] not in _OF_HANDSHAKES and not pair[0].startswith(b"sec-websocket-")
            ),
            (b"content-type", b"application/json"),
        ]
        self._unread: deque[bytes] = deque()
        """Messages, in their order."""
        self._is_reading = False
        self._lanes: dict[str | None, deque[ClientEvent]] = {}
        """Events that wait for the running response of their lane."""
        self._running: dict[str | None, _Run] = {}
        self._is_closed = False

    # --- the listener of its connection

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._unread and not self._lanes

    def on_message(self, text: bytes) -> None:
        waiting = len(self._unread) + len(self._running) + sum(map(len, self._lanes.values()))
        if waiting >= MAX_EVENTS:
            self._reject(RateLimitExceeded(f"{waiting} events of this connection are waiting; send fewer at a time."))
        elif not self.services.buffered.has_room(len(text)):
            self._reject(no_room())
        else:
            self.services.buffered.num_bytes += len(text)
            self._unread.append(text)
            if not self._is_reading:
                self._is_reading = True
                run_once(self._read(), "read events of a connection")

    def on_client_full(self) -> None:
        for run in tuple(self._running.values()):
            run.exchange.client_full()

    def on_client_ready(self) -> None:
        for run in tuple(self._running.values()):
            if not self.socket.is_full:
                run.exchange.client_ready()

    def on_closed(self) -> None:
        self._is_closed = True
        self.remembered.clear()
        for text in self._unread:
            self._release(text)
        for waiting in self._lanes.values():
            for event in waiting:
                self._release(event.body)
        self._unread.clear()
        self._lanes.clear()
        running, self._running = self._running, {}
        for run in running.values():
            self._release(run.body)
            run.exchange.cancel()

    # --- for its runs

    def ended(self, run: _Run) -> None:
        """The response of a run is complete."""
        if self._is_closed:
            return
        del self._running[run.stream_id]
        self._release(run.body)
        asyncio.get_running_loop().call_soon(self._start_waiting)  # not here: requests that fail at once would nest

    # ---

    def _release(self, body: bytes) -> None:
        self.services.buffered.num_bytes -= len(body)

    def _reject(self, error: CortexError) -> None:
        self.socket.send(socket_events.error_message(error))

    async def _read(self) -> None:
        """Read messages in order, large ones in another process."""
        try:
            while self._unread:
                text = self._unread[0]
                try:
                    read = await self.services.parser.run(socket_events.read_event, body=text, client=self._client)
                except CortexError as error:
                    read = None
                    self._reject(error)
                if self._is_closed:
                    return
                self._unread.popleft()
                self._release(text)
                if read is not None:
                    self._take(read)
        finally:
            self._is_reading = False

    def _take(self, event: ClientEvent) -> None:
        if event.steers:
            self.socket.send(socket_events.steering_rejected(event.body))
            return
        self.services.buffered.num_bytes += len(event.body)
        self._lanes.setdefault(event.stream_id, deque()).append(event)
        self._start_waiting()

    def _start_waiting(self) -> None:
        for stream_id, waiting in list(self._lanes.items()):
            if len(self._running) >= MAX_RUNNING:
                return
            if stream_id not in self._running and self._lanes.get(stream_id) is waiting:
                event = waiting.popleft()
                if not waiting:
                    del self._lanes[stream_id]
                self._start(event)

    def _start(self, event: ClientEvent) -> None:
        route = RESPONSES if event.generates else INPUT_TOKENS
        request = Request(b"POST", route.path, b"", self._headers, event.body, self._request.client)
        run = self._running[event.stream_id] = _Run(self, event, request, route)
        if self.socket.is_full:
            run.exchange.client_full()
        try:
            self._stateful.begin(run.exchange, route, run)
        except Exception:  # as `ClientConnection`: a bug must not leave a lane waiting
            log.exception("a response over a WebSocket failed")
            if not run.exchange.closed:
                run.exchange.respond(*error_response(CortexError("Internal error of the gateway."), route.family))


class _Run:
    """One response: the sink of its exchange, and its turn."""

    def __init__(self, owner: ResponseSocket, event: ClientEvent, request: Request, route: InferenceRoute) -> None:
        self.stream_id = event.stream_id
        self.body = event.body
        self.exchange = DetachedExchange(request, self)
        self._owner = owner
        self._generates = route.generates
        self._status = 0
        self._events = WholeEvents(_MAX_EVENT_BYTES)
        self._whole = b""
        """A body that is no stream."""
        self._earlier: Sequence[StoredTexts] = ()
        self._input: Raw | bytes = b"[]"

    # --- the turn of its request

    def remembered(self, response_id: str) -> Sequence[StoredTexts] | None:
        return self._owner.remembered.chain(response_id)

    def begins(self, earlier: Sequence[StoredTexts], input: Raw | bytes) -> None:
        self._earlier, self._input = earlier, input

    # --- the sink of its exchange

    def on_start(self, status: int) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        if self._status != 200 or not self._generates:
            self._whole += data[: _MAX_ERROR_BYTES - len(self._whole)]
            return
        whole = self._events.push(data)
        if (payload := last_event(whole)) is not None:
            self._remember(response_in_event(payload))
        for event in whole.split(b"\n\n"):
            if (message := socket_events.message_of(event, self.stream_id)) is not None:
                self._owner.socket.send(message)

    def on_end(self) -> None:
        if self._status != 200:
            message = socket_events.rejection_message(self._status or 500, self._whole, self.stream_id)
            self._owner.socket.send(message)
        elif not self._generates:
            try:
                self._prepared()
            except msgspec.DecodeError:  # the node's response was cut off
                self._owner.socket.send(socket_events.rejection_message(502, b"", self.stream_id))
        self._owner.ended(self)

    # ---

    def _remember(self, response: bytes) -> None:
        self._owner.remembered.add(head_of(response).id, self._earlier, self._input, response)

    def _prepared(self) -> None:
        """The request was valid and needs no output: report a response that can be continued."""
        prepared = socket_events.prepared(self.body, self._whole, id=new_response_id(), created=int(time.time()))
        self._remember(msgspec.json.encode(prepared))
        for message in socket_events.prepared_messages(prepared, self.stream_id):
            self._owner.socket.send(message)


class RememberedResponses:
    """The latest responses of a connection with their conversations. Older ones, and those beyond its client's share,
    are dropped."""

    def __init__(self, shares: ClientShares, client: str) -> None:
        self._shares = shares
        self._client = client
        self._chains: dict[str, tuple[StoredTexts, ...]] = {}
        self._num_bytes = 0
        """The client, as in the shares."""

    def chain(self, response_id: str) -> Sequence[StoredTexts] | None:
        """The response and those that it continues, oldest first."""
        return self._chains.get(response_id)

    def add(self, id: str, earlier: Sequence[StoredTexts], input: Raw | bytes, response: bytes) -> None:
        """Remember a response that has ended."""
        if memoryview(input).nbytes + len(response) > MAX_REMEMBERED_BYTES:
            return
        own = msgspec.json.encode(items.split(input)) if isinstance(input, Raw) else input
        self._chains.pop(id, None)
        self._chains[id] = (*earlier, StoredTexts(id, own, response))
        while self._chains and not self._is_within_limits():
            del self._chains[next(iter(self._chains))]
        self._count()

    def clear(self) -> None:
        self._chains.clear()
        self._count()

    def _is_within_limits(self) -> bool:
        num_bytes = self._counted()
        has_room = self._shares.has_room(self._client, num_bytes - self._num_bytes)
        return has_room and num_bytes <= MAX_REMEMBERED_BYTES and len(self._chains) <= MAX_REMEMBERED

    def _count(self) -> None:
        num_bytes = self._counted()
        self._shares.add(self._client, num_bytes - self._num_bytes)
        self._num_bytes = num_bytes

    def _counted(self) -> int:
        """Bytes of all texts; chains share texts, which count once."""
        texts = {id(text): text for chain in self._chains.values() for text in chain}.values()
        return sum(len(text.input) + len(text.body) for text in texts)
