"""Encodes the heads of messages, selects the headers that pass through a gateway, and makes the head of a response for
the client from a node's.

A value with a line break would let one side inject headers, or whole messages, into the other. The parser does not
produce such values, but configuration or code might, so the encoder checks the finished head.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus
from operator import itemgetter

from cortex.http.request import Headers
from cortex.wire import sse

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
NOT_FOR_NODES = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding"}
"""Request headers that are not passed on. Without `accept-encoding` a node responds uncompressed, as metering needs."""
NOT_FOR_CLIENTS = HOP_BY_HOP | {
    *(b"content-length", b"date", b"server", b"set-cookie", b"alt-svc"),
    *(b"clear-site-data", b"strict-transport-security"),
}
"""Response headers that are not passed on; the exchange writes its own length and date. What a node runs on is not for
clients, and what browsers remember of an origin is not for nodes to say."""
ABOUT_CONTENT = frozenset(
    (
        *(b"content-type", b"content-disposition", b"content-encoding", b"content-language", b"content-range"),
        *(b"accept-ranges", b"cache-control", b"etag", b"expires", b"last-modified", b"retry-after"),
    )
)
"""The only response headers of other servers that clients get: others may say where a server is, and whose."""

_FRAMING = frozenset((b"connection", b"content-length", b"transfer-encoding"))
_BREAKS = b"\r\n\0"
_BYTES_PER_BREAK = len(b"\r\n")
_join_pair = b": ".join
_name = itemgetter(0)
_ORDINARY_CONNECTION = frozenset((b"keep-alive", b"close", b"upgrade"))

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}
_STATUS_LINES[529] = b"HTTP/1.1 529 Overloaded"


def end_to_end(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """The headers to pass on: without those in `dropped` and those that a `Connection` header lists."""
    if not _has_any(headers, dropped):
        return headers
    kept = [pair for pair in headers if pair[0] not in dropped]
    for name, value in headers:
        if name == b"connection" and value.lower() not in _ORDINARY_CONNECTION:
            listed = {token.strip() for token in value.lower().split(b",")}
            kept = [pair for pair in kept if pair[0] not in listed]
    return kept


def encode_head(start_line: bytes, headers: Headers, framing: bytes) -> bytes:
    """A complete head: start line, `headers`, `framing` (encoded header lines) and the blank line.

    Raises ValueError when a part contains a line break, or when `headers` contain framing.
    """
    if _has_any(headers, _FRAMING):
        raise ValueError(
            "connection, content-length and transfer-encoding are written by the data path; do not pass them"
        )
    return _encoded(start_line, headers, framing)


def encode_passed_on(start_line: bytes, headers: Headers, framing: bytes) -> bytes:
    """The head of a request for a node, with those of `headers` that are for nodes. Raises ValueError when a part
    contains a line break."""
    return _encoded(start_line, end_to_end(headers, NOT_FOR_NODES), framing)


def _encoded(start_line: bytes, headers: Headers, framing: bytes) -> bytes:
    head = b"\r\n".join([start_line, *map(_join_pair, headers)])
    # One pass finds all three: exactly two bytes per line must be ours.
    if len(head) - len(head.translate(None, _BREAKS)) != _BYTES_PER_BREAK * len(headers):
        raise ValueError("a header, method or target contains a line break or NUL byte; it was not sent")
    return b"%b\r\n%b\r\n" % (head, framing)


def _has_any(headers: Headers, names: frozenset[bytes]) -> bool:
    return not names.isdisjoint(map(_name, headers))


def status_line(status: int) -> bytes:
    """Such as `HTTP/1.1 200 OK`; codes without a registered phrase get none."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status


class _Date:
    """The `Date` line, formatted once a second."""

    __slots__ = ("_line", "_second")

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._line = b"date: " + formatdate(now, usegmt=True).encode() + b"\r\n"
        return self._line


date_line = _Date().line
"""The current `Date` header as an encoded line."""


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
