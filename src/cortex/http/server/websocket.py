"""A client's connection after it has switched to the WebSocket protocol: messages instead of requests.

The frames are those of RFC 6455; no extension is negotiated.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from enum import IntEnum
from typing import NamedTuple, Protocol

from cortex.http.limits import Buffered, ClientLimits
from cortex.http.request import Headers, Request
from cortex.http.server.exchange import SwitchedConnection
from cortex.wire.errors import InvalidValue

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Opcode(IntEnum):
    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class CloseCode(IntEnum):
    """Why a side closes."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED_DATA = 1003
    MESSAGE_TOO_BIG = 1009
    INTERNAL_ERROR = 1011
    TRY_AGAIN_LATER = 1013


class WebSocketFault(Exception):
    """The client breaks the protocol or a limit; the connection must be closed with `code`."""

    def __init__(self, code: CloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Message(NamedTuple):
    """A whole message, or a control frame."""

    opcode: Opcode
    payload: bytes


_CONTROL_BYTES = 125
"""The longest payload of a control frame."""


def encode(opcode: Opcode, payload: bytes) -> bytes:
    """A frame of a server, which is not masked."""
    num_bytes = len(payload)
    if num_bytes < 126:
        head = bytes((0x80 | opcode, num_bytes))
    elif num_bytes < 1 << 16:
        head = bytes((0x80 | opcode, 126)) + num_bytes.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 127)) + num_bytes.to_bytes(8, "big")
    return head + payload


def encode_close(code: CloseCode, reason: str) -> bytes:
    room = _CONTROL_BYTES - 2
    return encode(Opcode.CLOSE, code.to_bytes(2, "big") + reason.encode()[:room].decode(errors="ignore").encode())


class FrameReader:
    """Turns a client's bytes into messages. Payloads are unmasked as they arrive, so that no call takes long."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._head = bytearray()
        """The header of the current frame, as far as it was received."""
        self._is_in_payload = False
        self._opcode = Opcode.TEXT
        self._is_final = False
        self._mask = b""
        self._num_due_bytes = 0
        self._payload = bytearray()
        """Payload of the arriving frame, if it is a control frame."""
        self._message: bytearray | None = None
        """Payload of the arriving message, which may have several frames."""

    @property
    def num_held_bytes(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._message or b"")

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now. Raises WebSocketFault; nothing may be fed after that."""
        found: list[Message] = []
        position = 0
        while position < len(data) or (self._is_in_payload and not self._num_due_bytes):
            if not self._is_in_payload:
                end = position + self._num_missing_head_bytes()
                self._head += data[position:end]
                position = min(end, len(data))
                if not self._num_missing_head_bytes():
                    self._begin_payload()
                continue
            piece = data[position : position + self._num_due_bytes]
            position += len(piece)
            self._take(piece)
            if not self._num_due_bytes and (message := self._end_frame()) is not None:
                found.append(message)
        return found

    def _num_missing_head_bytes(self) -> int:
        head = self._head
        if len(head) < 2:
            return 2 - len(head)
        return 2 + {126: 2, 127: 8}.get(head[1] & 0x7F, 0) + 4 - len(head)

    def _begin_payload(self) -> None:
        first, second = self._head[0], self._head[1]
        if first & 0x70:
            raise WebSocketFault(CloseCode.PROTOCOL_ERROR, "no extension was negotiated")
        if not second & 0x80:
            raise WebSocketFault(CloseCode.PROTOCOL_ERROR, "frames of clients must be masked")
        try:
            opcode = Opcode(first & 0x0F)
        except ValueError:
            raise WebSocketFault(CloseCode.PROTOCOL_ERROR, "the opcode is not known") from None
        num_bytes = second & 0x7F
        if num_bytes > _CONTROL_BYTES:
            num_bytes = int.from_bytes(self._head[2:-4], "big")
        self._is_final = bool(first & 0x80)
        if opcode >= Opcode.CLOSE:
            if num_bytes > _CONTROL_BYTES or not self._is_final:
                raise WebSocketFault(CloseCode.PROTOCOL_ERROR, "a control frame is one frame of at most 125 bytes")
        elif opcode is Opcode.BINARY:
            raise WebSocketFault(CloseCode.UNSUPPORTED_DATA, "send events as text")
        elif (opcode is Opcode.CONTINUATION) is (self._message is None):
            raise WebSocketFault(CloseCode.PROTOCOL_ERROR, "the frames of a message are out of order")
        else:
            self._message = self._message if self._message is not None else bytearray()
            if len(self._message) + num_bytes > self._max_message_bytes:
                reason = f"a message may have {self._max_message_bytes} bytes (gateway.max_body_mb)"
                raise WebSocketFault(CloseCode.MESSAGE_TOO_BIG, reason)
        self._opcode, self._num_due_bytes, self._mask = opcode, num_bytes, bytes(self._head[-4:])
        self._head.clear()
        self._is_in_payload = True

    def _take(self, piece: bytes) -> None:
        if not piece:
            return
        num_bytes = len(piece)
        repeated = self._mask * (num_bytes // 4 + 1)
        plain = int.from_bytes(piece, "little") ^ int.from_bytes(repeated[:num_bytes], "little")
        into = self._payload if self._opcode >= Opcode.CLOSE else self._message
        assert into is not None
        into += plain.to_bytes(num_bytes, "little")
        shift = num_bytes % 4
        self._mask = self._mask[shift:] + self._mask[:shift]
        self._num_due_bytes -= num_bytes

    def _end_frame(self) -> Message | None:
        self._is_in_payload = False
        if self._opcode >= Opcode.CLOSE:
            message = Message(self._opcode, bytes(self._payload))
            self._payload.clear()
            return message
        if not self._is_final:
            return None
        assert self._message is not None
        message = Message(Opcode.TEXT, bytes(self._message))
        self._message = None
        return message


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
