"""The inference routes: a request in any dialect, and a response in the same dialect, streamed or whole. A model that a
server of its own runs gets the request relayed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cortex.foreign.body import Access, ServerFields, server_body
from cortex.foreign.chat_response import ForeignResponse
from cortex.http.request import Headers, Request
from cortex.http.routing import routed_path
from cortex.http.server.server import Response
from cortex.http.ticker import Ticker
from cortex.http.upstream.call import UpstreamCall
from cortex.http.upstream.faults import UpstreamFault, UpstreamSilent
from cortex.neuron.api import bodies, responses
from cortex.neuron.api.calls import ApiCall, Handler
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.choice import Stopwatch
from cortex.neuron.api.inference.engine_requests import within_limit
from cortex.neuron.api.inference.keep_alive import KeepAliveUnloads
from cortex.neuron.api.inference.opaque_relay import OpaqueRelay
from cortex.neuron.api.inference.server_slot import ServerSlot
from cortex.neuron.api.inference.session import Deliver, Phase, Session, ready
from cortex.neuron.api.inference.tasks import check_pictures, check_task
from cortex.neuron.api.inference.tracing import traced
from cortex.neuron.api.inference.usage import MeteredEncoder, UsageRecords
from cortex.neuron.api.log_context import stream_failure
from cortex.neuron.api.metrics import Metrics, RequestWatch
from cortex.neuron.api.stream import EventStream
from cortex.neuron.node.harness.harness import Upstream
from cortex.neuron.node.node import Node
from cortex.parsing.parser import BodyParser
from cortex.parsing.pictures import find_pictures
from cortex.telemetry.spans import Tracer
from cortex.wire import sse
from cortex.wire.dialects import openai_chat, openai_responses
from cortex.wire.dialects.dialect import EventEncoder
from cortex.wire.dialects.openai_responses import kept
from cortex.wire.dialects.registry import DIALECTS, client_field
from cortex.wire.error_encoding import public
from cortex.wire.errors import (
    ContextLengthExceeded,
    CortexError,
    InvalidValue,
    ModelNotFound,
    UpstreamInterrupted,
    UpstreamUnavailable,
)
from cortex.wire.events import AnyEvent, Failure, Finish, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from cortex.wire.fields.body import check_content_type
from cortex.wire.node import headers as our_headers
from cortex.wire.node import usage_report
from cortex.wire.packed_request import PackedRequest, unpack
from cortex.wire.pictures.files import with_files
from cortex.wire.requests import GenerateRequest
from cortex.wire.response import total_usage
from cortex.wire.tenant import EVERYBODY, SALT

_ATTEMPT_ID = our_headers.ATTEMPT_ID.encode()
_ERROR_DETAILS = our_headers.ERROR_DETAILS.encode()
_KEPT = kept.HEADER.encode()
_USAGE = usage_report.HEADER.encode()

_PATH = b"/v1/chat/completions"
_JSON: Headers = ((b"content-type", b"application/json"),)
_STREAMS_WITH_OPTIONS = ("/v1/chat/completions", "/v1/completions")
"""Paths whose streams report usage only if the request has `stream_options`."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Shared by the inference routes."""

    backend: Node
    drain_gate: DrainGate
    metrics: Metrics
    usage_records: UsageRecords
    ticker: Ticker
    keepalive_s: float
    strip_billing_header: bool
    tracer: Tracer
    parser: BodyParser
    keep_alive_unloads: KeepAliveUnloads

    @property
    def opaque(self) -> OpaqueRelay:
        return OpaqueRelay(self.backend, self.drain_gate, self.ticker)

    async def server_body(
        self, http: Request, fields: dict[str, Any], without: tuple[str, ...], access: Access
    ) -> bytes:
        """A JSON body for the server of a model, with some fields set and others removed. Raises CortexError."""
        arguments, client = (routed_path(http).decode(), without, access), bodies.client_of(http)
        read = await self.parser.run(server_body, *arguments, body=http.body, client=client)
        return read.with_fields(fields)

    def handler(self, name: str) -> Handler:
        """The handler of one dialect's route."""

        async def handle(call: ApiCall) -> Response | None:
            http, dialect = call.request, DIALECTS[name]
            with self.drain_gate.enter(), self.metrics.watch(name) as watch, traced(self.tracer, http, watch):
                if dialect.family.declares_bodies:
                    check_content_type(http.text(b"content-type"))
                strip_billing = bodies.strips_billing(http, self.strip_billing_header)
                packed = await self.parser.parse(
                    name, http.body, bodies.client_of(http), tenant=bodies.tenant_of(http), strip_billing=strip_billing
                )
                packed = packed.served_in(bodies.class_of(http, packed.head.request_class))
                served = self.backend.served(packed.head.model)  # raises ModelNotFound
                watch.model = packed.head.model
                is_of_gateway = bool(bodies.principal_of(http))
                check_task(self.backend, packed.head.model, served, "chat", is_of_gateway=is_of_gateway)
                check_pictures(self.backend, packed.head, is_of_gateway=is_of_gateway)
                try:
                    with self.keep_alive_unloads.request(packed.head, is_of_gateway=is_of_gateway):
                        return await self._respond(call, name, packed, watch)
                except CortexError as error:
                    if isinstance(error, ContextLengthExceeded):
                        error.param = "messages" if DIALECTS[name].is_chat else "prompt"
                    elif isinstance(error, InvalidValue) and error.param is None:
                        error.param = _rejected_by_engine(packed.head) or (None if dialect.is_chat else "prompt")
                    error.param = client_field(name, error.param, as_functions=packed.head.as_functions)
                    if is_of_gateway and error.status < 500 and (usage := watch.usage()) != Usage():
                        # What a request took before it was rejected is charged, too.
                        report = (_USAGE, usage_report.header_value(usage).encode())
                        call.exchange.added_headers = (*call.exchange.added_headers, report)
                    raise
                except asyncio.CancelledError:
                    if attempt_id := http.text(_ATTEMPT_ID):
                        self.usage_records.add(attempt_id, watch.usage())
                    raise

        return handle

    def _session(
        self, http: Request, packed: PackedRequest, name: str, *, id: str, created: int, principal: str
    ) -> Session | RelayedSession:
        request, token_limit, gateway_s = packed.head, bodies.token_limit_of(http), bodies.gateway_s_of(http)
        upstream = None if request.loads_only else self.backend.upstream(request.model)
        if upstream is not None:
            return RelayedSession(
                self.backend,
                self.drain_gate,
                packed,
                upstream,
                http.body if name == "openai_chat" else None,
                bodies.access_of(http),
                id=id,
                principal=principal,
                token_limit=token_limit,
                gateway_s=gateway_s,
            )
        return Session(
            self.backend,
            self.drain_gate,
            packed,
            id=id,
            created=created,
            principal=principal,
            client=bodies.client_of(http),
            token_limit=token_limit,
            gateway_s=gateway_s,
            kv_source=bodies.kv_source_of(http),
        )

    async def _respond(self, call: ApiCall, name: str, packed: PackedRequest, watch: RequestWatch) -> Response | None:
        http, request, dialect = call.request, packed.head, DIALECTS[name]
        if dialect.is_passed_on and (upstream := self.backend.upstream(request.model)) is not None:
            path = routed_path(http).decode()
            upstream.check_route(path)
            limit = bodies.token_limit_of(http)
            fields, without = operator_fields(upstream, path, request, len(http.body), limit)
            body = await self.server_body(http, fields, without, bodies.access_of(http))
            await self.opaque.pass_on_json(call, request.model, body, upstream, watch)
            return None
        id = dialect.id_prefix + uuid.uuid4().hex
        if dialect is openai_responses.DIALECT and (stored := kept.from_header(http.text(_KEPT) or "")):
            id, request = stored.id, stored.described(request)
        created = int(time.time())
        principal = bodies.principal_of(http)
        session = self._session(http, packed, name, id=id, created=created, principal=principal)
        watch.phase = lambda: session.phase
        watch.usage = lambda: session.usage
        headers = [(name.encode(), value.encode()) for name, value in our_headers.notes(request).items()]
        if not request.stream:
            events: list[AnyEvent] = []

            def keep(batch: list[AnyEvent]) -> None:
                watch.observe(batch)
                events.extend(batch)

            await session.run(keep)
            body = dialect.fold(events, request, id=id, created=created, model=request.model)
            if principal:
                report = usage_report.header_value(session.usage, session.first_token_s)
                headers.append((_USAGE, report.encode()))
            return Response(200, (*responses.JSON, *headers), body)

        encoder: EventEncoder = dialect.new_encoder(request, id=id, created=created, model=request.model)
        if principal:
            has_lines = dialect.content_type != sse.CONTENT_TYPE
            encoder = MeteredEncoder(encoder, watch.usage, num_choices=request.num_choices, has_lines=has_lines)
        keepalive, keepalive_s = dialect.keepalive, self.keepalive_s
        stream = EventStream(
            call.exchange,
            self.ticker,
            keepalive=keepalive,
            keepalive_s=keepalive_s,
            headers=headers,
            content_type=dialect.content_type,
            source=session,
        )

        def send(batch: list[AnyEvent]) -> None:
            watch.observe(batch)
            if data := encoder.encode(batch[0]) if len(batch) == 1 else b"".join(map(encoder.encode, batch)):
                stream.send(data)

        async with stream:
            try:
                await session.run(send)
            except Exception as problem:
                if not stream.opened:
                    raise
                error = responses.error_of(problem, http)
                watch.failed(error)
                stream_failure.set(f" failed {error.code}: {error.message}")
                hides_details = http.text(_ERROR_DETAILS) == our_headers.NO_DETAILS
                shown = public(error) if hides_details else error
                stream.send(encoder.encode(Failure(code=shown.code, message=shown.message)))
        return None


