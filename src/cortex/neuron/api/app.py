"""The HTTP API of a node: its routes, and for every request an id, errors in its dialect and a log line."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from prometheus_client import CONTENT_TYPE_LATEST

from cortex.http.limits import ClientLimits
from cortex.http.opaque_request import body_limit
from cortex.http.request import Request, loggable
from cortex.http.routing import Router
from cortex.http.server.exchange import Exchange
from cortex.http.server.parser import Spooled
from cortex.http.server.server import Response, Server
from cortex.http.ticker import Ticker
from cortex.neuron.api import responses
from cortex.neuron.api.access import NodeAccess, NodeKeys
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.calls import ApiCall, Route
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.keep_alive import KeepAliveUnloads
from cortex.neuron.api.inference.opaque import OpaqueRoutes
from cortex.neuron.api.inference.pooling import PoolingRoutes
from cortex.neuron.api.inference.routes import Inference
from cortex.neuron.api.inference.usage import UsageRecords
from cortex.neuron.api.log_context import request_id, stream_failure
from cortex.neuron.api.metrics import Metrics
from cortex.neuron.api.routes.control import Control
from cortex.neuron.api.routes.models import ModelRoutes
from cortex.neuron.api.routes.ollama import OllamaRoutes
from cortex.neuron.api.routes.tokens import Tokens
from cortex.neuron.api.routes.transfers import KvBlocks, SharedFiles
from cortex.parsing.parser import BodyParser
from cortex.telemetry.spans import Tracer
from cortex.telemetry.tracing import NoTracer
from cortex.wire.dialects.ollama.models import BLOBS_PREFIX
from cortex.wire.dialects.registry import ROUTES
from cortex.wire.opaque.routes import is_opaque

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
_REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)


class NodeApi:
    """The server of a node's API: one task for each request, cancelled when its client disconnects."""

    def __init__(
        self,
        backend: Backend,
        drain_gate: DrainGate,
        *,
        keepalive_s: float = 2.0,
        limits: ClientLimits | None = None,
        strip_billing_header: bool = True,
        tracer: Tracer | None = None,
        access: NodeAccess | None = None,
        scheme: str = "http",
        share_mb_per_s: int | None = None,
    ) -> None:
        """Without `access`, every local program may use it. `scheme`: of the URLs that clients use."""
        self._access = access or NodeAccess(NodeKeys())
        self._metrics = Metrics(backend)
        self._parser = BodyParser()
        self._departures = KeepAliveUnloads(backend)
        self._tasks: set[asyncio.Task[None]] = set()
        ticker = Ticker(asyncio.get_running_loop())
        usage_records = UsageRecords()
        inference = Inference(
            backend,
            drain_gate,
            self._metrics,
            usage_records,
            ticker,
            keepalive_s,
            strip_billing_header,
            tracer or NoTracer(),
            self._parser,
            self._departures,
        )
        self._router = Router(
            [
                *(Route("POST", path, inference.handler(name)) for path, name in ROUTES.items()),
                *PoolingRoutes(inference).routes(),
                *OpaqueRoutes(inference).routes(),
                *Tokens(backend, strip_billing_header, self._parser).routes(),
                *ModelRoutes(backend).routes(),
                *OllamaRoutes(backend, drain_gate, ticker, keepalive_s, self._parser, self._by_path).routes(),
                Route("GET", "/metrics", self._expose),
                *usage_records.routes(),
                *SharedFiles(backend, share_mb_per_s).routes(),
                *KvBlocks(backend).routes(),
                *Control(backend, drain_gate, self._access, ticker, keepalive_s, scheme).routes(),
            ],
            "the API begins at /v1 and /discovery",
        )
        self.server = Server(self._handle, responses.rejection, ticker, limits, self._admit_head)

    async def close(self, grace_s: float = 0.0) -> None:
        """Accept nothing more, give running responses `grace_s` to reach their clients, then cancel them. Clients that
        have just connected get a moment for their first request, and a response to it."""
        await self.server.stop_accepting(grace_s)
        await self.server.close(grace_s)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._departures.close()
        await self._parser.close()

    def _admit_head(self, request: Request) -> int | Spooled:
        """Reject a request before its body is read."""
        self._access.check(request)
        self._router.find(request)
        self._access.check_form(request)
        limits = self.server.limits
        if request.path.startswith(BLOBS_PREFIX.encode()):
            return Spooled(limits.upload_bytes)
        if not is_opaque(request.path.decode("latin-1")):
            return limits.body_bytes
        return body_limit(request, body_bytes=limits.body_bytes, upload_bytes=limits.upload_bytes)

    def _handle(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def cancel() -> None:
            task.cancel()

        exchange.on_disconnect(cancel)

    async def _serve(self, exchange: Exchange) -> None:
        """Sets the request's id, turns exceptions of the handler into error responses, and logs the outcome."""
        request = exchange.request
        family = responses.family_of(request)
        given = request.header(REQUEST_ID_HEADER) or b""
        id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        exchange.added_headers = ((REQUEST_ID_HEADER, id),)
        if family.id_header is not None:
            exchange.added_headers = (*exchange.added_headers, (family.id_header, id))
        request_id.set(id.decode())
        stream_failure.set("")
        began_s = time.monotonic()
        try:
            self._access.check(request)
            handler, values = self._router.find(request)
            self._access.check_form(request)
            response = await handler(ApiCall(exchange, values))
        except asyncio.CancelledError:
            _log(request, "client disconnected", began_s)
            raise
        except Exception as problem:  # noqa: BLE001 - the boundary: every exception becomes a response
            error = responses.error_of(problem, request)
            response = responses.error(error, family)
            _log(request, f"{response.status} {error.code}: {error.message}", began_s)
        else:
            _log(request, f"{200 if response is None else response.status}{stream_failure.get()}", began_s)
        if response is None:
            return
        if exchange.started:
            exchange.abort()
        else:
            exchange.respond(*response)

    async def _by_path(self, call: ApiCall) -> Response | None:
        handler, call.values = self._router.find(call.request)
        return await handler(call)

    async def _expose(self, _: ApiCall) -> Response:
        return Response(200, ((b"content-type", CONTENT_TYPE_LATEST.encode()),), self._metrics.exposition())


def _log(request: Request, outcome: str, began_s: float) -> None:
    level = logging.DEBUG if request.method == b"GET" else logging.INFO
    elapsed_ms = (time.monotonic() - began_s) * 1000
    log.log(level, "%s %s %s in %.0f ms", loggable(request.method), loggable(request.path), outcome, elapsed_ms)
