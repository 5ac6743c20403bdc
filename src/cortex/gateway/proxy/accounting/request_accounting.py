"""Accounts for one inference request when it has ended: usage, counters, span, log line and activity."""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import dataclass

from cortex.gateway.dispatch.leases import Lease
from cortex.gateway.proxy.accounting.activity import Capture, RequestRecord
from cortex.gateway.proxy.accounting.running import Phase, RunningRequest
from cortex.gateway.proxy.admission import AdmittedRequest, ReceivedRequest
from cortex.gateway.proxy.routes import InferenceRoute
from cortex.gateway.proxy.services import Services
from cortex.http.observer import Outcome
from cortex.telemetry.spans import (
    CACHED_TOKENS,
    INPUT_TOKENS,
    MODEL,
    OPERATION,
    OUTPUT_TOKENS,
    PROVIDER,
    PROVIDER_NAME,
    operation_name,
)
from cortex.telemetry.tracing import UNTRACED
from cortex.wire.errors import CortexError, ModelNotFound
from cortex.wire.events import Usage
from cortex.wire.words import duration

SHOWN_QUEUE_MS = 100
"""A request that waited this long for a slot has the reason in its record."""

log = logging.getLogger("cortex.access")
budget_log = logging.getLogger(__name__)

# A module global is looked up faster than a member of its class.
_COMPLETE, _DISCONNECTED, _CANCELLED = Outcome.COMPLETE, Outcome.CLIENT_DISCONNECTED, Outcome.CANCELLED

_GATEWAY_ID = os.urandom(8).hex().encode()
_attempt_numbers = itertools.count(1)
STATUS_CODE = "http.response.status_code"
BYTES_PER_TOKEN = 4
BYTES_PER_STREAMED_TOKEN = 200
"""The size of an event with one token."""


