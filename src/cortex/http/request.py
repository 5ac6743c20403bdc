"""A complete request from a client."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.http.composed_body import ComposedBody

_LOGGED_CHARACTERS = 200

Headers = Sequence[tuple[bytes, bytes]]
"""Name and value pairs in order; names are lower-case, values have no surrounding white space."""


class Request:
    """One request with its whole body. Read-only by convention: frozen dataclasses cost a microsecond each."""

    __slots__ = ("body", "client", "headers", "is_http_10", "keeps_alive", "method", "path", "query", "upload")

    def __init__(
        self,
        method: bytes,
        path: bytes,
        query: bytes,
        headers: Headers,
        body: bytes,
        client: str,
        keeps_alive: bool = True,
        is_http_10: bool = False,
        upload: ComposedBody | None = None,
    ) -> None:
        self.method = method
        """Upper-case, such as `b"POST"`."""
        self.path = path
        """The path as sent, not percent-decoded. It starts with `/`, or is `*`."""
        self.query = query
        """What follows the `?`; empty when there is none."""
        self.headers = headers
        self.body = body
        """Empty where there is an `upload`."""
        self.upload = upload
        """A body that was too long for memory: one file."""
        self.client = client
        """The peer's address, for logs and limits; empty when the client disconnected before it was read."""
        self.keeps_alive = keeps_alive
        """The client may send another request on this connection."""
        self.is_http_10 = is_http_10

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
