"""Responses outside of aiohttp, for connections without a request."""

from __future__ import annotations

import msgspec

from cortex.http.head import date_line, encode_head, status_line
from cortex.wire import error_encoding
from cortex.wire.errors import CortexError, Family


def raw_error(error: CortexError) -> bytes:
    """A whole response that says why the connection closes."""
    body = msgspec.json.encode(error_encoding.envelope(error, Family.OPENAI))
    framing = date_line() + b"content-length: %d\r\nconnection: close\r\n" % len(body)
    return encode_head(status_line(error.status), ((b"content-type", b"application/json"),), framing) + body
