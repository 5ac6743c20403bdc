"""The handler of opaque requests that are not JSON: forms with files, queries, and everything below `/upstream/`."""

from __future__ import annotations

import asyncio

from cortex.gateway.ledger.keys import check_operator
from cortex.gateway.proxy.admission import AdmittedRequest, ReceivedRequest
from cortex.gateway.proxy.inference import Inference, request_id_of
from cortex.gateway.proxy.outgoing_body import OpaqueBody, access_of
from cortex.gateway.proxy.routes import InferenceRoute
from cortex.http.cross_site import CrossSiteCheck
from cortex.http.opaque_request import read_fields
from cortex.http.request import Request
from cortex.http.server.exchange import Exchange
from cortex.parsing.envelope import Envelope
from cortex.system.tasks import run_once
from cortex.wire.errors import CortexError, ModelNotFound
from cortex.wire.opaque.fields import OpaqueFields
from cortex.wire.opaque.routes import HEALTH_CHECKS, split_upstream, with_slash
from cortex.wire.request_summary import RequestSummary


class OpaqueInference:
    """Reads only the model of a request and leaves the rest to `Inference`."""

    def __init__(self, inference: Inference, cross_site: CrossSiteCheck) -> None:
        self._cross_site = cross_site
        self._inference = inference

    def begin(self, exchange: Exchange, route: InferenceRoute) -> None:
        """Take over an exchange: it gets a response in every case."""
        services, request = self._inference.services, exchange.request
        received_at = services.clock()
        id = request_id_of(request.header(b"x-request-id"))
        span = services.tracer.begin(route.span_name, request.header(b"traceparent"))
        received = ReceivedRequest(exchange, route, id, span, received_at)
        try:
            self._inference.authenticate(received)
            if route.is_upstream and received.key is not None:
                check_operator(received.key)  # a server may show data of other clients, and change itself
            if received.key is None or not _sends_key(request):
                # Browsers send forms and follow links without a preflight request, also with the session of the page.
                origin, host = request.text(b"origin"), request.text(b"host")
                self._cross_site.check_origin(origin, host, request.text(b"sec-fetch-site"))
        except CortexError as error:
            self._inference.reject_unread(received, error)
            return
        task = run_once(self._receive(received), "read an opaque request")
        exchange.on_disconnect(task.cancel)

    async def _receive(self, received: ReceivedRequest) -> None:
        request, route = received.exchange.request, received.route
        try:
            found: OpaqueFields | str
            num_choices = 1
            if route.is_upstream:
                name, found = self._split(request)
            else:
                found = await read_fields(request)
                name, num_choices = found.model, found.num_choices
        except CortexError as error:
            self._inference.reject_unread(received, error)
            return
        except asyncio.CancelledError:
            self._inference.disconnected(received)
            raise
        location = with_slash(request.method, request.path, request.query) if found == "/" else None
        if location is not None:
            received.span.end({})
            received.exchange.respond(307, ((b"location", location), *route.id_headers(received.id)), b"")
            return
        summary = RequestSummary(name, stream=False, completion_limit=0, num_choices=num_choices)
        received.envelope = Envelope(summary, ())
        is_check = route.is_upstream and request.method == b"GET" and found in HEALTH_CHECKS

        def body(admitted: AdmittedRequest) -> OpaqueBody:
            return OpaqueBody(request, admitted.model, found, access_of(admitted, is_counted=False))

        self._inference.serve(received, make_body=body, is_check=is_check)

    def _split(self, request: Request) -> tuple[str, str]:
        """The model in the path, and the path at its server. Exact names take precedence over patterns, even over those
        that match a shorter part of the path. Raises MalformedHTTP or ModelNotFound."""
        problem: CortexError = ModelNotFound("There is no model in the path; use /upstream/MODEL/PATH.")
        matched: tuple[str, str] | None = None
        for name, path in split_upstream(request.path.decode("latin-1")):
            try:
                resolution = self._inference.services.dispatcher.resolve(name)
            except ModelNotFound as error:
                problem = error
                continue
            if name in (resolution.model_id, resolution.alias):
                return name, path
            matched = matched or (name, path)
        if matched is None:
            raise problem
        return matched


def _sends_key(request: Request) -> bool:
    return (request.header(b"authorization") or request.header(b"x-api-key")) is not None
