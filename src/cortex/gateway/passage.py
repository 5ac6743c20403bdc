"""One inference request on its way through: node after node until one answers, then the books.

Callback-driven: a passage is the observer of its relay and owns nothing but its own progress. It costs no task,
and while the answer flows it does nothing per chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import quote

import msgspec

from cortex.gateway import envelope as envelopes
from cortex.gateway.config import GatewaySection
from cortex.gateway.departures import Departures
from cortex.gateway.desk import Admission, Desk
from cortex.gateway.dialects import CHAT, Route, error_answer
from cortex.gateway.envelope import Envelope
from cortex.gateway.http.exchange import Exchange
from cortex.gateway.http.faults import UpstreamFault
from cortex.gateway.http.relay import Keepalive, Outcome, Relay
from cortex.gateway.http.request import Headers
from cortex.gateway.http.ticker import Ticker
from cortex.gateway.metrics import Metrics
from cortex.gateway.nodes import NodeClient, error_from
from cortex.gateway.tickets import NOBODY, Lease, Ticket
from cortex.gateway.translation import ChatTranslation, foreign_error
from cortex.gateway.usage import usage_in
from cortex.telemetry import UNTRACED, Span, Tracer
from cortex.wire import openai_chat
from cortex.wire.errors import CortexError, UpstreamInterrupted, UpstreamUnavailable
from cortex.wire.events import Usage

log = logging.getLogger("cortex.access")

MAX_ATTEMPTS = 3
"""Nodes that one request may be sent to before it is given up."""

STATUS_CODE = "http.response.status_code"
BYTES_PER_TOKEN = 4
BYTES_PER_STREAMED_TOKEN = 200
"""An event that carries one token, with its envelope."""


@dataclass(slots=True)
class Services:
    """What every passage needs; one per gateway process. A reload replaces `config` while requests run."""

    config: GatewaySection
    desk: Desk
    nodes: Mapping[str, NodeClient]
    metrics: Metrics
    tracer: Tracer
    ticker: Ticker
    departures: Departures
    clock: Callable[[], float]


class Passage:
    """One admitted request. Observer of its relay; ends exactly once, in `on_done`."""

    __slots__ = (
        "_admission",
        "_attempt",
        "_attempts",
        "_body",
        "_envelope",
        "_error_code",
        "_excluded",
        "_first_data_at",
        "_id",
        "_lease",
        "_model",
        "_overhead_s",
        "_received",
        "_relay",
        "_route",
        "_services",
        "_span",
        "_started_at",
        "_status",
        "_stream",
        "_ticket",
        "_translation",
    )

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        route: Route,
        body: bytes,
        envelope: Envelope,
        admission: Admission,
        id: bytes,
        span: Span,
    ) -> None:
        self._services = services
        self._route = route
        self._envelope = envelope
        self._admission = admission
        self._model = admission.model
        self._id = id
        self._stream = bool(envelope.stream) and route.generates
        self._received = body
        self._span = span
        self._attempt: Span | None = None
        self._body: bytes | None = None
        self._lease: Lease | None = None
        self._ticket: Ticket | None = None
        self._excluded = NOBODY
        self._attempts = 0
        self._status = 0
        self._error_code: str | None = None
        self._started_at = services.clock()
        self._overhead_s: float | None = None
        self._first_data_at: float | None = None
        self._translation: ChatTranslation | None = None
        relay = Relay(
            exchange,
            self,
            services.ticker,
            keepalive=Keepalive(route.codec.KEEPALIVE, services.config.keepalive_s) if self._stream else None,
            extra_headers=((b"x-request-id", id),),
        )
        # Gone once the answer is complete: passage and relay know each other, and a cycle would outlive them.
        self._relay: Relay | None = None if relay.closed else relay

    def go(self) -> None:
        """Find a node, or wait for one."""
        if self._relay is None:
            return
        ticket = self._ticket = Ticket(
            self._model,
            self._envelope.leading_bytes,
            self._deliver,
            self._services.clock(),
            origin=self._admission.origin,
            need=self._route.need,
            excluded=self._excluded,
            number=self._admission.number,
        )
        self._services.desk.ask(ticket)

    def _deliver(self, result: Lease | CortexError) -> None:
        """There is a node, or will be none."""
        self._ticket = None
        if isinstance(result, Lease):
            try:
                self._send(result)
            except CortexError as error:
                self._refuse(error)
        else:
            self._refuse(result)

    def _send(self, lease: Lease) -> None:
        assert self._relay is not None  # nobody sends after the end
        self._lease = lease
        services = self._services
        node = services.nodes[lease.node]
        if self._route.dialect in lease.dialects or not self._route.generates:
            target, body, self._translation = self._route.path, self._relayed_body(), None
        else:
            target, body, self._translation = CHAT.path, *self._translated()
        headers: Headers = (
            *node.headers,
            (b"content-type", b"application/json"),
            (b"accept", b"text/event-stream" if self._stream else b"application/json"),
            (b"x-request-id", self._id),
            (b"x-cortex-principal", _header_value(self._admission.hold.principal)),
        )
        self._attempt = self._span.call(lease.node)
        if (traceparent := self._attempt.traceparent) is not None:
            headers = (*headers, (b"traceparent", traceparent))
        if self._overhead_s is None:
            self._overhead_s = services.clock() - self._started_at - lease.waited_s
        self._attempts += 1
        self._relay.send(
            node.pool,
            b"POST",
            target,
            headers,
            body,
            translation=self._translation,
            silence_s=services.config.idle_timeout_s,
        )

    def _relayed_body(self) -> bytes:
        """What was received, with the model's name where the client wrote an alias."""
        if self._body is None:
            self._body = self._received
            if self._envelope.model != self._model:
                self._body = envelopes.replace_model(self._received, self._model)
        return self._body

    def _translated(self) -> tuple[bytes, ChatTranslation]:
        """The request in OpenAI chat, and what turns the answer back. Raises CortexError on a body it cannot read."""
        request = self._route.codec.parse(self._relayed_body())
        answer_id = self._route.codec.ID_PREFIX + self._id.decode().removeprefix("req_")
        name = self._envelope.model or request.model
        body = openai_chat.build(msgspec.structs.replace(request, model=self._model))
        return body, ChatTranslation(self._route, request, id=answer_id, model=name)

    def _release(self, fault: str | None = None) -> None:
        """The node has done what it will do for this request; `fault` is why it did not do all of it."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end({STATUS_CODE: self._status} if self._status else {}, error=fault)
        lease, self._lease = self._lease, None
        if lease is not None:
            self._services.desk.release(lease)

    def _refuse(self, error: CortexError) -> None:
        self._error_code = error.code
        answer = error_answer(error, self._route.family)
        self._status = answer.status
        if self._relay is not None:
            self._relay.refuse(answer.status, answer.headers, answer.body, self._route.codec.stream_error(error))

    # The relay's observer.

    def on_head(self, relay: Relay, status: int, headers: Headers) -> bool:  # noqa: ARG002
        """A node that cannot take the request now is passed over while another can."""
        self._status = status
        lease = self._lease
        if status < 400 or lease is None or not self._route.generates or self._attempts >= MAX_ATTEMPTS:
            return True
        if status == 404 and lease.has_lifecycle:
            # It was there at the last poll: somebody else unloaded it. Its node will load it again.
            self._services.desk.gone(lease)
            self._excluded = NOBODY
        elif status in (503, 529) and lease.has_alternatives:
            self._excluded |= {lease.node}
        else:
            return True
        self._count_retry()
        self._release(f"status {status}")
        self.go()
        return False

    def on_first_data(self, relay: Relay) -> None:  # noqa: ARG002
        self._first_data_at = self._services.clock()

    def on_fault(self, relay: Relay, fault: UpstreamFault) -> None:  # noqa: ARG002
        """Nothing was sent to the client yet: another node may answer, or this one once it is back."""
        assert self._lease is not None
        node = self._lease.node
        self._services.desk.suspect(node, str(fault))
        self._count_retry()
        self._release(str(fault))
        if self._attempts >= MAX_ATTEMPTS or not self._route.generates:
            self._refuse(UpstreamUnavailable(f"Node {node} failed before it answered: {fault}"))
            return
        self._excluded |= {node}
        self.go()

    def late_answer(self, relay: Relay, status: int, body: bytes) -> bytes:  # noqa: ARG002
        """A refusal that came after the first keepalive is told inside the stream."""
        node = self._lease.node if self._lease else ""
        error = foreign_error(status, body) if self._translation else error_from(node, status, body)
        self._error_code = error.code
        return self._route.codec.stream_error(error)

    def interruption(self, relay: Relay, fault: UpstreamFault) -> bytes:  # noqa: ARG002
        """The node died after its first byte."""
        node = self._lease.node if self._lease else ""
        if self._lease is not None:
            self._services.desk.suspect(node, str(fault))
        error = UpstreamInterrupted(
            f"Node {node} broke off in the middle of its answer: {fault}. Send the request again."
        )
        self._error_code = error.code
        return self._route.codec.stream_error(error)

    def on_done(self, relay: Relay, outcome: Outcome) -> None:
        """Settle: the lease, the books, the counters."""
        services = self._services
        now = services.clock()
        self._relay = None
        if self._ticket is not None:
            services.desk.cancel(self._ticket)
            self._ticket = None
        lease = self._lease
        node = lease.node if lease is not None else ""
        self._release(self._error_code)
        usage = self._told(relay)
        left = outcome is Outcome.CLIENT_LEFT
        if left and usage is None and lease is not None and lease.has_lifecycle and self._route.generates:
            guess, book = self._guess(relay), partial(self._book, node)
            services.departures.ask(services.nodes.get(node), self._id.decode(), guess, book)
        else:
            usage = usage or self._guess(relay)
            self._book(node, usage)
        if left:
            services.metrics.disconnects.labels(self._phase()).inc()
        if self._error_code is not None or self._status >= 400:
            services.metrics.errors.labels(self._model, node, self._error_code or f"status_{self._status}").inc()
        if node:
            self._count(node, now, usage)
        self._end_span(node, outcome, usage)
        if services.config.access_log:
            self._log(node, now, outcome, usage)

    def _book(self, node: str, usage: Usage | None) -> None:
        """Settle with what was used, as soon as that is known."""
        hold = self._admission.hold
        hold.settle(usage, model=self._model, node=node, request_id=self._id.decode())
        if usage is not None:
            self._services.metrics.spend(self._model, hold.principal).add(usage)

    def _told(self, relay: Relay) -> Usage | None:
        """What the answer itself says it cost."""
        if not self._has_answer():
            return None
        return (self._translation.usage if self._translation else None) or usage_in(relay.tail)

    def _guess(self, relay: Relay) -> Usage | None:
        """What an answer that does not say so cost, from its size: it is never free."""
        return _estimate(len(self._received), relay.num_body_bytes, self._stream) if self._has_answer() else None

    def _has_answer(self) -> bool:
        return self._first_data_at is not None and self._status < 400 and self._route.generates

    def _phase(self) -> str:
        if self._first_data_at is not None:
            return "decode"
        return "prefill" if self._attempts and self._lease is None else "wait"

    def _count(self, node: str, now: float, usage: Usage | None) -> None:
        metrics = self._services.metrics
        traffic = metrics.traffic(self._model, node)
        traffic.num_requests += 1
        traffic.duration.observe(now - self._started_at)
        if self._overhead_s is not None:
            metrics.overhead.observe(self._overhead_s)
        # A whole answer's first byte is its last token's: only streams show when the first one came.
        first = self._first_data_at if self._stream else None
        if first is not None:
            traffic.first_token.observe(first - self._started_at)
        if usage is not None:
            later_tokens = usage.completion_tokens - 1
            if first is not None and now > first and later_tokens > 0:
                traffic.speed.observe(later_tokens / (now - first))

    def _count_retry(self) -> None:
        assert self._lease is not None
        self._services.metrics.retries.labels(self._model, self._lease.node).inc()

    def _end_span(self, node: str, outcome: Outcome, usage: Usage | None) -> None:
        if self._span is UNTRACED:
            return
        attributes: dict[str, str | int | float] = {
            "cortex.request_id": self._id.decode(),
            "cortex.principal": self._admission.hold.principal,
            "cortex.node": node,
            "cortex.outcome": outcome.value,
            "cortex.attempts": self._attempts,
            "gen_ai.request.model": self._model,
            STATUS_CODE: self._status,
        }
        if usage is not None:
            attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        failed = self._error_code or (f"status_{self._status}" if self._status >= 400 else None)
        self._span.end(attributes, error=failed)

    def _log(self, node: str, now: float, outcome: Outcome, usage: Usage | None) -> None:
        fields = {
            "request_id": self._id.decode(),
            "principal": self._admission.hold.principal,
            "model": self._model,
            "node": node,
            "route": self._route.path.decode(),
            "status": self._status,
            "outcome": outcome.value,
            "duration_ms": round(1000 * (now - self._started_at), 1),
        }
        if usage is not None:
            fields |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        log.info("request", extra=fields)


def _estimate(num_request_bytes: int, num_answer_bytes: int, stream: bool) -> Usage:
    """What an answer cost, roughly, when its node did not say: it was cut off, or nobody asked for usage."""
    return Usage(
        prompt_tokens=num_request_bytes // BYTES_PER_TOKEN,
        completion_tokens=num_answer_bytes // (BYTES_PER_STREAMED_TOKEN if stream else BYTES_PER_TOKEN),
    )


@lru_cache(maxsize=4096)
def _header_value(text: str) -> bytes:
    """`text`, which may be any name an operator gave, as one safe header value."""
    return quote(text, safe=" @._-").encode()