def _rejected_by_engine(request: GenerateRequest) -> str | None:
    """The field of an error that names none, if it is not the prompt. Others were checked before: only with the
    vocabulary, and in the output, it shows that the allowed tokens, or the format, cannot be used."""
    if request.sampling.allowed_token_ids:
        return "allowed_token_ids"
    return request.output.param if request.output is not None else "tools" if request.tools else None


class RelayedSession:
    """Owned by one request's task. However it ends, the server's response has ended or is aborted."""

    def __init__(
        self,
        backend: Node,
        drain_gate: DrainGate,
        packed: PackedRequest,
        upstream: Upstream,
        chat: bytes | None,
        access: Access,
        *,
        id: str,
        principal: str,
        token_limit: int | None = None,
        gateway_s: float = 0.0,
    ) -> None:
        """`chat`: the body of a chat request as the client sent it, with the fields of `access`; None: the request is
        translated. `token_limit` and
        `gateway_s`: as `Session` has them; the prompt counts as one token per byte, because that is the most that it
        can have, but pictures by their size: their files have far more bytes than tokens."""
        self.phase: Phase = "load"
        """The current phase; after the end, the last one."""
        self.first_token_s: float | None = None
        """Unknown: a server may send its first piece long after its first token."""
        self._backend = backend
        self._drain_gate = drain_gate
        self._packed = packed
        self._upstream = upstream
        self._chat = chat
        self._access: Access = access if chat is not None else "any"
        self._id = id
        self._principal = principal
        self._token_limit = token_limit
        self._call: UpstreamCall | None = None
        self._num_sent_tokens = 0
        """Upper bound on the prompt's tokens, once it was sent."""
        self._num_deltas = 0
        self._gateway_s = gateway_s
        self._stopwatch: Stopwatch
        self._finishes: list[Finish] = []

    @property
    def usage(self) -> Usage:
        """The usage that the server reported; without a report, an estimate from the request and the pieces of the
        response."""
        total = total_usage(self._finishes)
        is_reported = total.prompt_tokens or total.completion_tokens
        return total if is_reported else Usage(prompt_tokens=self._num_sent_tokens, completion_tokens=self._num_deltas)

    async def run(self, deliver: Deliver) -> None:
        """As `Session.run`."""
        arrived_s = time.monotonic()
        self._upstream.check_route(_PATH.decode())
        body, num_prompt_tokens = await asyncio.to_thread(self.make_body)
        model = self._packed.head.model
        await self._drain_gate.wait_for(ready(self._backend, model, is_of_gateway=bool(self._principal)))
        self.phase = "prefill"
        response = _Response(self._packed.head.stream, asyncio.get_running_loop().create_future())

        def receive_events(events: list[AnyEvent]) -> None:
            if self.phase == "prefill":
                self.phase = "decode"
                if response.is_whole:
                    self._stopwatch.note_whole()
                else:
                    self._stopwatch.note_output()
                self._upstream.produced(self._id)
            deliver([self._observed(event) for event in events])

        slot = ServerSlot(self._backend, model, self._id, self._principal, self._packed.head.level)
        try:
            await slot.wait()
            slot.on_lost = response.fail
            self._stopwatch = Stopwatch(arrived_s, time.monotonic(), self._gateway_s)
            response.deliver = receive_events
            self._call = self._upstream.pool().send(b"POST", _PATH, _JSON, body, response)
            self._num_sent_tokens = num_prompt_tokens
            try:
                await response.ended
            except UpstreamFault as fault:
                if isinstance(fault, UpstreamSilent):
                    await self._upstream.end_if_hung(str(fault))
                slot.release()  # the server may live, and others wait for it
                await self._upstream.check_lost()
                raise UpstreamInterrupted(f"The model's server failed: {fault}; try again.") from fault
            except CortexError as error:
                if response.is_rejected:
                    self._num_sent_tokens = 0
                elif isinstance(error, UpstreamInterrupted):  # the connection ended within a stream
                    slot.release()
                    await self._upstream.check_lost()
                raise
            used = self.usage
            self._upstream.finished(self._id, used.prompt_tokens, used.completion_tokens)
        finally:
            if self._call is not None:
                self._call.abort()
            slot.release()

    def pause(self) -> None:
        """Deliver nothing until `resume`, because the client reads too slowly."""
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        if self._call is not None:
            self._call.resume()

    def _observed(self, event: AnyEvent) -> AnyEvent:
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            self._num_deltas += 1
        if isinstance(event, Finish):
            event = msgspec.structs.replace(event, timing=self._stopwatch.timing().with_reported(event.timing))
            self._finishes.append(event)
        return event

    def make_body(self) -> tuple[bytes, int]:
        """The body for the server: a chat request as the client sent it with the operator's fields, or another request
        translated to chat; and an upper bound on its prompt tokens. Raises InvalidValue or InsufficientQuota."""
        head = self._packed.head
        if head.prompt is not None:
            raise InvalidValue(
                f"{head.model} is run by the server of the harness {self._upstream.harness}, which takes a prompt at "
                "/v1/completions only; send conversations to /v1/chat/completions, /v1/responses, /v1/messages or "
                "/api/chat",
                param="prompt",
            )
        if self._chat is None:
            chat = openai_chat.build(with_files(unpack(self._packed.whole()), self._packed.files))
        else:
            chat = self._chat
        pictures = find_pictures(chat, openai_chat.DIALECT.fields.scan(chat), "openai_chat")
        num_bytes = len(chat) - pictures.num_bytes
        path, num_tokens = _PATH.decode(), num_bytes + pictures.num_tokens
        fields, without = operator_fields(self._upstream, path, head, num_tokens, self._token_limit)
        body = server_body(path, without, self._access, chat).with_fields(fields)
        return body, len(body) - pictures.num_bytes + pictures.num_tokens


