"""Server-sent events: framing, and an incremental parser."""

from __future__ import annotations

import re
from typing import NamedTuple

from cortex.wire.errors import UpstreamInterrupted

CONTENT_TYPE = "text/event-stream; charset=utf-8"
COMMENT = b": keepalive\n\n"
"""A frame that SSE clients ignore; it keeps the connection alive."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Longer frames are rejected: the peer does not send SSE."""

_LINE_END = re.compile(rb"\r\n|\n|\r")


def comment(text: str) -> bytes:
    """A line that clients ignore; `text` is a single line."""
    return f": {text}\n".encode()


def last_comment(text: bytes) -> bytes:
    """A line after the last event of a stream, for the peer that relays the stream. No blank line follows, so the relay
    holds it back as an unfinished event and drops it at the end. `text` is a single line."""
    return b": " + text + b"\n"


def frame(data: bytes, event: str | None = None) -> bytes:
    """One SSE frame. `data` is a single line, as compact JSON is."""
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


class Frame(NamedTuple):
    """A dispatched event; `event` is `message` if the sender named none."""

    event: str
    data: str


class Parser:
    """Incremental SSE parser. The frames do not depend on how the bytes were split.

    Comments and the fields `id` and `retry` are ignored. A frame without a blank line at its end is never dispatched,
    as the standard requires.
    """

    def __init__(self, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._pending = bytearray()
        self._scanned = 0
        self._at_start = True
        self._event = ""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that `chunk` completes. Raises `UpstreamInterrupted` when a frame exceeds the limit."""
        self._pending += chunk
        if self._at_start:
            if len(self._pending) < 3 and b"\xef\xbb\xbf".startswith(self._pending):
                return []
            if self._pending.startswith(b"\xef\xbb\xbf"):
                del self._pending[:3]
            self._at_start = False
        frames: list[Frame] = []
        start = 0
        position = self._scanned
        while match := _LINE_END.search(self._pending, position):
            if match.end() == len(self._pending) and match.group() == b"\r":
                break  # the LF of a CRLF may be in the next chunk
            self._take_line(self._pending[start : match.start()].decode("utf-8", "replace"), frames)
            start = position = match.end()
        del self._pending[:start]
        self._scanned = max(0, len(self._pending) - 1)
        if len(self._pending) + self._data_bytes > self._max_frame_bytes:
            raise UpstreamInterrupted(
                f"the node sent an event longer than {self._max_frame_bytes} bytes; check the server at its address"
            )
        return frames

    def _take_line(self, line: str, frames: list[Frame]) -> None:
        if not line:
            if self._data:
                frames.append(Frame(self._event or "message", "\n".join(self._data)))
            self._event, self._data, self._data_bytes = "", [], 0
            return
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
            self._data_bytes += len(line)  # with the field's name: a line without a value takes memory too
        elif field == "event":
            self._event = value