@dataclass(slots=True, eq=False)
class RequestAccounting:
    """The record of one request. The `ProxyRequest` writes it and calls `close` exactly once."""

    services: Services
    route: InferenceRoute
    received: ReceivedRequest
    admitted: AdmittedRequest
    stream: bool
    started_at: float
    """When all of its bytes had arrived."""
    status: int = 0
    """The HTTP status for the client; 0 before there is one."""
    error_code: str | None = None
    relayed_code: str | None = None
    """The code of a node's error response that the client got unchanged."""
    error_message: str | None = None
    """For operators: it may name nodes and files."""
    capture: Capture | None = None
    dimensions: int | None = None
    """The length of the vectors in the response."""
    waited_s: float = 0.0
    """Time in queues."""
    load_s: float = 0.0
    """The part of `waited_s` in which the model was loaded."""
    failed_nodes: tuple[str, ...] = ()
    num_attempts: int = 0
    """How often it was sent to a node."""
    attempt_number: int = 0
    """Unique for every attempt of this gateway."""
    overhead_s: float | None = None
    """The gateway's own time until it first sent the request."""
    sent_at: float = 0.0
    """When it was last sent to a node."""
    first_data_at: float | None = None
    reported_first_token_s: float | None = None
    """The time from the arrival at the node to the first token, as the node measured it; for a whole response only."""
    # Known from `close` on.
    ended_at: float = 0.0
    first_token_s: float | None = None
    """Time to the first token; None where it is not known."""
    failure: str | None = None
    """The code of the error that the client got."""

    def sent(self, lease: Lease) -> None:
        """The request is about to be sent to a node."""
        self.sent_at = self.services.clock()
        if not self.admitted.is_idle:
            self.services.idle_caps.began(lease.node, self.sent_at)
        if self.overhead_s is None:
            self.overhead_s = self.sent_at - self.started_at - lease.waited_s
        self.num_attempts += 1
        self.attempt_number = next(_attempt_numbers)
        self.waited_s += lease.waited_s
        self.load_s += lease.load_s

    @property
    def held_s(self) -> float:
        """From the request's last byte to its latest attempt."""
        return self.sent_at - self.started_at

    def _first_token_s(self) -> float | None:
        """The first byte of a whole response comes with its last token. A neuron reports the time of the first."""
        if not self.stream:
            reported_s = self.reported_first_token_s
            return None if reported_s is None else self.held_s + reported_s
        return None if self.first_data_at is None else self.first_data_at - self.started_at

    @property
    def attempt_id(self) -> bytes:
        """The latest attempt, as its node knows it."""
        return b"%b-%x" % (_GATEWAY_ID, self.attempt_number)

    def failed_with(self, error: CortexError) -> None:
        """The client gets this error, without what its key may not see."""
        self.error_code, self.error_message = error.code, error.message

    def failed_at(self, lease: Lease) -> None:
        """A node failed to serve the request; another may serve it."""
        self.failed_nodes += (lease.node,)
        self.services.metrics.retries.labels(self.admitted.model, lease.node).inc()

    def close(self, lease: Lease | None, outcome: Outcome, reported: Usage | None, num_response_bytes: int) -> None:
        """The response has ended. `lease` is the last node's, `reported` the usage that the response reports."""
        services = self.services
        now = self.ended_at = services.clock()
        self.first_token_s, self.failure = self._first_token_s(), self._failure()
        node = lease.node if lease is not None else ""
        disconnected = outcome is _DISCONNECTED
        is_charged = self.route.uses_tokens and not self.admitted.is_check
        has_response = self.first_data_at is not None and self.status < 400 and is_charged
        # A node of ours reports what a rejected request took before, such as pictures that it decoded.
        is_rejected_work = (
            400 <= self.status < 500 and is_charged and lease is not None and lease.abilities.reads_headers
        )
        usage = reported if has_response or is_rejected_work else None
        is_cut_off = disconnected or outcome is _CANCELLED
        # A server of speech or images has done most of its work before its first byte. A cancelled request has the
        # status of its cancellation.
        is_unpaid_work = is_cut_off and lease is not None and self.route.need == "relay" and self.num_attempts > 0
        is_unpaid_work = is_unpaid_work and is_charged and (self.status < 400 or outcome is _CANCELLED)
        is_estimated = usage is None and (has_response or is_unpaid_work)
        estimate = self._estimate(num_response_bytes) if is_estimated else None
        may_node_know = self.route.runs_model and self.route.need != "relay"  # of those it reads no tokens
        if is_cut_off and usage is None and lease is not None and lease.abilities.reads_headers and may_node_know:
            work = self._settle_cut_off(lease, outcome, estimate)
            services.settling.start(work, f"usage of {self.attempt_id.decode()}")
        else:
            usage = usage or estimate
            self._settle(lease, outcome, usage)
        has_generated = has_response and outcome is _COMPLETE and self.route.generates
        if lease is not None and reported is not None and has_generated:
            num_computed = reported.prompt_tokens - reported.cached_tokens
            first_token_s = self.first_data_at - self.sent_at if self.stream and self.first_data_at else None
            services.dispatcher.measured(lease, num_computed, first_token_s, now - self.sent_at)
        if disconnected:
            services.metrics.disconnects.labels(self._phase()).inc()
        if self.failure is not None:
            services.metrics.errors.labels(self.admitted.model, node, self.failure).inc()
        if node:
            self._count(node, usage)
        if self.received.span is not UNTRACED:
            self._end_span(node, outcome, usage)
        if services.config.access_log:
            self._log(node, outcome, usage)

    def _estimate(self, num_response_bytes: int) -> Usage:
        """A rough estimate by size, so that a response without reported usage is not free. No node uses more tokens
        than the request reserved."""
        if self.route.need == "relay":
            spec = self.services.dispatcher.catalogue.spec(self.admitted.model)
            minutes = (self.services.clock() - self.sent_at) / 60
            num_choices = self.received.envelope.summary.num_choices
            return Usage(prompt_tokens=spec.price_of(num_choices, minutes))
        bytes_per_token = BYTES_PER_STREAMED_TOKEN if self.stream else BYTES_PER_TOKEN
        prompt = (len(self.received.body) - self.received.envelope.summary.picture_bytes) // BYTES_PER_TOKEN
        completion = num_response_bytes // bytes_per_token if self.route.generates else 0
        if (limit := self.admitted.reservation.token_limit) is not None:
            prompt = min(prompt, limit)
            completion = min(completion, limit - prompt)
        return Usage(prompt_tokens=prompt, completion_tokens=completion)

    async def _settle_cut_off(self, lease: Lease, outcome: Outcome, estimate: Usage | None) -> None:
        """Only the node knows the usage of a response that was cut off. It responds within seconds, or the call
        fails."""
        usage, attempt_id = estimate, self.attempt_id.decode()
        try:
            if (client := self.services.nodes.get(lease.node)) is not None:
                usage = await client.request_usage(attempt_id)
        except CortexError as problem:
            budget_log.debug("usage estimated: node did not report it: %s", problem, extra={"attempt_id": attempt_id})
        self._settle(lease, outcome, usage)

    def _settle(self, lease: Lease | None, outcome: Outcome, usage: Usage | None) -> None:
        """Record the usage, once it is known."""
        services, received, route, admitted = self.services, self.received, self.route, self.admitted
        model, reservation, key = admitted.model, admitted.reservation, admitted.key
        node = lease.node if lease is not None else ""
        reason, duration_s = self._reason(lease), self.ended_at - self.started_at
        if usage is not None and usage.queued_ms >= SHOWN_QUEUE_MS:
            waited = duration(usage.queued_ms / 1000)
            reason = f"{reason}; it waited {waited} for a slot there, in the class `{admitted.request_class}`"
        if usage is not None and reservation.token_limit is not None and self._ended_at_budget(usage):
            reason = f"{reason}; ended at the {reservation.token_limit} tokens that its key had left for it"
            fields = {"request_id": self.received.id.decode(), "principal": reservation.principal, "model": model}
            budget_log.info("response ended at its budget: %d tokens", reservation.token_limit, extra=fields)
        if lease is None and self.error_code == ModelNotFound.code:
            reservation.cancel()  # an alias without a model: no usage has its name
        else:
            reservation.settle(usage, model=model, node=node)
        if usage is not None:
            cost = services.dispatcher.catalogue.cost(model, usage)
            services.metrics.spend(model, reservation.principal).add(usage, cost)
        number, wall_time = services.activity.stamp()
        services.activity.append(
            RequestRecord(
                number=number,
                id=received.id,
                ended_at=wall_time,
                key_id=key.id if key is not None else None,
                key_name=reservation.principal,
                model=model,
                node=node,
                dialect=route.dialect,
                path=route.path,
                status=self.status,
                outcome=self._result(outcome),
                waited_s=self.waited_s if self.num_attempts else duration_s,
                load_s=self.load_s,
                first_token_s=self.first_token_s,
                duration_s=duration_s,
                num_attempts=self.num_attempts,
                request_class=admitted.request_class,
                usage=usage,
                dimensions=self.dimensions,
                error_code=self.failure,
                error_message=self.error_message,
                reason=reason,
                capture=self.capture,
            )
        )

    def _ended_at_budget(self, usage: Usage) -> bool:
        """Whether the budget ended the choices, not the client's limit or the model. Each choice has an equal part of
        it."""
        reservation = self.admitted.reservation
        limit = reservation.token_limit
        num_choices = self.received.envelope.summary.num_choices
        if limit is None or usage.prompt_tokens + usage.completion_tokens + num_choices <= limit:
            return False
        return reservation.may_end_response and self.route.generates

    def _reason(self, lease: Lease | None) -> str:
        """Why the request went to its last node."""
        if lease is None:
            return "sent to no node" if not self.num_attempts else f"failed on {', '.join(self.failed_nodes)}"
        return f"{lease.reason}, after {', '.join(self.failed_nodes)} failed" if self.failed_nodes else lease.reason

    def running(self, lease: Lease | None) -> RunningRequest:
        """The request at this moment."""
        return RunningRequest(
            id=self.received.id,
            key_id=self.admitted.key.id if self.admitted.key is not None else None,
            key_name=self.admitted.reservation.principal,
            model=self.admitted.model,
            node=lease.node if lease is not None else "",
            dialect=self.route.dialect,
            path=self.route.path,
            stream=self.stream,
            phase=self._phase(),
            duration_s=self.services.clock() - self.started_at,
            num_attempts=self.num_attempts,
            request_class=self.admitted.request_class,
        )

    def _phase(self) -> Phase:
        if self.first_data_at is not None:
            return "decode"
        return "prefill" if self.num_attempts else "wait"

    def _result(self, outcome: Outcome) -> str:
        """The outcome for operators. A stream that ended with an error event counts as complete only for the relay."""
        return "failed" if self.error_code is not None and outcome is _COMPLETE else outcome

    def _failure(self) -> str | None:
        code = self.error_code or self.relayed_code
        return code or (f"status_{self.status}" if self.status >= 400 else None)

    def _count(self, node: str, usage: Usage | None) -> None:
        metrics = self.services.metrics
        traffic = metrics.traffic(self.admitted.model, node)
        traffic.num_requests += 1
        duration_s = self.ended_at - self.started_at
        traffic.duration.observe(duration_s)
        if self.overhead_s is not None:
            metrics.overhead.observe(self.overhead_s)
        if self.admitted.is_idle:
            return  # nobody waits for it: its times are not those of the model
        first_token_s = self.first_token_s
        if first_token_s is not None:
            traffic.first_token.observe(first_token_s)
        if usage is not None and first_token_s is not None:
            later_tokens, later_s = usage.completion_tokens - 1, duration_s - first_token_s
            has_pace = later_s > 0 and later_tokens > 0
            if has_pace:
                traffic.speed.observe(later_tokens / later_s)
            self.services.idle_caps.served(
                node,
                self.admitted.model,
                self.ended_at,
                ttft_s=first_token_s - self.held_s,
                num_tokens=usage.prompt_tokens - usage.cached_tokens,
                gap_s=later_s / later_tokens if has_pace else None,
            )

    def _end_span(self, node: str, outcome: Outcome, usage: Usage | None) -> None:
        attributes: dict[str, str | int | float] = {
            "cortex.request_id": self.received.id.decode(),
            "cortex.principal": self.admitted.reservation.principal,
            "cortex.node": node,
            "cortex.outcome": self._result(outcome),
            "cortex.attempts": self.num_attempts,
            PROVIDER: PROVIDER_NAME,
            MODEL: self.admitted.model,
            OPERATION: self.route.codec.operation if self.route.generates else operation_name(self.route.need),
            STATUS_CODE: self.status,
        }
        if usage is not None:
            attributes[INPUT_TOKENS] = usage.prompt_tokens
            attributes[OUTPUT_TOKENS] = usage.completion_tokens
            attributes[CACHED_TOKENS] = usage.cached_tokens
        self.received.span.end(attributes, error=self.failure)

    def _log(self, node: str, outcome: Outcome, usage: Usage | None) -> None:
        fields = {
            "request_id": self.received.id.decode(),
            "principal": self.admitted.reservation.principal,
            "model": self.admitted.model,
            "node": node,
            "route": self.route.path.decode(),
            "status": self.status,
            "outcome": self._result(outcome),
            "duration_ms": round(1000 * (self.ended_at - self.started_at), 1),
        }
        if usage is not None:
            fields |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        log.info("request", extra=fields)
