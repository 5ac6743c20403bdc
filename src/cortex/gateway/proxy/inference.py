"""The handler of the inference routes. A request that is admitted becomes a `ProxyRequest`."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Callable

import msgspec

from cortex.gateway.ledger.keys import may_use
from cortex.gateway.ledger.meter import ANONYMOUS
from cortex.gateway.proxy.accounting.activity import RequestRecord
from cortex.gateway.proxy.accounting.request_accounting import STATUS_CODE
from cortex.gateway.proxy.admission import AdmittedRequest, ReceivedRequest, ResponseKeeper, resolve_for
from cortex.gateway.proxy.outgoing_body import OpaqueBody
from cortex.gateway.proxy.request import ProxyRequest
from cortex.gateway.proxy.routes import InferenceRoute, error_response
from cortex.gateway.proxy.services import Services
from cortex.http.routing import query
from cortex.http.server.exchange import Exchange
from cortex.parsing import envelope as envelopes
from cortex.parsing.cost import is_edited_elsewhere, is_read_elsewhere
from cortex.parsing.envelope import RelayedBody
from cortex.system.tasks import run_once
from cortex.wire.dialects.anthropic_messages import BILLED
from cortex.wire.dialects.registry import client_field
from cortex.wire.errors import CortexError, InvalidAPIKey, ShuttingDown, shorten
from cortex.wire.fields.body import check_content_type
from cortex.wire.pooling.parse import names_model, only_model, with_model
from cortex.wire.preset import Preset

_JSON = b"application/json"
_READ_HEADERS = frozenset((b"content-type", b"origin", b"traceparent", b"x-request-id"))
_sane_id = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_id_prefix = f"req_{os.urandom(6).hex()}"
_id_counter = itertools.count(1)


def request_id_of(given: bytes | None) -> bytes:
    """The client's own request id when it is safe to pass on, else a new one."""
    if given is not None and _sane_id.fullmatch(given):
        return given
    return f"{_id_prefix}{next(_id_counter):06x}".encode()


def is_opaque(route: InferenceRoute) -> bool:
    """Whether only the model's server understands the fields of its requests."""
    return route.need == "relay"


