"""Cross-origin requests of browsers, for the origins that the operator allows."""

from __future__ import annotations

from collections.abc import Iterable

from cortex.http.request import Headers, Request
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Handler
from cortex.wire.node.headers import ANTHROPIC_REQUEST_ID, BUDGET, DROPPED_TOOLS, IGNORED_FIELDS, NODE, UNENFORCED

ANY_ORIGIN = b"*"
_READABLE = (
    "x-request-id",
    ANTHROPIC_REQUEST_ID,
    NODE,
    BUDGET,
    "retry-after",
    DROPPED_TOOLS,
    IGNORED_FIELDS,
    UNENFORCED,
)
_EXPOSED = (b"access-control-expose-headers", ", ".join(_READABLE).encode())
_DEFAULT_HEADERS = b"authorization, content-type, x-api-key, anthropic-version"
_METHODS = (b"access-control-allow-methods", b"GET, HEAD, POST, PATCH, DELETE")
_MAX_AGE = (b"access-control-max-age", b"86400")


class CrossOrigin:
    """Adds the headers that let scripts of allowed origins read responses, and responds to preflight requests.

    Browsers send no key with a preflight request, so it needs none. It reveals nothing but these headers.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def response_headers(self, request_headers: Headers) -> Headers:
        """The headers for every response to a request with `request_headers`."""
        if ANY_ORIGIN in self._origins:
            return ((b"access-control-allow-origin", ANY_ORIGIN), _EXPOSED)
        origin = next((value for name, value in request_headers if name == b"origin"), None)
        if origin not in self._origins:
            return ((b"vary", b"origin"),)
        return ((b"access-control-allow-origin", origin), _EXPOSED, (b"vary", b"origin"))

    def is_preflight(self, request: Request) -> bool:
        """Whether a browser asks what it may send."""
        return (
            request.method == b"OPTIONS"
            and request.header(b"origin") is not None
            and request.header(b"access-control-request-method") is not None
        )

    def handler(self, handler: Handler) -> Handler:
        """`handler` for all requests but preflight requests."""

        def handle(exchange: Exchange) -> None:
            if self.is_preflight(exchange.request):
                wanted = exchange.request.header(b"access-control-request-headers") or _DEFAULT_HEADERS
                exchange.respond(204, (_METHODS, (b"access-control-allow-headers", wanted), _MAX_AGE), b"")
            else:
                handler(exchange)

        return handle