def operator_fields(
    upstream: Upstream, path: str, head: GenerateRequest, num_prompt_tokens: int, token_limit: int | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields that a request to `path` gets in place of the client's, and those of the client that it loses. Among
    them its tenant, for servers that separate what they cache by a salt, unless the operator has them go without. With
    a budget, also the limit that is left for each choice where the prompt has `num_prompt_tokens`. Raises
    InsufficientQuota or InvalidValue."""
    values = dict(upstream.fields)
    if head.stream and path in _STREAMS_WITH_OPTIONS:
        values = {"stream_options": {"include_usage": True}, **values}
    tenant = EVERYBODY if SALT in upstream.stripped_fields else head.tenant
    fields = ServerFields(path, values, tenant, upstream.stripped_fields, token_limit is not None)
    limit = None
    if token_limit is not None:
        num_choices = values.get("n")  # the operator's, in place of the client's
        if isinstance(num_choices, int) and num_choices > 0:
            head = msgspec.structs.replace(head, sampling=msgspec.structs.replace(head.sampling, n=num_choices))
        limit = within_limit(head, num_prompt_tokens, token_limit).sampling.max_tokens
    return fields.written(limit), fields.without


class _Response:
    """The sink of one response."""

    def __init__(self, is_stream: bool, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self.deliver: Deliver = lambda _: None
        self._read = ForeignResponse(is_stream=is_stream)

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:  # noqa: ARG002 - as Sink
        self._read.head(status, headers)

    @property
    def is_whole(self) -> bool:
        """Whether the response is not a stream."""
        return self._read.is_whole

    @property
    def is_rejected(self) -> bool:
        """Whether the server rejected it without work."""
        return 400 <= self._read.status < 500

    def chunk_receiver(self) -> None:
        """Every read is parsed."""

    def on_data(self, data: bytes) -> None:
        self._guarded(partial(self._read.feed, data))

    def on_end(self) -> None:
        error = self._read.error
        if isinstance(error, ModelNotFound):
            # The model exists; the path does not, or the name that the server knows it by is another one.
            self.fail(UpstreamUnavailable(error.message))
        self._guarded(self._read.finish)
        if not self.ended.done():
            self.ended.set_result(None)

    def on_fault(self, fault: UpstreamFault) -> None:
        self.fail(fault)

    def _guarded(self, decode: Callable[[], list[AnyEvent]]) -> None:
        """Never raises, because an exception would be blamed on the connection."""
        if self.ended.done():
            return
        try:
            if events := decode():
                self.deliver(events)
        except Exception as problem:  # noqa: BLE001 - `run` raises it
            self.fail(problem)

    def fail(self, problem: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(problem.with_traceback(None))
