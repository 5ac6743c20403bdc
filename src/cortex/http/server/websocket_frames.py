"""Frames of RFC 6455 as a server reads and writes them. Pure; no extension is negotiated."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


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
        """Of the frame that arrives, until it is whole."""
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
