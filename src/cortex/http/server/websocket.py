"""A client's connection after it has switched to the WebSocket protocol: messages instead of requests."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from typing import Protocol

from cortex.http.limits import Buffered, ClientLimits
from cortex.http.request import Headers, Request
from cortex.http.server.exchange import SwitchedConnection
from cortex.http.server.websocket_frames import (
    CloseCode,
    FrameReader,
    Message,
    Opcode,
    WebSocketFault,
    encode,
    encode_close,
)
from cortex.wire.errors import InvalidValue

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def is_handshake(request: Request) -> bool:
    """Whether a client asks for this protocol."""
    return request.method == b"GET" and (request.header(b"upgrade") or b"").lower() == b"websocket"


def accept_headers(request: Request) -> Headers:
    """The headers of the response that accepts a handshake. Raises InvalidValue."""
    key = request.header(b"sec-websocket-key") or b""
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        is_key = False
    tokens = {token.strip().lower() for token in (request.header(b"connection") or b"").split(b",")}
    if not is_key or request.header(b"sec-websocket-version") != b"13" or b"upgrade" not in tokens:
        raise InvalidValue(
            "The handshake must have `Connection: Upgrade`, `Sec-WebSocket-Version: 13` and a `Sec-WebSocket-Key`."
        )
    digest = hashlib.sha1(key + _GUID, usedforsecurity=False).digest()
    return ((b"upgrade", b"websocket"), (b"sec-websocket-accept", base64.b64encode(digest)))


class MessageListener(Protocol):
    """What a connection reports. All calls come on the loop's thread."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs for the client, so that the connection may close."""

    def on_message(self, text: bytes) -> None:
        """A message; it may be invalid UTF-8."""

    def on_client_full(self) -> None:
        """The client's buffer is full: send no more for now. No message comes until it has room."""

    def on_client_ready(self) -> None:
        """The client's buffer has room again."""

    def on_closed(self) -> None:
        """The connection has ended; called once, last. Nothing can be sent any more."""


class WebSocket(SwitchedConnection):
    """Sends and receives messages. A client that reads nothing for `stall_s`, responds to no ping for that long, or
    breaks the protocol is disconnected, and so is one that uses the connection no more."""

    def __init__(self, limits: ClientLimits, buffered: Buffered) -> None:
        self._limits = limits
        self._buffered = buffered
        self._reader = FrameReader(limits.body_bytes)
        self._num_counted_bytes = 0
        """Of the arriving message, among those that are buffered."""
        self._listener: MessageListener | None = None
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._asked_at = self._loop.time()
        """When anything came, and when a message did."""
        self._pinged_at: float | None = None
        """When a ping was sent after which nothing came."""
        self._stalled_at: float | None = None
        self._closing_at: float | None = None
        """When this side began to close."""
        self._retiring = False

    def listen(self, listener: MessageListener) -> None:
        """Call it once, before the connection switches."""
        self._listener = listener

    @property
    def is_full(self) -> bool:
        """Whether the client reads more slowly than we write."""
        return self._stalled_at is not None

    def send(self, text: bytes) -> None:
        """Send a message. Does nothing once the connection closes."""
        if self._closing_at is None:
            self.transport.write(encode(Opcode.TEXT, text))

    def close(self, code: CloseCode, reason: str) -> None:
        """Begin to close: the client has a moment for its own close frame."""
        if self._closing_at is None:
            self._closing_at = self._loop.time()
            self.transport.write(encode_close(code, reason))

    # --- of a switched connection

    @property
    def is_idle(self) -> bool:
        return self._listener is None or self._listener.is_idle

    def retire(self) -> None:
        self._retiring = True
        if self.is_idle and not self.is_full:
            self.close(CloseCode.GOING_AWAY, "the server is shutting down; connect again")

    def on_tick(self, now: float) -> None:
        limits = self._limits
        if self._stalled_at is not None and now - self._stalled_at > limits.stall_s:
            self.transport.abort()
        elif self._closing_at is not None:
            if now - self._closing_at > limits.linger_s:
                self.transport.abort()
        elif self._retiring:
            self.retire()
        elif self._pinged_at is not None:
            if now - self._pinged_at > limits.stall_s:
                self.transport.abort()
        elif now - self._asked_at > limits.unused_s and self.is_idle:
            self.close(CloseCode.GOING_AWAY, "no request for a long time; connect again")
        elif now - self._heard_at > limits.ping_s and not self.is_full:
            self._pinged_at = now
            self.transport.write(encode(Opcode.PING, b""))

    # --- the transport's callbacks

    def data_received(self, data: bytes) -> None:
        if self._listener is None:
            return
        self._heard_at, self._pinged_at = self._loop.time(), None
        try:
            messages = self._reader.feed(data)
            self._count(self._reader.num_held_bytes)
            for message in messages:
                self._receive(message)
        except WebSocketFault as fault:
            self.close(fault.code, str(fault))
            self._end()

    def _receive(self, message: Message) -> None:
        if message.opcode is Opcode.TEXT and self._closing_at is None and self._listener is not None:
            self._asked_at = self._heard_at
            self._listener.on_message(message.payload)
        elif message.opcode is Opcode.PING and not self.is_full:
            self.transport.write(encode(Opcode.PONG, message.payload))
        elif message.opcode is Opcode.CLOSE:
            self.close(CloseCode.NORMAL, "")
            self.transport.close()

    def _count(self, num_bytes: int) -> None:
        more = num_bytes - self._num_counted_bytes
        self._num_counted_bytes = num_bytes
        self._buffered.num_bytes += more
        if more > 0 and not self._buffered.has_room():
            raise WebSocketFault(CloseCode.TRY_AGAIN_LATER, "too many requests are in memory; try again later")

    def eof_received(self) -> None:
        self.transport.close()

    def pause_writing(self) -> None:
        self._stalled_at = self._loop.time()
        self.transport.pause_reading()  # what the client sends causes more that it does not read
        if self._listener is not None:
            self._listener.on_client_full()

    def resume_writing(self) -> None:
        self._stalled_at = None
        self.transport.resume_reading()
        if self._listener is not None:
            self._listener.on_client_ready()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._buffered.num_bytes -= self._num_counted_bytes
        self._num_counted_bytes = 0
        self._end()

    def _end(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_closed()
