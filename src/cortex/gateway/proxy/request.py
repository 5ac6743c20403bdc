"""One inference request, sent to nodes in turn until one responds.

A `ProxyRequest` is the observer of its relay. It works in callbacks, so it needs no task, and it does nothing per chunk
while the response is relayed. Its `RequestAccounting` records the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from cortex.foreign.embeddings import FloatVectors, OllamaEmbeddings, are_encoded
from cortex.foreign.shown_error import ABOUT_REQUESTS
from cortex.gateway.dispatch.leases import NO_NODES, Lease, PendingRequest
from cortex.gateway.dispatch.nodes.client import NOT_ADMITTED, error_from
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.proxy import outgoing_headers
from cortex.gateway.proxy.accounting.request_accounting import STATUS_CODE, RequestAccounting
from cortex.gateway.proxy.accounting.running import RunningRequest
from cortex.gateway.proxy.admission import AdmittedRequest, ReceivedRequest, ResponseKeeper, narrowed_tenant
from cortex.gateway.proxy.outgoing_body import OpaqueBody, OutgoingBody
from cortex.gateway.proxy.redaction import (
    ErrorRedaction,
    ForeignRedaction,
    StreamRedaction,
    hides_details,
    hides_errors_of,
    is_of_account,
    shown_of_foreign,
    shown_to,
)
from cortex.gateway.proxy.routes import JSON_HEADERS, error_response, loading_note
from cortex.gateway.proxy.routes import keepalive as keepalive_of
from cortex.gateway.proxy.services import Services
from cortex.gateway.proxy.translation import ChatTranslation
from cortex.http.head import ABOUT_CONTENT
from cortex.http.observer import ObservedRelay, Outcome
from cortex.http.relay import Relay
from cortex.http.request import Headers
from cortex.http.upstream.faults import NotAdmitted, ResponseTooLarge, UpstreamFault, UpstreamSilent
from cortex.routing.prefixes import MAX_PREFIX_BYTES
from cortex.system.tasks import run_once
from cortex.telemetry.spans import Span
from cortex.telemetry.tracing import UNTRACED
from cortex.wire import errors, sse
from cortex.wire.dialects.openai_chat.upstream_response import foreign_error
from cortex.wire.errors import CortexError, RequestCancelled, UpstreamInterrupted, UpstreamUnavailable
from cortex.wire.events import MAX_TOKENS, Tokens, Usage
from cortex.wire.fields.request_class import level_of
from cortex.wire.node import failure_report, usage_report
from cortex.wire.node.headers import DIMENSIONS, PROMPT_TOKENS, RECOVERS, RELAYED
from cortex.wire.opaque.routes import not_ready

_USAGE_KEY = b'"usage":'


def reported_usage(header: bytes | None, tail: bytes, is_foreign: bool) -> Usage | None:
    """The usage that a response reports; None if it reports none, or an impossible one.

    `header` is the response's `usage_report.HEADER`, `tail` the end of its body.
    """
    if header is not None:
        return usage_report.from_header(header)
    usage = usage_report.from_stream(tail)
    return usage_in_dialect(tail) if usage is None and is_foreign else usage


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: Tokens | None = None
    reasoning_tokens: Tokens | None = None


class _Fields(msgspec.Struct, frozen=True):
    """A usage object of OpenAI or Anthropic."""

    prompt_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


_decoder = msgspec.json.Decoder(_Fields)
_NO_DETAILS = _Details()


def usage_in_dialect(tail: bytes) -> Usage | None:
    """The last usage object in `tail`, with the fields of OpenAI or Anthropic; None if there is none or it is
    impossible.

    Generated text cannot pass for one, because quotes in it are escaped.
    """
    end = len(tail)
    while (at := tail.rfind(_USAGE_KEY, 0, end)) >= 0:
        brace = tail.find(b"{", at, at + 16)
        if brace >= 0:
            try:
                return _usage(_decoder.decode(_object_at(tail, brace)))
            except msgspec.DecodeError:
                return None
        end = at
    return None


def _object_at(text: bytes, start: int) -> bytes:
    """The JSON object that begins at `start`, whose strings contain no braces; the rest of `text` if it is cut off."""
    end = start
    while (end := text.find(b"}", end) + 1) > 0:
        if text.count(b"{", start, end) == text.count(b"}", start, end):
            return text[start:end]
    return text[start:]


def _usage(fields: _Fields) -> Usage | None:
    """`fields` as `Usage`; None if impossible: no tokens, or more than `MAX_TOKENS`.

    OpenAI counts cached tokens as part of the prompt, Anthropic counts them separately.
    """
    prompt_details = fields.prompt_tokens_details or fields.input_tokens_details or _NO_DETAILS
    completion_details = fields.completion_tokens_details or fields.output_tokens_details or _NO_DETAILS
    separate = (fields.cache_read_input_tokens or 0) + (fields.cache_creation_input_tokens or 0)
    prompt_tokens = (fields.prompt_tokens or fields.input_tokens or 0) + separate
    if prompt_tokens > MAX_TOKENS or not (prompt_tokens or fields.completion_tokens or fields.output_tokens):
        return None
    return Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=prompt_details.cached_tokens or fields.cache_read_input_tokens or 0,
        completion_tokens=fields.completion_tokens or fields.output_tokens or 0,
        reasoning_tokens=completion_details.reasoning_tokens or 0,
    )


_USAGE_HEADER = usage_report.HEADER.encode()
_DIMENSIONS_HEADER = DIMENSIONS.encode()
_PROMPT_TOKENS_HEADER = PROMPT_TOKENS.encode()
_RECOVERS_HEADER = RECOVERS.encode()
_RELAYED_HEADER = RELAYED.encode()
_REPORTS = frozenset((_USAGE_HEADER, _DIMENSIONS_HEADER, _RELAYED_HEADER, _PROMPT_TOKENS_HEADER))
"""Headers in which nodes report about a response."""
_OVERLOADED = (503, 529)

MAX_ATTEMPTS = 3
"""Attempts before a request is rejected."""


class ProxyRequest:
    """One admitted request. Ends exactly once, in `on_done`."""

    __slots__ = (
        "_accounting",
        "_attempt",
        "_body",
        "_excluded",
        "_is_unread",
        "_lease",
        "_pending",
        "_prompt_tokens",
        "_relay",
        "_rewriting",
        "_translation",
        "_usage_header",
        "admitted",
        "keeper",
        "received",
        "route",
        "services",
    )

    def __init__(
        self,
        services: Services,
        received: ReceivedRequest,
        admitted: AdmittedRequest,
        keeper: ResponseKeeper | None = None,
        body: OpaqueBody | None = None,
    ) -> None:
        """`body`: sent to nodes instead of the received body."""
        route, summary = received.route, received.envelope.summary
        self.services = services
        self.route = route
        self.received = received
        self.admitted = admitted
        self.keeper = keeper
        self._attempt: Span | None = None
        self._body = body or OutgoingBody(received, admitted, keeper)
        self._lease: Lease | None = None
        self._pending: PendingRequest | None = None
        self._excluded = NO_NODES if received.idle is None else received.idle.avoided
        self._translation: ChatTranslation | OllamaEmbeddings | None = None
        self._rewriting: asyncio.Task[None] | None = None
        """Work on a large body in another process, before it is sent."""
        self._usage_header: bytes | None = None
        self._prompt_tokens = 0
        """The length of a prompt that the node rejected, over the context or the token limit."""
        self._is_unread = False
        """Whether the node has not parsed the response either."""
        is_stream = route.generates and summary.stream
        self._accounting = RequestAccounting(services, route, received, admitted, is_stream, received.received_at)
        keepalive = keepalive_of(route.dialect, services.config.keepalive_s) if is_stream else None
        headers, capture = route.id_headers(received.id), None
        if keeper is not None:
            headers, capture = (*headers, *keeper.headers), keeper.capture
        relay = Relay(received.exchange, self, services.ticker, keepalive, headers, capture)
        self._relay: Relay | None = None if relay.closed else relay
        """Cleared in `on_done`: request and relay refer to each other, and the cycle would outlive them."""
        if self._relay is not None:
            services.running.add(self)

    def go(self) -> None:
        """Get a lease for a node, or wait for one."""
        if self._relay is None:
            return
        try:
            if self.route.runs_model:
                lease = self.services.dispatcher.lease_now(
                    self.admitted.model,
                    self._prompt_bytes,
                    self._excluded,
                    self.route.need,
                    self.received.envelope.summary.has_pictures,
                    self.received.client,
                )
                if lease is not None:
                    self._deliver(lease)
                    return
            if self.admitted.is_check:
                raise not_ready(self.admitted.model)
            pending = self._pending = PendingRequest(
                self.admitted.model,
                self._prompt_bytes,
                self._deliver,
                self.services.clock(),
                origin=self.admitted.origin,
                need=self.route.need,
                excluded=self._excluded,
                has_pictures=self.received.envelope.summary.has_pictures,
                client=self.received.client,
                level=level_of(self.admitted.request_class),
                tell=self._tell,
            )
            self._relay.waiting_note = self._loading_note
            self.services.dispatcher.request_lease(pending)
        except CortexError as error:
            self._deliver(error)

    def _tell(self, wait_s: float) -> None:
        """A node wakes for the request: inform a streaming client how long that takes."""
        if self._relay is not None and self._accounting.stream and self.route.codec.content_type == sse.CONTENT_TYPE:
            self._relay.comment(b": a node is waking up, which takes about %d s\n\n" % round(wait_s))

    def _loading_note(self) -> bytes:
        """What the client receives while it waits for its model."""
        model, dispatcher = self.admitted.model, self.services.dispatcher
        shown = dispatcher.catalogue.spec(model).loading_state or self.services.config.loading_state
        name = self.received.envelope.summary.model
        return loading_note(self.route, name, dispatcher.loading_state(model), as_reasoning=shown == "reasoning")

    def _deliver(self, result: Lease | CortexError) -> None:
        """A lease is available, or none will be."""
        self._pending = None
        if isinstance(result, CortexError):
            self._reject(result)
            return
        try:
            self._send(result)
        except CortexError as error:
            self._reject(error)

    def _send(self, lease: Lease) -> None:
        assert self._relay is not None  # nothing is sent after the end
        self._lease = lease
        services = self.services
        node = services.nodes[lease.node]
        if not self._body.choose(lease):
            self._rewriting = run_once(self._prepare_elsewhere(lease), "edit or translate a large request")
            return
        route, received, admitted, accounting = self.route, self.received, self.admitted, self._accounting
        if received.envelope.summary.loads_only and not lease.abilities.takes_orders:
            self._reply_loaded()
            return
        target, body, translation = self._body.made()
        self._translation = translation
        accounting.sent(lease)
        if received.idle is not None:
            received.idle.sent_to(lease.node)
        if translation is not None:
            translation.gateway_s = accounting.held_s
        self._attempt = received.span.call(lease.node)
        ours = outgoing_headers.for_node(lease, route, admitted, accounting, self.keeper, self._attempt.traceparent)
        headers: Headers = (*node.headers, *self._body.headers, *ours)
        if lease.kv_source:
            headers = (*headers, *outgoing_headers.kv_source(lease, services.nodes))
        config = services.config
        for_client = outgoing_headers.for_client(lease, route, admitted, names_node=config.node_header)
        whole_silence_s = services.limits.whole_silence_s
        silence_s = route.silence_s(config.idle_timeout_s, whole_silence_s, is_stream=accounting.stream)
        when_down_s = silence_s if route.outlasts_polls(lease.abilities) else None
        passed = None if lease.abilities.reads_headers or route.is_upstream else ABOUT_CONTENT
        request = self._body.method, target, headers, body
        self._relay.send(node.pool, *request, translation, for_client, silence_s, when_down_s, passed)

    def _reply_loaded(self) -> None:
        """Respond to a request that only loads a model which a foreign server has: there is nothing to send."""
        self._accounting.status = 200
        body = self.route.state_reply(self.received.envelope.summary.model, unloads=False)
        if self._relay is not None:
            self._relay.reject(200, JSON_HEADERS, body, body + b"\n")

    def _prompt_bytes(self) -> bytes:
        """The bytes by which routing compares prompts; those of different tenants never match."""
        return narrowed_tenant(self.received, self.admitted) + self.received.envelope.prompt_bytes(MAX_PREFIX_BYTES)

    async def _prepare_elsewhere(self, lease: Lease) -> None:
        """Make a body that would block the loop in another process, and send it."""
        try:
            await self._body.prepare(self.services.parser)
            self._rewriting = None
            self._send(lease)
        except CortexError as error:
            self._reject(error)

    def _release(self, fault: str | None = None) -> None:
        """Release the lease; `fault` is why the node did not complete the request."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None and attempt is not UNTRACED:
            attempt.end({STATUS_CODE: self._accounting.status} if self._accounting.status else {}, error=fault)
        lease, self._lease = self._lease, None
        if lease is not None:
            self.services.dispatcher.release(lease)

    def _reject(self, error: CortexError) -> None:
        self._accounting.failed_with(error)
        error = shown_to(self.admitted.key, error)
        response = error_response(error, self.route.family)
        self._accounting.status = response.status
        if self._relay is not None:
            self._relay.reject(*response, self.route.codec.stream_error(error))

    def running(self) -> RunningRequest:
        return self._accounting.running(self._lease)

    def cancel(self, by: str) -> None:
        """End the request, at its node too; the client gets an error."""
        if (relay := self._relay) is None:
            return
        error = RequestCancelled(f"The request was cancelled by {by}.")
        self._accounting.failed_with(error)
        response = error_response(error, self.route.family)
        if not relay.exchange.started:
            self._accounting.status = response.status
        relay.cancel(*response, self.route.codec.stream_error(error))

    # --- the relay's callbacks

    def on_head(self, relay: ObservedRelay, status: int, headers: Headers) -> bool:
        """Try another node if this one cannot serve the request now and another might."""
        self._accounting.status = status
        self._usage_header = None
        self._prompt_tokens = 0
        self._is_unread = False
        for name, value in headers:
            if name in _REPORTS:
                self._take_report(name, value)
        lease = self._lease
        if status < 400 and lease is not None and not lease.abilities.reads_headers:
            self.services.nodes[lease.node].served_needs.add((lease.model, self.route.need))
        key = self.admitted.key
        if status >= 300 and (shown := self._shown_of_foreign(status)) is not None:
            relay.translate(ForeignRedaction(key, self.route.family, shown))
            return True
        if status < 400 or lease is None:
            if self._translation is None and self.route.need == "embeddings" and are_encoded(headers):
                relay.translate(FloatVectors(self.route.path.decode()))
            if key is not None and self._hides_errors_of_stream(key, lease):
                relay.translate(StreamRedaction(key, self.route.codec.stream_error))
            return True
        if status in NOT_ADMITTED and lease.abilities.reads_headers:
            # The client's key was checked here. This is about the gateway's own key for the node.
            self.on_fault(relay, NotAdmitted(f"status {status}: the node does not admit this gateway, check key_env"))
            return False
        if status == errors.InvalidAPIKey.status or hides_errors_of(key, status):
            relay.translate(ErrorRedaction(key, self.route.family, self._error_of_node))
        if not self.route.runs_model or self._accounting.num_attempts >= MAX_ATTEMPTS:
            return True
        is_ours = lease.abilities.reads_headers
        if status == 404 and lease.abilities.takes_orders:
            # The model was there at the last poll and has been unloaded since. Its node will load it again.
            self.services.dispatcher.model_not_found(lease)
            self._excluded = NO_NODES
        elif status in _OVERLOADED and is_ours and any(name == _RECOVERS_HEADER for name, _ in headers):
            self.services.dispatcher.model_recovers(lease)
            self._excluded = NO_NODES
        elif status in _OVERLOADED and lease.has_alternatives:
            self._excluded |= {lease.node}
        elif (
            status == errors.ContextLengthExceeded.status
            and self._prompt_tokens
            and lease.node
            in (small := self.services.dispatcher.too_small(lease.model, self._prompt_tokens) - self._excluded)
        ):
            self._excluded |= small
            self._release(f"status {status}")
            self.go()
            return False
        elif status == errors.InsufficientQuota.status and is_ours and self._has_more_tokens():
            self._release(f"status {status}")
            self.go()
            return False
        else:
            return True
        self._accounting.failed_at(lease)
        self._release(f"status {status}")
        self.go()
        return False

    def _shown_of_foreign(self, status: int) -> Callable[[int, bytes], CortexError] | None:
        """What the client sees of an error of a foreign server; None where it sees what others do."""
        key, lease = self.admitted.key, self._lease
        if key is None or key.operator or lease is None or lease.abilities.reads_headers or self.route.is_upstream:
            return None
        if status not in ABOUT_REQUESTS and not is_of_account(status):
            return None
        node = self.services.dispatcher.fleet.node(lease.node)
        others = () if node is None else node.residencies.keys()
        name = self.received.envelope.summary.model
        dialect = self.route.dialect if isinstance(self._translation, ChatTranslation) else None
        return partial(shown_of_foreign, key, self.admitted.model, name, others, dialect)

    def _hides_errors_of_stream(self, key: KeySection, lease: Lease | None) -> bool:
        """Whether a foreign server's stream may contain errors that the owner of `key` must not see."""
        is_foreign = lease is not None and not lease.abilities.reads_headers and self._translation is None
        return is_foreign and self._accounting.stream and not key.operator

    def _take_report(self, name: bytes, value: bytes) -> None:
        """Record what the node's headers report about the response."""
        if name == _USAGE_HEADER:
            self._usage_header = value
            self._accounting.reported_first_token_s = usage_report.first_token_s(value)
        elif name == _RELAYED_HEADER:
            self._is_unread = True
        elif name == _PROMPT_TOKENS_HEADER:
            self._prompt_tokens = int(value[:9]) if value.isdigit() else 0
        elif value.isdigit():
            self._accounting.dimensions = int(value[:9])

    def _has_more_tokens(self) -> bool:
        """Whether the budget has enough for the prompt, which has more tokens than the node's limit."""
        counted, before = self._prompt_tokens, self.admitted.reservation.token_limit
        if before is None or not counted:
            return False
        try:
            return self.admitted.reservation.extend(counted) != before
        except CortexError:
            return False

    def on_first_data(self, relay: ObservedRelay) -> None:  # noqa: ARG002
        self._accounting.first_data_at = self.services.clock()

    def on_fault(self, relay: ObservedRelay, fault: UpstreamFault) -> None:  # noqa: ARG002
        """Nothing was sent to the client yet: try another node, or this one once it is back."""
        assert self._lease is not None
        node = self._lease.node
        is_final = isinstance(fault, ResponseTooLarge) or self._is_slow(self._lease, fault)
        if not is_final:
            self.services.dispatcher.request_failed(node, str(fault))
        self._accounting.failed_at(self._lease)
        self._release(str(fault))
        if is_final:
            self._reject(UpstreamUnavailable(f"Node {node}: {fault}. Check the server, or request less."))
            return
        if self._accounting.num_attempts >= MAX_ATTEMPTS or not self.route.runs_model:
            self._reject(UpstreamUnavailable(f"Node {node} failed before it responded: {fault}"))
            return
        self._excluded |= {node}
        self.go()

    def _is_slow(self, lease: Lease, fault: UpstreamFault) -> bool:
        """Whether a whole response took too long at a node that still responds to polls or may be too busy for them.
        The request may be the cause, so the node is not blamed, and no other node repeats the work."""
        if self._accounting.stream or not self.route.runs_model or not isinstance(fault, UpstreamSilent):
            return False
        client = self.services.nodes.get(lease.node)
        outlasts_polls = self.route.outlasts_polls(lease.abilities)
        return client is not None and (outlasts_polls or not client.pool.is_down)

    def late_response(self, relay: ObservedRelay, status: int, body: bytes) -> bytes:  # noqa: ARG002
        """Report an error after the first keepalive, inside the stream."""
        error, key = self._error_of_node(status, body), self.admitted.key
        self._accounting.failed_with(error)
        if (shown := self._shown_of_foreign(status)) is not None:
            return self.route.codec.stream_error(shown(status, body))
        return self.route.codec.stream_error(shown_to(key, error))

    def _error_of_node(self, status: int, body: bytes) -> CortexError:
        node = self._lease.node if self._lease else ""
        return foreign_error(status, body) if self._translation else error_from(node, status, body)

    def interruption(self, relay: ObservedRelay, fault: UpstreamFault) -> bytes:  # noqa: ARG002
        """The node failed after its first byte."""
        node = self._lease.node if self._lease else ""
        if self._lease is not None and not self._is_slow(self._lease, fault):
            self.services.dispatcher.request_failed(node, str(fault))
        error = UpstreamInterrupted(
            f"Node {node} failed in the middle of its response: {fault}. Send the request again."
        )
        self._accounting.failed_with(error)
        return self.route.codec.stream_error(shown_to(self.admitted.key, error))

    def on_done(self, relay: ObservedRelay, outcome: Outcome) -> None:
        """Release the lease and account for the request."""
        self._relay = None
        self.services.running.discard(self)
        if self._pending is not None:
            self.services.dispatcher.cancel(self._pending)
            self._pending = None
        if self._rewriting is not None:
            self._rewriting.cancel()
        lease, accounting = self._lease, self._accounting
        tail = relay.tail
        end_of_body = bytes(tail)
        if accounting.stream and accounting.error_code is None and accounting.status < 400:
            accounting.error_code = failure_report.from_stream(end_of_body)
        self._release(accounting.error_code)
        if accounting.status >= 400:
            accounting.relayed_code = failure_report.from_body(end_of_body)
        if accounting.status == errors.ContextLengthExceeded.status and self._prompt_tokens and lease is not None:
            exceeded, is_operator = self.services.dispatcher.prompt_exceeded, not hides_details(self.admitted.key)
            exceeded(lease.model, self._prompt_tokens, self.admitted.origin, is_operator=is_operator)
        if self._translation is not None:
            usage = self._translation.usage
        else:
            is_foreign = self._is_unread or (lease is not None and not lease.abilities.reads_headers)
            usage = reported_usage(self._usage_header, end_of_body, is_foreign)
        if self.services.activity.captures:
            is_stream = accounting.stream
            is_text = self.route.need not in ("embeddings", "relay")  # vectors and sounds are useless in a log
            shown = end_of_body if is_text else b""
            accounting.capture = self.services.activity.capture(self.received.body, shown, is_stream=is_stream)
        accounting.close(lease, outcome, usage, tail.num_bytes)
        if self.keeper is not None:
            self.keeper.ended(accounting.status, outcome)