class Inference:
    """Admits inference requests or rejects them."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.closing = False
        """Set at shutdown: every request is rejected."""

    def begin(self, exchange: Exchange, route: InferenceRoute) -> None:
        """Take over an exchange: it gets a response in the dialect of `route` in every case."""
        self.receive(exchange, route, self.serve)

    def receive(self, exchange: Exchange, route: InferenceRoute, then: Callable[[ReceivedRequest], None]) -> None:
        """Call `then` with the request of an exchange once its key is known and its body is read, or reject it."""
        services = self.services
        received_at = services.clock()
        request = exchange.request
        headers: dict[bytes, bytes] = {}
        for name, value in request.headers:
            if name in _READ_HEADERS:
                headers.setdefault(name, value)  # of repeated ones the first
        id = request_id_of(headers.get(b"x-request-id"))
        span = services.tracer.begin(route.span_name, headers.get(b"traceparent"))
        received = ReceivedRequest(exchange, route, id, span, received_at)
        try:
            # The key comes before the body: a client without one costs nothing and learns nothing.
            self.authenticate(received)
            content_type, is_from_page = headers.get(b"content-type"), b"origin" in headers
            # Ollama's clients do not declare their bodies, and web pages always send their origin.
            if content_type != _JSON and (is_from_page or route.family.declares_bodies):
                check_content_type((content_type or b"").decode("latin-1"), required=is_from_page)
            if route.may_lack_model and not names_model(request.body):
                request.body = with_model(request.body, self._only_model(received))
        except CortexError as error:
            self.reject_unread(received, error)
            return
        self.read(received, then)

    def authenticate(self, received: ReceivedRequest) -> None:
        """Set the key of a request, from its headers alone. Raises InvalidAPIKey, and ShuttingDown at the end."""
        if self.closing:
            raise ShuttingDown("This gateway is shutting down; try again in a moment.", retry_after_s=5.0)
        received.key = self.services.admission.meter.key(received.exchange.request)

    def read(self, received: ReceivedRequest, then: Callable[[ReceivedRequest], None]) -> None:
        """Read the body of a request and call `then`, or reject it."""
        request, route = received.exchange.request, received.route
        strip_billing = self.services.config.strip_billing_header and route.dialect in BILLED
        try:
            has_presets = self.services.dispatcher.catalogue.has_presets
            is_large = is_read_elsewhere(request.body, route.dialect, strip_billing=strip_billing)
            if is_large or (has_presets and is_edited_elsewhere(request.body)):
                task = run_once(self._read_large(received, strip_billing, then), "read a large request")
                received.exchange.on_disconnect(task.cancel)
                return
            read = envelopes.read_relayed(request.body, route.dialect, route.generates, strip_billing)
            if has_presets and (preset := self._preset(read, received)) is not None:
                read = envelopes.read_preset(read.body, route.dialect, route.generates, preset, is_opaque(route))
        except CortexError as error:
            self.reject_unread(received, error)
            return
        self._take(received, read)
        then(received)

    def _preset(self, read: RelayedBody, received: ReceivedRequest) -> Preset | None:
        """The fields that the model's name adds to the request."""
        dispatcher = self.services.dispatcher
        if not dispatcher.catalogue.has_presets or received.route.need in ("embeddings", "rerank"):
            return None
        try:
            return resolve_for(dispatcher, received.key, read.envelope.summary.model).preset
        except CortexError:  # which admission raises
            return None

    def _only_model(self, received: ReceivedRequest) -> str:
        """The model that the query names, or the only one that can serve the route. Raises MissingModel."""
        if named := query(received.exchange.request, "model"):
            return named
        held = [held for node in self.services.dispatcher.fleet.nodes for held in node.residencies.values()]
        models = [(each.model_id, each.status.capabilities) for each in held if may_use(received.key, each.model_id)]
        if received.route.need == "embeddings":
            return only_model([model for model, can in models if can.embeddings], "embed")
        return only_model([model for model, can in models if can.rerank], "score")

    async def _read_large(
        self, received: ReceivedRequest, strip_billing: bool, then: Callable[[ReceivedRequest], None]
    ) -> None:
        """Reads a body that would block the loop, in another process."""
        route, client, parser = received.route, received.client, self.services.parser
        body, generates = received.exchange.request.body, route.generates
        try:
            read = await parser.read_relayed(
                route.dialect, body, client, generates=generates, strip_billing=strip_billing
            )
            if (preset := self._preset(read, received)) is not None:
                read = await parser.read_preset(
                    route.dialect, read.body, client, generates=generates, is_opaque=is_opaque(route), preset=preset
                )
            self._take(received, read)
            then(received)
        except CortexError as error:
            self.reject_unread(received, error)
        except asyncio.CancelledError:
            self.disconnected(received)
            raise
        except Exception:
            if received.exchange.started:
                received.exchange.abort()
            else:
                self.reject_unread(received, CortexError("Internal error of the gateway; its log has the details."))
            raise  # to the log

    def disconnected(self, received: ReceivedRequest) -> None:
        """The client disconnected before its request was read."""
        self.services.metrics.disconnects.labels("wait").inc()
        received.span.end({}, error="client_disconnected")

    def _take(self, received: ReceivedRequest, read: RelayedBody) -> None:
        if read.is_stripped:
            self.services.metrics.stripped.inc()
        received.body, received.envelope = read.body, read.envelope

    def reject_unread(self, received: ReceivedRequest, error: CortexError) -> None:
        """Reject a request whose body was not read."""
        self._respond_with(error, received)
        if not isinstance(error, InvalidAPIKey | ShuttingDown):  # unauthenticated clients must not fill the log
            self._record(received, error)

    def serve(
        self,
        received: ReceivedRequest,
        keeper: ResponseKeeper | None = None,
        make_body: Callable[[AdmittedRequest], OpaqueBody] | None = None,
        *,
        is_check: bool = False,
    ) -> None:
        """Admit a request and send it to a node, or reject it. `keeper` gets its response. `make_body`: what nodes get
        in place of the body that was read. `is_check`: see `AdmittedRequest`."""
        route, body, envelope = received.route, received.body, received.envelope
        try:
            has_price = route.need == "relay"  # its tokens are not in its bytes
            num_bytes = len(body) - envelope.summary.picture_bytes if route.uses_tokens and not has_price else 0
            admitted = self.services.admission.admit(
                received.key,
                num_bytes,
                envelope.summary,
                has_price=has_price,
                is_check=is_check,
                idle=received.idle,
            )
        except CortexError as error:
            error.param = client_field(route.dialect, error.param)
            self.reject(received, error)
            return
        if make_body is None and self.services.pictures.applies(body):
            task = run_once(self._serve_inlined(received, admitted, keeper), "fetch pictures")
            received.exchange.on_disconnect(task.cancel)
        else:
            other = None if make_body is None else make_body(admitted)
            ProxyRequest(self.services, received, admitted, keeper, other).go()

    async def _serve_inlined(
        self, received: ReceivedRequest, admitted: AdmittedRequest, keeper: ResponseKeeper | None
    ) -> None:
        """Sends a request with the pictures that it names by address."""
        parser, route = self.services.parser, received.route
        client = received.client
        try:
            body = await self.services.pictures.inlined(
                received.body, client, self.services.config.max_body_mb * 1024 * 1024
            )
            read = await parser.read_relayed(
                route.dialect, body, client, generates=route.generates, strip_billing=False
            )
            if read.envelope.summary.has_pictures:
                self.services.admission.check_pictures(received.key, admitted.model)
        except CortexError as error:
            admitted.reservation.cancel()
            error.param = client_field(route.dialect, error.param)
            self.reject(received, error)
        except asyncio.CancelledError:  # the client disconnected
            admitted.reservation.cancel()
            received.span.end({}, error="client_disconnected")
            raise
        except Exception:
            admitted.reservation.cancel()
            self.reject(received, CortexError("Internal error of the gateway; its log has the details."))
            raise  # to the log
        else:
            exchange, num_bytes, buffered = received.exchange, len(read.body), self.services.buffered

            def release() -> None:
                buffered.num_bytes -= num_bytes

            if not exchange.closed:  # the body with the files is held until the response ends
                buffered.num_bytes += num_bytes
                exchange.on_end = release
            inlined = msgspec.structs.replace(received, body=read.body, envelope=read.envelope)
            ProxyRequest(self.services, inlined, admitted, keeper).go()

    def reject(self, received: ReceivedRequest, error: CortexError) -> None:
        """Reject a request that was received."""
        self._respond_with(error, received)
        self._record(received, error)

    def _record(self, received: ReceivedRequest, error: CortexError) -> None:
        """Record a request that was rejected before it had a model."""
        key, route = received.key, received.route
        number, wall_time = self.services.activity.stamp()
        self.services.activity.append(
            RequestRecord(
                number=number,
                id=received.id,
                ended_at=wall_time,
                key_id=key.id if key is not None else None,
                key_name=key.name if key is not None else ANONYMOUS,
                model=shorten(received.envelope.summary.model),
                node="",
                dialect=route.dialect,
                path=route.path,
                status=route.family.status(error),
                outcome="rejected",
                error_code=error.code,
                error_message=error.message,
                reason="rejected before it was sent to a node",
            )
        )

    def _respond_with(self, error: CortexError, received: ReceivedRequest) -> None:
        route, id = received.route, received.id
        # Without the model: a name that a client invented must not become a label.
        self.services.metrics.errors.labels("", "", error.code).inc()
        response = error_response(error, route.family)
        received.span.end({"cortex.request_id": id.decode(), STATUS_CODE: response.status}, error=error.code)
        received.exchange.respond(response.status, (*response.headers, *route.id_headers(id)), response.body)
