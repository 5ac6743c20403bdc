"""The inference routes: a request in any dialect, and a response in the same dialect, streamed or whole."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web

from cortex.neuron.api import bodies, responses
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.session import Session
from cortex.neuron.api.inference.tracing import traced
from cortex.neuron.api.inference.usage import MeteredEncoder, UsageRecords
from cortex.neuron.api.log_context import stream_failure
from cortex.neuron.api.routes.metrics import Metrics, RequestWatch
from cortex.neuron.api.stream import EventStream
from cortex.parsing.parser import BodyParser
from cortex.telemetry.spans import Tracer
from cortex.wire.dialects import openai_responses
from cortex.wire.dialects.openai_responses import kept
from cortex.wire.dialects.registry import DIALECTS, Dialect, EventEncoder
from cortex.wire.events import AnyEvent, Failure
from cortex.wire.fields.body import check_content_type
from cortex.wire.node import headers as our_headers
from cortex.wire.node import usage_report
from cortex.wire.node.protocol import Dialect as DialectName
from cortex.wire.packed_request import PackedRequest
from cortex.wire.public_errors import public


@dataclass(frozen=True, slots=True)
class Inference:
    """What the inference routes share."""

    backend: Backend
    drain_gate: DrainGate
    metrics: Metrics
    usage_records: UsageRecords
    keepalive_s: float
    strip_billing_header: bool
    tracer: Tracer
    parser: BodyParser

    def handler(self, name: DialectName) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler of one dialect's route."""

        async def handle(http: web.Request) -> web.StreamResponse:
            with self.drain_gate.enter(), self.metrics.watch(name) as watch, traced(self.tracer, http, watch):
                check_content_type(http.headers.get("content-type"))
                body = await bodies.body_of(http)
                strip_billing = bodies.strips_billing(http, self.strip_billing_header)
                packed = await self.parser.parse(name, body, bodies.client_of(http), strip_billing=strip_billing)
                self.backend.model(packed.head.model)
                watch.model = packed.head.model
                try:
                    return await self._respond(http, DIALECTS[name], packed, watch)
                except (asyncio.CancelledError, ConnectionError):
                    if attempt_id := http.headers.get(our_headers.ATTEMPT_ID, ""):
                        self.usage_records.add(attempt_id, watch.usage())
                    raise

        return handle

    async def _respond(
        self, http: web.Request, dialect: Dialect, packed: PackedRequest, watch: RequestWatch
    ) -> web.StreamResponse:
        request = packed.head
        id = dialect.ID_PREFIX + uuid.uuid4().hex
        if dialect is openai_responses and (stored := kept.from_header(http.headers.get(kept.HEADER, ""))):
            id, request = stored.id, stored.described(request)
        created = int(time.time())
        principal = bodies.principal_of(http)
        session = Session(
            self.backend,
            self.drain_gate,
            packed,
            id=id,
            created=created,
            principal=principal,
            token_limit=bodies.token_limit_of(http),
        )
        watch.phase = lambda: session.phase
        watch.usage = lambda: session.usage
        headers = our_headers.notes(request)
        if not request.stream:
            events: list[AnyEvent] = []
            async with aclosing(session.events()) as batches:
                async for batch in batches:
                    watch.observe(batch)
                    events += batch
            body = dialect.fold(events, request, id=id, created=created, model=request.model)
            if principal:
                headers[usage_report.HEADER] = usage_report.header_value(session.usage)
            return web.Response(body=body, content_type="application/json", headers=headers)

        encoder: EventEncoder = dialect.Encoder(request, id=id, created=created, model=request.model)
        if principal:
            encoder = MeteredEncoder(encoder, watch.usage, num_choices=request.num_choices)
        async with EventStream(
            http, keepalive=dialect.KEEPALIVE, keepalive_s=self.keepalive_s, headers=headers
        ) as stream:
            try:
                async with aclosing(session.events()) as batches:
                    async for batch in batches:
                        watch.observe(batch)
                        if data := b"".join(map(encoder.encode, batch)):
                            await stream.write(data)
            except ConnectionError:
                raise  # the client has disconnected
            except Exception as problem:
                if not stream.opened:
                    raise
                error = responses.error_of(problem, http)
                watch.failed(error)
                stream_failure.set(f" failed {error.code}: {error.message}")
                hides_details = http.headers.get(our_headers.ERROR_DETAILS) == our_headers.NO_DETAILS
                shown = public(error) if hides_details else error
                await stream.write(encoder.encode(Failure(code=shown.code, message=shown.message)))
        await stream.response.write_eof()
        return stream.response
