"""The head of a response for the client, made from a node's head and our own headers."""

from __future__ import annotations

from cortex.http.request import Headers
from cortex.wire import sse

_EVENT_STREAM = b"text/event-stream"
_UNBUFFERED = (b"x-accel-buffering", b"no")
STREAM_HEADERS = ((b"content-type", sse.CONTENT_TYPE.encode()), (b"cache-control", b"no-cache"), _UNBUFFERED)
"""The headers of an event stream that begins here, not at a node."""


class ResponseHead:
    """A head for the client. Read-only by convention."""

    __slots__ = ("content_length", "headers", "is_stream", "status")

    def __init__(self, status: int, headers: Headers, content_length: int | None, is_stream: bool) -> None:
        self.status = status
        self.headers = headers
        self.content_length = content_length
        """None where the length is not known; always None for a stream, which keepalives and errors make longer."""
        self.is_stream = is_stream
        """It is the head of an event stream."""


def for_client(status: int, headers: Headers, content_length: int | None, ours: Headers) -> ResponseHead:
    """A node's head with `ours` in place of its headers of the same names. A stream is marked as not to be buffered."""
    is_stream = False
    replaced = dict(ours)
    kept = []
    for pair in headers:
        name, value = pair
        if name == b"content-type" and value.lower().startswith(_EVENT_STREAM):
            is_stream = True
        if name not in replaced:
            kept.append(pair)
    if is_stream:
        kept = [pair for pair in kept if pair[0] != _UNBUFFERED[0]]
        kept.append(_UNBUFFERED)
        content_length = None
    kept += ours
    return ResponseHead(status, kept, content_length, is_stream)
