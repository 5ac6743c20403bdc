"""One inference request: sent to one node after the other until one responds.

A `ProxyRequest` is the observer of its relay. It works in callbacks, so it needs no task, and it does nothing per chunk
while the response is relayed. Its `RequestAccounting` records the result.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from urllib.parse import quote

import msgspec

from cortex.gateway.dispatch.leases import NO_NODES, Lease, PendingRequest
from cortex.gateway.dispatch.node_client import error_from
from cortex.gateway.proxy import envelope as envelopes
from cortex.gateway.proxy.accounting import STATUS_CODE, RequestAccounting
from cortex.gateway.proxy.admission import AdmittedRequest
from cortex.gateway.proxy.envelope import Envelope
from cortex.gateway.proxy.redaction import ErrorRedaction, hides_errors_of, shown_to
from cortex.gateway.proxy.routes import CHAT, Route, error_response
from cortex.gateway.proxy.services import Services
from cortex.gateway.proxy.translation import ChatTranslation, foreign_error
from cortex.gateway.proxy.usage import reported_usage
from cortex.http.relay import Keepalive, Outcome, Relay
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.http.upstream.faults import UpstreamFault
from cortex.telemetry import Span
from cortex.wire import failure_report, openai_chat, usage_report
from cortex.wire.errors import CortexError, UpstreamInterrupted, UpstreamUnavailable
from cortex.wire.headers import NODE, PRINCIPAL

_PRINCIPAL_HEADER = PRINCIPAL.encode()
_NODE_HEADER = NODE.encode()
_USAGE_HEADER = usage_report.HEADER.encode()

MAX_ATTEMPTS = 3
"""How often one request may be sent before it is rejected."""


@dataclass(slots=True, eq=False)
class ProxyRequest:
    """One admitted request. Ends exactly once, in `on_done`."""

    services: Services
    exchange: InitVar[Exchange]
    route: Route
    received: bytes
    envelope: Envelope
    admitted: AdmittedRequest
    id: bytes
    span: Span
    _accounting: RequestAccounting = field(init=False)
    _relay: Relay | None = field(init=False)
    """Cleared in `on_done`: request and relay refer to each other, and the cycle would outlive them."""
    _attempt: Span | None = field(init=False, default=None)
    _body: bytes | None = field(init=False, default=None)
    _lease: Lease | None = field(init=False, default=None)
    _pending: PendingRequest | None = field(init=False, default=None)
    _excluded: frozenset[str] = field(init=False, default=NO_NODES)
    _translation: ChatTranslation | None = field(init=False, default=None)
    _usage_header: bytes | None = field(init=False, default=None)

    def __post_init__(self, exchange: Exchange) -> None:
        services, route = self.services, self.route
        is_stream = bool(self.envelope.stream) and route.generates
        self._accounting = RequestAccounting(
            services, route, self.admitted, self.id, self.span, num_request_bytes=len(self.received), stream=is_stream
        )
        relay = Relay(
            exchange,
            self,
            services.ticker,
            keepalive=Keepalive(route.codec.KEEPALIVE, services.config.keepalive_s) if is_stream else None,
            extra_headers=route.id_headers(self.id),
        )
        self._relay = None if relay.closed else relay

    def go(self) -> None:
        """Get a lease for a node, or wait for one."""
        if self._relay is None:
            return
        pending = self._pending = PendingRequest(
            self.admitted.model,
            self.envelope.leading_bytes,
            self._deliver,
            self.services.clock(),
            origin=self.admitted.origin,
            need=self.route.need,
            excluded=self._excluded,
        )
        try:
            self.services.dispatcher.ask(pending)
        except CortexError as error:
            self._deliver(error)

    def _deliver(self, result: Lease | CortexError) -> None:
        """There is a lease, or there will be none."""
        self._pending = None
        if isinstance(result, Lease):
            try:
                self._send(result)
            except CortexError as error:
                self._reject(error)
        else:
            self._reject(result)

    def _send(self, lease: Lease) -> None:
        assert self._relay is not None  # nothing is sent after the end
        self._lease = lease
        services = self.services
        node = services.nodes[lease.node]
        if self.route.dialect in lease.dialects or not self.route.generates:
            target, body, self._translation = self.route.path, self._relayed_body(), None
        else:
            target, body, self._translation = CHAT.path, *self._translated()
        headers: Headers = (
            *node.headers,
            (b"content-type", b"application/json"),
            (b"accept", b"text/event-stream" if self._accounting.stream else b"application/json"),
            (b"x-request-id", self.id),
            (_PRINCIPAL_HEADER, _header_value(self.admitted.reservation.principal)),
        )
        self._attempt = self.span.call(lease.node)
        if (traceparent := self._attempt.traceparent) is not None:
            headers = (*headers, (b"traceparent", traceparent))
        self._accounting.sent(lease)
        self._relay.send(
            node.pool,
            b"POST",
            target,
            headers,
            body,
            translation=self._translation,
            response_headers=((_NODE_HEADER, _header_value(lease.node)),) if services.config.node_header else (),
            silence_s=services.config.idle_timeout_s,
        )

    def _relayed_body(self) -> bytes:
        """The client's body, with the model's name in place of an alias."""
        if self._body is None:
            self._body = self.received
            if self.envelope.model != self.admitted.model:
                self._body = envelopes.replace_model(self.received, self.admitted.model)
        return self._body

    def _translated(self) -> tuple[bytes, ChatTranslation]:
        """The request in OpenAI chat, and the translation of the response. Raises CortexError on an invalid body."""
        request = self.route.codec.parse(self._relayed_body())
        response_id = self.route.codec.ID_PREFIX + self.id.decode().removeprefix("req_")
        name = self.envelope.model or request.model
        body = openai_chat.build(msgspec.structs.replace(request, model=self.admitted.model))
        return body, ChatTranslation(self.route, request, id=response_id, model=name)

    def _release(self, fault: str | None = None) -> None:
        """Return the lease; `fault` is why the node did not complete the request."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end({STATUS_CODE: self._accounting.status} if self._accounting.status else {}, error=fault)
        lease, self._lease = self._lease, None
        if lease is not None:
            self.services.dispatcher.release(lease)

    def _reject(self, error: CortexError) -> None:
        self._accounting.error_code = error.code
        error = shown_to(self.admitted.key, error)
        response = error_response(error, self.route.family)
        self._accounting.status = response.status
        if self._relay is not None:
            self._relay.reject(*response, self.route.codec.stream_error(error))

    # --- the relay's callbacks

    def on_head(self, relay: Relay, status: int, headers: Headers) -> bool:
        """Try another node when this one cannot serve the request now and another may."""
        self._accounting.status = status
        self._usage_header = next((value for name, value in headers if name == _USAGE_HEADER), None)
        lease = self._lease
        if status < 400 or lease is None:
            return True
        key = self.admitted.key
        if key is not None and hides_errors_of(key, status):
            relay.translate(ErrorRedaction(key, self.route.family, self._error_of_node))
        if not self.route.generates or self._accounting.num_attempts >= MAX_ATTEMPTS:
            return True
        if status == 404 and lease.has_lifecycle:
            # The model was there at the last poll and has been unloaded since. Its node will load it again.
            self.services.dispatcher.gone(lease)
            self._excluded = NO_NODES
        elif status in (503, 529) and lease.has_alternatives:
            self._excluded |= {lease.node}
        else:
            return True
        self._accounting.failed_at(lease)
        self._release(f"status {status}")
        self.go()
        return False

    def on_first_data(self, relay: Relay) -> None:  # noqa: ARG002
        self._accounting.first_data_at = self.services.clock()

    def on_fault(self, relay: Relay, fault: UpstreamFault) -> None:  # noqa: ARG002
        """The client has nothing yet: try another node, or this one again once it is back."""
        assert self._lease is not None
        node = self._lease.node
        self.services.dispatcher.suspect(node, str(fault))
        self._accounting.failed_at(self._lease)
        self._release(str(fault))
        if self._accounting.num_attempts >= MAX_ATTEMPTS or not self.route.generates:
            self._reject(UpstreamUnavailable(f"Node {node} failed before it responded: {fault}"))
            return
        self._excluded |= {node}
        self.go()

    def late_response(self, relay: Relay, status: int, body: bytes) -> bytes:  # noqa: ARG002
        """Report an error that came after the first keepalive inside the stream."""
        error = self._error_of_node(status, body)
        self._accounting.error_code = error.code
        return self.route.codec.stream_error(shown_to(self.admitted.key, error))

    def _error_of_node(self, status: int, body: bytes) -> CortexError:
        node = self._lease.node if self._lease else ""
        return foreign_error(status, body) if self._translation else error_from(node, status, body)

    def interruption(self, relay: Relay, fault: UpstreamFault) -> bytes:  # noqa: ARG002
        """The node failed after its first byte."""
        node = self._lease.node if self._lease else ""
        if self._lease is not None:
            self.services.dispatcher.suspect(node, str(fault))
        error = UpstreamInterrupted(
            f"Node {node} failed in the middle of its response: {fault}. Send the request again."
        )
        self._accounting.error_code = error.code
        return self.route.codec.stream_error(shown_to(self.admitted.key, error))

    def on_done(self, relay: Relay, outcome: Outcome) -> None:
        """Return the lease and account for the request."""
        self._relay = None
        if self._pending is not None:
            self.services.dispatcher.cancel(self._pending)
            self._pending = None
        lease = self._lease
        tail = relay.tail
        if self._accounting.stream and self._accounting.error_code is None and self._accounting.status < 400:
            self._accounting.error_code = failure_report.from_stream(bytes(tail))
        self._release(self._accounting.error_code)
        if self._translation is not None:
            usage = self._translation.usage
        else:
            is_foreign = lease is not None and not lease.has_lifecycle
            usage = reported_usage(self._usage_header, bytes(tail), is_foreign=is_foreign)
        self._accounting.close(lease, outcome, usage, tail.num_bytes)


@lru_cache(maxsize=4096)
def _header_value(text: str) -> bytes:
    """`text`, any name that an operator chose, as a safe header value."""
    return quote(text, safe=" @._-").encode()
