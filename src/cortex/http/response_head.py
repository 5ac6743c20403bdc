"""The head of a response for the client, made from a node's head and our own headers."""

from __future__ import annotations

import msgspec

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


class ResponseHead(msgspec.Struct, frozen=True, eq=False):
    """A head for the client."""

    status: int
    headers: Headers
    content_length: int | None
    """None where the length is not known; always None for a stream, which keepalives and errors make longer."""
    is_stream: bool
    """It is the head of an event stream, or of one of lines."""
    has_lines: bool = False
    """Each event of the stream is a line."""


def for_client(status: int, headers: Headers, content_length: int | None, ours: Headers) -> ResponseHead:
    """A node's head with `ours` in place of its headers of the same names. A stream is marked as not to be buffered."""
    is_stream = has_lines = False
    for name, value in headers:
        if name == b"content-type" and value.lower().startswith(_STREAMS):
            is_stream, has_lines = True, value.lower().startswith(LINES)
    if is_stream:
        ours = (_UNBUFFERED, *ours)
        content_length = None
    replaced = dict(ours)
    kept = [pair for pair in headers if pair[0] not in replaced]
    kept += ours
    return ResponseHead(status, kept, content_length, is_stream, has_lines)
