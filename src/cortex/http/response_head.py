"""The head of a response for the client, made from a node's head and our own headers."""

from __future__ import annotations

from cortex.http.request import Headers
from cortex.wire import sse

LINES = b"application/x-ndjson"
"""The content type of a stream whose events are lines."""
_STREAMS = (b"text/event-stream", LINES)
_UNBUFFERED = (b"x-accel-buffering", b"no")


def stream_headers(content_type: str) -> Headers:
    """The headers of a stream that begins here, not at a node."""
    return ((b"content-type", content_type.encode()), (b"cache-control", b"no-cache"), _UNBUFFERED)


STREAM_HEADERS = stream_headers(sse.CONTENT_TYPE)


class ResponseHead:
    """A head for the client. Read-only by convention."""

    __slots__ = ("content_length", "has_lines", "headers", "is_stream", "status")

    def __init__(
        self, status: int, headers: Headers, content_length: int | None, is_stream: bool, has_lines: bool = False
    ) -> None:
        self.status = status
        self.headers = headers
        self.content_length = content_length
        """None where the length is not known; always None for a stream, which keepalives and errors make longer."""
        self.is_stream = is_stream
        """It is the head of an event stream, or of one of lines."""
        self.has_lines = has_lines
        """Each event of the stream is a line."""


def for_client(status: int, headers: Headers, content_length: int | None, ours: Headers) -> ResponseHead:
    """A node's head with `ours` in place of its headers of the same names. A stream is marked as not to be buffered."""
    is_stream = has_lines = False
    replaced = dict(ours)
    kept = []
    for pair in headers:
        name, value = pair
        if name == b"content-type" and value.lower().startswith(_STREAMS):
            is_stream = True
            has_lines = value.lower().startswith(LINES)
        if name not in replaced:
            kept.append(pair)
    if is_stream:
        kept = [pair for pair in kept if pair[0] != _UNBUFFERED[0]]
        kept.append(_UNBUFFERED)
        content_length = None
    kept += ours
    return ResponseHead(status, kept, content_length, is_stream, has_lines)
