"""Server-sent events: framing what we say, parsing what a node says, whatever the byte splits."""

from __future__ import annotations

import re
from typing import NamedTuple

from cortex.wire.errors import UpstreamInterrupted

CONTENT_TYPE = "text/event-stream; charset=utf-8"
COMMENT = b": keepalive\n\n"
"""A frame every SSE client ignores; it only keeps the connection alive."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A node that sends a longer frame than this is not speaking SSE to us."""

_LINE_END = re.compile(rb"\r\n|\n|\r")


def comment(text: bytes) -> bytes:
    """A frame for whoever reads the bytes; SSE clients ignore it. `text` is a single line."""
    return b": " + text + b"\n\n"


def frame(data: bytes, event: str | None = None) -> bytes:
    """One SSE frame. `data` is a single line, as compact JSON is."""
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


class Frame(NamedTuple):
    """A dispatched event; `event` is `message` where the sender named none."""

    event: str
    data: str


class Parser:
    """Incremental SSE parser: the frames that come out do not depend on how the bytes were split.

    Comments and the `id` and `retry` fields are consumed without a trace. A frame that was not ended by a
    blank line is never dispatched, as the standard demands.
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
        """The frames that `chunk` completes. Raises `UpstreamInterrupted` when a frame outgrows the limit."""
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
                break  # the other half of a CRLF may come with the next chunk
            self._take_line(self._pending[start : match.start()].decode("utf-8", "replace"), frames)
            start = position = match.end()
        del self._pending[:start]
        self._scanned = max(0, len(self._pending) - 1)
        if len(self._pending) + self._data_bytes > self._max_frame_bytes:
            raise UpstreamInterrupted(
                f"the node sent an event longer than {self._max_frame_bytes} bytes; check what answers at its address"
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
            self._data_bytes += len(value)
        elif field == "event":
            self._event = value
