"""The HTTP servers of the API, with configured limits and keys checked before bodies are read, and of the metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

from cortex.gateway.config import Config
from cortex.gateway.ledger.keys import KeySection, check_operator
from cortex.gateway.metrics import CONTENT_TYPE, Metrics
from cortex.gateway.proxy.routes import HttpHandler, error_response, rejection_response
from cortex.http.limits import Buffered, ClientLimits
from cortex.http.request import Headers, Request
from cortex.http.routing import Match, Route, Router
from cortex.http.server.exchange import Exchange
from cortex.http.server.parser import Spooled
from cortex.http.server.server import Handler, Response, Server
from cortex.http.ticker import Ticker
from cortex.system import open_files
from cortex.wire.dialects.ollama.models import BLOBS
from cortex.wire.dialects.registry import FAMILIES
from cortex.wire.error_encoding import OPENAI
from cortex.wire.errors import CortexError
from cortex.wire.node.headers import BUDGET, DROPPED_TOOLS, IGNORED_FIELDS, NODE, UNENFORCED
from cortex.wire.opaque.routes import UPSTREAM_ROUTE

ANY_ORIGIN = b"*"
_READABLE = (
    "x-request-id",
    *(family.id_header.decode() for family in FAMILIES if family.id_header is not None),
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
    """Adds CORS headers, which let scripts of allowed origins read responses, and responds to preflight requests.

    Preflight requests need no key, because browsers send none. They reveal nothing but these headers.
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
        """Whether it is a CORS preflight request."""
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


SESSION_PATH = "/session"
"""The path where a browser signs in."""
PAGE_FILES = "/page/"
"""The prefix of the page's files, which are public."""
_PAGE_FILES = PAGE_FILES.encode()
SIGN_IN_PATHS = (SIGN_IN_METHODS, SIGN_IN_START, SIGN_IN_CALLBACK) = (
    "/session/methods",
    "/session/start",
    "/session/callback",
)
OPEN_PATHS = (b"/", b"/health", b"/ready", *(path.encode() for path in (SESSION_PATH, *SIGN_IN_PATHS)))
"""Paths that need no key, in addition to those of `PAGE_FILES`."""
OLLAMA_LISTINGS = (b"/api/version", b"/api/tags", b"/api/ps", b"/api/show")
LISTING_PATHS = (b"/v1/models", b"/models", b"/props", *OLLAMA_LISTINGS)
"""Paths that need no key either, with `gateway.open_listing`."""
_OPERATOR_FILES = (UPSTREAM_ROUTE, *BLOBS)
"""Routes for operators whose bodies are written to files."""
CONTROL_BODY_BYTES = 64 * 1024
"""The longest body of a request that is not inference."""
MAX_SCRAPERS = 32
"""Connections to the metrics."""

Authenticate = Callable[[Request], KeySection | None]
"""The key of a request, once it is checked; None on an open gateway. Raises InvalidAPIKey."""


def needs_key(path: bytes, open_paths: Collection[bytes]) -> bool:
    return path not in open_paths and not path.startswith(_PAGE_FILES)


def paths_without_key(config: Config) -> tuple[bytes, ...]:
    return (*OPEN_PATHS, *LISTING_PATHS) if config.gateway.open_listing else OPEN_PATHS


def client_limits(config: Config, num_files: int) -> ClientLimits:
    """The configured limits, converted for the data path of a process that may open `num_files`."""
    limits = config.limits
    connections = open_files.connections(
        num_files,
        files_each=2,  # one more for the connection to the node
        one_of=4,
        in_all=limits.max_connections,
        per_client=limits.max_connections_per_client,
    )
    return ClientLimits(
        num_connections=connections.in_all,
        num_connections_per_client=connections.per_client,
        buffered_bytes=limits.max_buffered_mb * 1024 * 1024,
        head_bytes=limits.max_head_kb * 1024,
        body_bytes=config.gateway.max_body_mb * 1024 * 1024,
        upload_bytes=config.gateway.max_upload_mb << 20,
        spooled_bytes=(config.gateway.max_upload_mb << 20) * 4,
        spooled_bytes_per_client=(config.gateway.max_upload_mb << 20) * 2,
        head_s=limits.head_timeout_s,
        body_s=limits.body_timeout_s,
        body_bytes_per_s=limits.min_body_kb_per_s * 1024,
    )


def api_server(
    handler: Handler,
    match: Callable[[Request], Match[HttpHandler] | None],
    config: Config,
    ticker: Ticker,
    metrics: Metrics,
    authenticate: Authenticate,
    limits: ClientLimits,
    buffered: Buffered | None = None,
) -> Server:
    """A server that reads no large body without a valid key and counts rejections. `match` finds the route of a
    request. `buffered`: see `Server`."""
    cross_origin = CrossOrigin(config.gateway.cors_origins) if config.gateway.cors_origins else None

    open_paths = frozenset(paths_without_key(config))

    def admit_head(request: Request) -> int | Spooled:
        if cross_origin is not None and cross_origin.is_preflight(request):
            return CONTROL_BODY_BYTES  # it needs no key, so it gets no room
        key = authenticate(request) if needs_key(request.path, open_paths) else None
        found = match(request)
        if found is None or found.route.body_limit is None:
            return CONTROL_BODY_BYTES
        if found.route.path in _OPERATOR_FILES and key is not None:
            check_operator(key)  # before gigabytes of others are on the disk
        return found.route.body_limit(request, limits)

    def reject(error: CortexError, path: bytes) -> Response:
        metrics.errors.labels("", "", error.code).inc()
        return rejection_response(error, path)

    if cross_origin is None:
        return Server(handler, reject, ticker, limits, admit_head, buffered=buffered)
    return Server(
        cross_origin.handler(handler),
        reject,
        ticker,
        limits,
        admit_head,
        response_headers=cross_origin.response_headers,
        buffered=buffered,
    )


def metrics_server(metrics: Metrics, ticker: Ticker, limits: ClientLimits) -> Server:
    """A server of the metrics alone, which needs no key: it has room for a few clients and reads no long bodies."""

    def expose(exchange: Exchange) -> None:
        exchange.respond(200, ((b"content-type", CONTENT_TYPE.encode()),), metrics.exposition())

    router = Router([Route("", path, expose) for path in ("/metrics", "/")], "the metrics are at /metrics")

    def handle(exchange: Exchange) -> None:
        try:
            router.find(exchange.request).route.handler(exchange)
        except CortexError as error:
            exchange.respond(*error_response(error, OPENAI))

    few = dataclasses.replace(
        limits,
        body_bytes=CONTROL_BODY_BYTES,
        num_connections=min(limits.num_connections, MAX_SCRAPERS),
        num_connections_per_client=min(limits.num_connections_per_client, MAX_SCRAPERS // 2),
    )
    return Server(handle, rejection_response, ticker, few)
