"""The routes of the gateway: inference, stored responses, batches, the page and control, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from cortex import __version__
from cortex.gateway.api.control import Control
from cortex.gateway.api.ollama.inference import OllamaInference
from cortex.gateway.batches.api import BatchService
from cortex.gateway.config import Config
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.page.page import Page
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.listener import needs_key
from cortex.gateway.proxy.opaque_inference import OpaqueInference
from cortex.gateway.proxy.routes import (
    OPAQUE,
    RESPONSES,
    ROUTES,
    UPSTREAM,
    HttpHandler,
    HttpRoute,
    InferenceRoute,
    error_response,
    family_of,
    json_response,
)
from cortex.gateway.responses.service import ResponsesService
from cortex.http.cross_site import CrossSiteCheck
from cortex.http.opaque_request import spooled_form
from cortex.http.request import Request
from cortex.http.routing import Match, Route, Router, in_memory
from cortex.http.server.exchange import Exchange
from cortex.http.server.websocket import is_handshake
from cortex.wire.dialects.ollama.models import RUNNING, is_for_ollama
from cortex.wire.errors import CortexError, MethodNotAllowed
from cortex.wire.opaque.fields import form_of
from cortex.wire.opaque.routes import PATHS as OPAQUE_METHODS
from cortex.wire.opaque.routes import UPSTREAM_METHODS, UPSTREAM_ROUTE


class GatewayRoutes:
    """The handler of the API's server. Call `configure` before the first request."""

    def __init__(
        self,
        inference: Inference,
        responses: ResponsesService,
        batches: BatchService,
        ollama: OllamaInference,
        control: Control,
        page: Page,
        cross_site: CrossSiteCheck,
        metering: Metering,
        open_paths: tuple[bytes, ...],
    ) -> None:
        """`cross_site`: shared with the other parts; `configure` sets what it accepts. `open_paths` need no key."""
        self._inference = inference
        self._ollama = ollama
        self._opaque = OpaqueInference(inference, cross_site)
        self._responses = responses
        self._cross_site = cross_site
        self._metering = metering
        self._open_paths = open_paths
        self._checks_host = True
        self._accepted_host: bytes | None = None
        """The `Host` header that was accepted last."""
        self._router: Router[HttpHandler] = Router(
            [
                *self._inference_routes(),
                *responses.routes(),
                *batches.routes(),
                *page.routes(self._show_index),
                *control.routes(),
            ]
        )
        self.match = self._router.match

    def _inference_routes(self) -> Iterable[HttpRoute]:
        for route in ROUTES.values():
            begin = self._inference.begin
            if route.dialect in ("openai_responses", "openai_compaction"):
                begin = self._responses.stateful.begin
            elif route.reports_durations and route.generates:
                begin = self._ollama.begin
            yield Route("POST", route.path.decode(), _beginning(begin, route), in_memory)
        yield Route("GET", RESPONSES.path.decode(), self._open_socket, has_head=False)
        for path, method in OPAQUE_METHODS.items():
            relay = partial(self._relay, OPAQUE[path.encode()])
            yield Route(method, path, relay, spooled_form, has_head=False)
        relay = partial(self._relay, UPSTREAM)
        yield Route(" ".join(UPSTREAM_METHODS), UPSTREAM_ROUTE, relay, spooled_form, has_head=False)

    def configure(self, config: Config, *, is_open: bool) -> None:
        """Use a new configuration. `is_open`: the gateway admits requests without a key.

        If only local programs may use it, without a key, every request must use a name of this gateway.
        """
        section = config.gateway
        addresses = (section.listen, section.ollama_listen)
        hosts = (*section.allowed_hosts, *(address.host for address in addresses if address is not None))
        self._cross_site.use(hosts, section.cors_origins)
        self._accepted_host = None
        self._checks_host = is_open and section.listen.is_loopback

    def handle(self, exchange: Exchange) -> None:
        """Serve the request."""
        request = exchange.request
        try:
            if self._checks_host:
                self._check_host(request)
            match = self._router.match(request) or self._reject(request)
            if match.values:
                match.route.handler(exchange, **match.values)
            else:
                match.route.handler(exchange)
        except CortexError as error:
            exchange.respond(*error_response(error, family_of(request.path, request.header)))

    def _show_index(self, exchange: Exchange) -> None:
        request = exchange.request
        if is_for_ollama(request.text(b"host"), request.text(b"user-agent")):
            exchange.respond(200, ((b"content-type", b"text/plain; charset=utf-8"),), RUNNING.encode())
            return
        index = {
            "name": "cortex",
            "version": __version__,
            "what": "One OpenAI and Anthropic endpoint over a fleet of GPU hosts.",
            "routes": self._router.paths,
        }
        exchange.respond(*json_response(index))

    def _reject(self, request: Request) -> Match[HttpHandler]:
        """Raises RouteNotFound or MethodNotAllowed, and for a client without a key InvalidAPIKey."""
        if needs_key(request.path, self._open_paths):
            self._metering.meter.authenticate(request)
        return self._router.find(request)

    def _relay(self, route: InferenceRoute, exchange: Exchange, /, **_: str) -> None:
        request = exchange.request
        if request.body and form_of(request.text(b"content-type") or "") == "json" and not route.is_upstream:
            self._inference.begin(exchange, route)
        else:
            self._opaque.begin(exchange, route)

    def _open_socket(self, exchange: Exchange) -> None:
        """Browsers let pages of any site open WebSockets, so the origin is checked here."""
        request = exchange.request
        if not is_handshake(request):
            message = f"{RESPONSES.path.decode()} takes POST, and GET for a WebSocket."
            raise MethodNotAllowed(message, details={"allowed_methods": ["POST"]})
        origin, host = request.text(b"origin"), request.text(b"host")
        self._cross_site.check_origin(origin, host, request.text(b"sec-fetch-site"))
        self._responses.sockets.open(exchange)

    def _check_host(self, request: Request) -> None:
        """Raises CrossSiteRequest for a request that does not use a name of this gateway."""
        host = request.header(b"host")
        if host is None or host != self._accepted_host:
            self._cross_site.check_host(host.decode("latin-1") if host is not None else None)
            self._accepted_host = host


def _beginning(begin: Callable[[Exchange, InferenceRoute], None], route: InferenceRoute) -> HttpHandler:
    """A handler that takes half the time of a `partial` with names."""

    def handle(exchange: Exchange) -> None:
        begin(exchange, route)

    return handle
