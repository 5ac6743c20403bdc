"""A complete request from a client."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cortex.http.composed_body import ComposedBody

_LOGGED_CHARACTERS = 200

Headers = Sequence[tuple[bytes, bytes]]
"""Name and value pairs in order; names are lower-case, values have no surrounding white space."""


class Request(msgspec.Struct, frozen=True, eq=False):
    """One request with its whole body."""

    method: bytes
    """Upper-case, such as `b"POST"`."""
    path: bytes
    """The path as sent, not percent-decoded. It starts with `/`, or is `*`."""
    query: bytes
    """What follows the `?`; empty when there is none."""
    headers: Headers
    body: bytes
    """Empty where there is an `upload`."""
    client: str
    """The peer's address, for logs and limits; empty when the client disconnected before it was read."""
    keeps_alive: bool = True
    """The client may send another request on this connection."""
    is_http_10: bool = False
    upload: ComposedBody | None = None
    """A body that was too long for memory: one file."""

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header `name` (lower-case), or None."""
        for found, value in self.headers:  # they are few, and an index would stay as long as the request
            if found == name:
                return value
        return None

    def text(self, name: bytes) -> str | None:
        """The first value of the header `name` as text; bytes that are not UTF-8 become surrogates."""
        value = self.header(name)
        return None if value is None else value.decode("utf-8", "surrogateescape")


def loggable(text: bytes) -> str:
    """`text` from a client, made safe for a log line: printable ASCII of bounded length."""
    shown = text[:_LOGGED_CHARACTERS].decode("latin-1").encode("unicode_escape").decode()
    return shown if len(text) <= _LOGGED_CHARACTERS else f"{shown}… ({len(text)} bytes)"
