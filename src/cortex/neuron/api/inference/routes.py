"""The inference routes: a request in any dialect, and a response in the same dialect, streamed or whole."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

from cortex.foreign.body import Access
from cortex.http.request import Request
from cortex.http.server.server import Response
from cortex.http.ticker import Ticker
from cortex.neuron.api import bodies, responses
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.calls import ApiCall, Handler
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.keep_alive import KeepAliveUnloads
from cortex.neuron.api.inference.opaque_relay import OpaqueRelay
from cortex.neuron.api.inference.relayed import RelayedSession, operator_fields
from cortex.neuron.api.inference.session import Session
from cortex.neuron.api.inference.tasks import check_pictures, check_task
from cortex.neuron.api.inference.tracing import traced
from cortex.neuron.api.inference.usage import MeteredEncoder, UsageRecords
from cortex.neuron.api.log_context import stream_failure
from cortex.neuron.api.metrics import Metrics, RequestWatch
from cortex.neuron.api.stream import EventStream
from cortex.parsing.parser import BodyParser
from cortex.telemetry.spans import Tracer
from cortex.wire import sse
from cortex.wire.dialects import openai_responses
from cortex.wire.dialects.dialect import EventEncoder
from cortex.wire.dialects.openai_responses import kept
from cortex.wire.dialects.registry import DIALECTS, client_field
from cortex.wire.error_encoding import public
from cortex.wire.errors import CortexError
from cortex.wire.events import AnyEvent, Failure, Usage
from cortex.wire.fields.body import check_content_type
from cortex.wire.node import headers as our_headers
from cortex.wire.node import usage_report
from cortex.wire.packed_request import PackedRequest

_ATTEMPT_ID = our_headers.ATTEMPT_ID.encode()
_ERROR_DETAILS = our_headers.ERROR_DETAILS.encode()
_KEPT = kept.HEADER.encode()
_USAGE = usage_report.HEADER.encode()


@dataclass(frozen=True, slots=True)
class Inference:
    """Shared by the inference routes."""

    backend: Backend
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
        client = bodies.client_of(http)
        read = await self.parser.server_body(http.path.decode(), http.body, client, without=without, access=access)
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
            path = http.path.decode()
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
