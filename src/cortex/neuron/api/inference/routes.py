"""The inference routes: a request in any dialect, and a response in the same dialect, streamed or whole."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from cortex.neuron.api import bodies, responses
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.session import Session
from cortex.neuron.api.inference.tracing import traced
from cortex.neuron.api.inference.usage import MeteredEncoder, UsageRecords
from cortex.neuron.api.log_context import request_id
from cortex.neuron.api.metrics import Metrics, RequestWatch
from cortex.neuron.api.stream import EventStream
from cortex.telemetry import Tracer
from cortex.wire import headers as our_headers
from cortex.wire import usage_report
from cortex.wire.body import check_content_type
from cortex.wire.dialects import DIALECTS, Dialect, EventEncoder
from cortex.wire.events import AnyEvent, Failure
from cortex.wire.node import Dialect as DialectName
from cortex.wire.requests import GenerateRequest


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

    def handler(self, name: DialectName) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler of one dialect's route."""
        body_of = bodies.body_of
        if name == "anthropic_messages":
            body_of = partial(bodies.messages_body_of, strip_billing=self.strip_billing_header)

        async def handle(http: web.Request) -> web.StreamResponse:
            with self.drain_gate.enter(), self.metrics.watch(name) as watch, traced(self.tracer, http, watch):
                check_content_type(http.headers.get("content-type"))
                request = await bodies.parsed(DIALECTS[name].parse, await body_of(http))
                self.backend.model(request.model)
                watch.model = request.model
                try:
                    return await self._respond(http, DIALECTS[name], request, watch)
                except (asyncio.CancelledError, ConnectionError):
                    self.usage_records.add(request_id.get(), watch.usage())
                    raise

        return handle

    async def _respond(
        self, http: web.Request, dialect: Dialect, request: GenerateRequest, watch: RequestWatch
    ) -> web.StreamResponse:
        id = dialect.ID_PREFIX + uuid.uuid4().hex
        created = int(time.time())
        # Header bytes may be invalid UTF-8.
        principal = http.headers.get(our_headers.PRINCIPAL, "").encode("utf-8", "backslashreplace").decode()
        session = Session(self.backend, self.drain_gate, request, id=id, created=created, principal=principal)
        watch.phase = lambda: session.phase
        watch.usage = lambda: session.usage
        headers = (
            {our_headers.DROPPED_TOOLS: our_headers.listed(request.dropped_tools)} if request.dropped_tools else {}
        )
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
                await stream.write(encoder.encode(Failure(code=error.code, message=error.message)))
        await stream.response.write_eof()
        return stream.response
