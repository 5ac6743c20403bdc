"""Accounts for one inference request when it has ended: usage, counters, span and log line."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

from cortex.gateway.dispatch.leases import Lease
from cortex.gateway.proxy.admission import AdmittedRequest
from cortex.gateway.proxy.routes import Route
from cortex.gateway.proxy.services import Services
from cortex.http.relay import Outcome
from cortex.telemetry import UNTRACED, Span
from cortex.wire.events import Usage

log = logging.getLogger("cortex.access")

STATUS_CODE = "http.response.status_code"
BYTES_PER_TOKEN = 4
BYTES_PER_STREAMED_TOKEN = 200
"""The size of an event with one token."""


@dataclass(slots=True, eq=False)
class RequestAccounting:
    """The facts about one request. The `ProxyRequest` writes them and calls `close` exactly once."""

    services: Services
    route: Route
    admitted: AdmittedRequest
    id: bytes
    span: Span
    num_request_bytes: int
    stream: bool
    started_at: float = field(init=False)
    status: int = 0
    """The HTTP status for the client; 0 before there is one."""
    error_code: str | None = None
    num_attempts: int = 0
    """How often it was sent to a node."""
    overhead_s: float | None = None
    """The time that the gateway itself took until it first sent the request."""
    first_data_at: float | None = None

    def __post_init__(self) -> None:
        self.started_at = self.services.clock()

    def sent(self, lease: Lease) -> None:
        """The request is about to be sent to a node."""
        if self.overhead_s is None:
            self.overhead_s = self.services.clock() - self.started_at - lease.waited_s
        self.num_attempts += 1

    def failed_at(self, lease: Lease) -> None:
        """A node did not serve the request; another one may."""
        self.services.metrics.retries.labels(self.admitted.model, lease.node).inc()

    def close(self, lease: Lease | None, outcome: Outcome, reported: Usage | None, num_response_bytes: int) -> None:
        """The response has ended. `lease` is the last node's, `reported` the usage that the response reports."""
        services = self.services
        now = services.clock()
        node = lease.node if lease is not None else ""
        disconnected = outcome is Outcome.CLIENT_DISCONNECTED
        has_response = self.first_data_at is not None and self.status < 400 and self.route.generates
        estimate = self._estimate(num_response_bytes) if has_response else None
        usage = reported if has_response else None
        if disconnected and usage is None and lease is not None and lease.has_lifecycle and self.route.generates:
            services.disconnected_usage.fetch(
                services.nodes.get(node), self.id.decode(), estimate, partial(self._settle, node)
            )
        else:
            usage = usage or estimate
            self._settle(node, usage)
        if disconnected:
            services.metrics.disconnects.labels(self._phase()).inc()
        if failure := self._failure():
            services.metrics.errors.labels(self.admitted.model, node, failure).inc()
        if node:
            self._count(node, now, usage)
        if self.span is not UNTRACED:
            self._end_span(node, outcome, usage)
        if services.config.access_log:
            self._log(node, now, outcome, usage)

    def _estimate(self, num_response_bytes: int) -> Usage:
        """A rough estimate by size, for a response that reports no usage: it must not be free."""
        return Usage(
            prompt_tokens=self.num_request_bytes // BYTES_PER_TOKEN,
            completion_tokens=num_response_bytes // (BYTES_PER_STREAMED_TOKEN if self.stream else BYTES_PER_TOKEN),
        )

    def _settle(self, node: str, usage: Usage | None) -> None:
        """Record the usage, once it is known."""
        model, reservation = self.admitted.model, self.admitted.reservation
        reservation.settle(usage, model=model, node=node)
        if usage is not None:
            self.services.metrics.spend(model, reservation.principal).add(usage)

    def _phase(self) -> str:
        if self.first_data_at is not None:
            return "decode"
        return "prefill" if self.num_attempts else "wait"

    def _result(self, outcome: Outcome) -> str:
        """The outcome for operators. A stream that ended with an error event is complete for the relay only."""
        return "failed" if outcome is Outcome.COMPLETE and self.error_code is not None else outcome.value

    def _failure(self) -> str | None:
        return self.error_code or (f"status_{self.status}" if self.status >= 400 else None)

    def _count(self, node: str, now: float, usage: Usage | None) -> None:
        metrics = self.services.metrics
        traffic = metrics.traffic(self.admitted.model, node)
        traffic.num_requests += 1
        traffic.duration.observe(now - self.started_at)
        if self.overhead_s is not None:
            metrics.overhead.observe(self.overhead_s)
        # The first byte of a whole response comes with its last token: only streams show when the first token came.
        first = self.first_data_at if self.stream else None
        if first is not None:
            traffic.first_token.observe(first - self.started_at)
        if usage is not None:
            later_tokens = usage.completion_tokens - 1
            if first is not None and now > first and later_tokens > 0:
                traffic.speed.observe(later_tokens / (now - first))

    def _end_span(self, node: str, outcome: Outcome, usage: Usage | None) -> None:
        attributes: dict[str, str | int | float] = {
            "cortex.request_id": self.id.decode(),
            "cortex.principal": self.admitted.reservation.principal,
            "cortex.node": node,
            "cortex.outcome": self._result(outcome),
            "cortex.attempts": self.num_attempts,
            "gen_ai.request.model": self.admitted.model,
            STATUS_CODE: self.status,
        }
        if usage is not None:
            attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        self.span.end(attributes, error=self._failure())

    def _log(self, node: str, now: float, outcome: Outcome, usage: Usage | None) -> None:
        fields = {
            "request_id": self.id.decode(),
            "principal": self.admitted.reservation.principal,
            "model": self.admitted.model,
            "node": node,
            "route": self.route.path.decode(),
            "status": self.status,
            "outcome": self._result(outcome),
            "duration_ms": round(1000 * (now - self.started_at), 1),
        }
        if usage is not None:
            fields |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        log.info("request", extra=fields)
