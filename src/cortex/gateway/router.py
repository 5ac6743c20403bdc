"""Routes a request to the part of the gateway that serves it: inference, stored responses, the page, or control."""

from __future__ import annotations

from cortex.gateway.api.control import Control
from cortex.gateway.api.ollama.inference import OllamaInference
from cortex.gateway.batches.api import BatchService
from cortex.gateway.batches.api import takes as takes_batches
from cortex.gateway.config import Config
from cortex.gateway.page.page import Page
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.opaque.inference import OpaqueInference
from cortex.gateway.proxy.routes import (
    RESPONSES,
    ROUTES,
    InferenceRoute,
    error_response,
    family_of,
    methods_of,
    opaque_route,
)
from cortex.gateway.responses.api import PREFIX as STORED_RESPONSES
from cortex.gateway.responses.conversations import PATH as CONVERSATIONS
from cortex.gateway.responses.service import ResponsesService
from cortex.http.cross_site import CrossSiteCheck
from cortex.http.request import Request
from cortex.http.server.exchange import Exchange
from cortex.http.server.websocket import is_handshake
from cortex.wire.errors import CortexError, CrossSiteRequest, MethodNotAllowed, shorten
from cortex.wire.opaque.fields import form_of


class RequestRouter:
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
    ) -> None:
        """`cross_site`: shared with the other parts; `configure` sets what it accepts."""
        self._inference = inference
        self._ollama = ollama
        self._opaque = OpaqueInference(inference, cross_site)
        self._responses = responses
        self._batches = batches
        self._control = control
        self._page = page
        self._cross_site = cross_site
        self._checks_host = True
        self._accepted_host: bytes | None = None
        """The `Host` header that was accepted last."""

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
        if self._checks_host and (error := self._host_error(request)) is not None:
            exchange.respond(*error_response(error, family_of(request.path)))
            return
        route = ROUTES.get(request.path)
        if route is None:
            if (opaque := opaque_route(request.path)) is not None:
                self._relay(exchange, opaque)
            elif request.path == CONVERSATIONS or request.path.startswith(CONVERSATIONS + b"/"):
                self._responses.conversations.handle(exchange)
            elif request.path.startswith(STORED_RESPONSES):
                self._responses.stored.handle(exchange)
            elif takes_batches(request):
                self._batches.handle(exchange)
            elif self._page.takes(request):
                self._page.handle(exchange)
            else:
                self._control.handle(exchange)
        elif route is RESPONSES and is_handshake(request):
            self._open_socket(exchange)
        elif request.method != b"POST":
            error = MethodNotAllowed(f"{request.path.decode()} takes POST only.", details={"allowed_methods": ["POST"]})
            exchange.respond(*error_response(error, route.family))
        elif route.dialect in ("openai_responses", "openai_compaction"):
            self._responses.stateful.begin(exchange, route)
        elif route.reports_durations and route.generates:
            self._ollama.begin(exchange, route)
        else:
            self._inference.begin(exchange, route)

    def _relay(self, exchange: Exchange, route: InferenceRoute) -> None:
        request, methods = exchange.request, methods_of(route)
        if request.method.decode("latin-1") not in methods:
            path = shorten(request.path.decode("latin-1"))
            error = MethodNotAllowed(f"{path} takes {' or '.join(methods)}.", details={"allowed_methods": [*methods]})
            exchange.respond(*error_response(error, route.family))
        elif request.body and form_of(request.text(b"content-type") or "") == "json" and not route.is_upstream:
            self._inference.begin(exchange, route)
        else:
            self._opaque.begin(exchange, route)

    def _open_socket(self, exchange: Exchange) -> None:
        """Browsers let pages of any site open WebSockets, so the origin is checked here."""
        request = exchange.request
        try:
            origin, host = request.text(b"origin"), request.text(b"host")
            self._cross_site.check_origin(origin, host, request.text(b"sec-fetch-site"))
            self._responses.sockets.open(exchange)
        except CortexError as error:
            exchange.respond(*error_response(error, RESPONSES.family))

    def _host_error(self, request: Request) -> CortexError | None:
        """The error for a request that does not use a name of this gateway."""
        host = request.header(b"host")
        if host is not None and host == self._accepted_host:
            return None
        try:
            self._cross_site.check_host(host.decode("latin-1") if host is not None else None)
        except CrossSiteRequest as error:
            return error
        self._accepted_host = host
        return None
