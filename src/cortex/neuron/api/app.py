"""The HTTP application: its routes, and for every request an id, errors in its dialect and a log line."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST

from cortex.neuron.api import responses
from cortex.neuron.api.access import NodeAccess, NodeKeys
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.connections.client import end_of_head
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.routes import Inference
from cortex.neuron.api.inference.usage import UsageRecords
from cortex.neuron.api.log_context import request_id, stream_failure
from cortex.neuron.api.routes.control import Control
from cortex.neuron.api.routes.metrics import Metrics
from cortex.neuron.api.routes.models import ModelRoutes
from cortex.neuron.api.routes.tokens import Tokens
from cortex.parsing.parser import BodyParser
from cortex.telemetry.spans import Tracer
from cortex.telemetry.tracing import NoTracer
from cortex.wire.dialects.registry import ROUTES, family
from cortex.wire.errors import Family, MalformedHTTP
from cortex.wire.node import headers as our_headers

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_VERSIONS = (HttpVersion10, HttpVersion11)
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


def build(
    backend: Backend,
    drain_gate: DrainGate,
    *,
    keepalive_s: float = 2.0,
    max_body_bytes: int = 64 * 1024 * 1024,
    strip_billing_header: bool = True,
    tracer: Tracer | None = None,
    access: NodeAccess | None = None,
) -> web.Application:
    """The HTTP API of `backend`. The server must cancel the handlers of disconnected clients. Without `access`, every
    local program may use it."""
    access = access or NodeAccess(NodeKeys())
    metrics = Metrics(backend)
    usage_records = UsageRecords()
    parser = BodyParser()
    inference = Inference(
        backend, drain_gate, metrics, usage_records, keepalive_s, strip_billing_header, tracer or NoTracer(), parser
    )

    async def close(_: web.Application) -> None:
        await parser.close()

    async def expose(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[end_of_head, _handle, _checked(access)], client_max_size=max_body_bytes)
    app.on_response_prepare.append(_stamp)
    app.on_cleanup.append(close)
    app.add_routes([web.post(path, inference.handler(name)) for path, name in ROUTES.items()])
    app.add_routes(Tokens(backend, strip_billing_header, parser).routes())
    app.add_routes(ModelRoutes(backend).routes())
    app.add_routes([web.get("/metrics", expose)])
    app.add_routes(usage_records.routes())
    app.add_routes(Control(backend, drain_gate, access, keepalive_s).routes())
    return app


@web.middleware
async def _handle(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Sets the request's id, turns exceptions of the handler into error responses, and logs the outcome."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request_id.set(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
    stream_failure.set("")
    began_s = time.monotonic()
    try:
        if request.version not in _VERSIONS:
            raise MalformedHTTP("This program speaks HTTP/1.1; send that version in the request line.")
        response = await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        _log(request, "client disconnected", began_s)
        raise
    except Exception as problem:  # noqa: BLE001 - the boundary: every exception becomes a response
        error = responses.error_of(problem, request)
        response = responses.error(error, request)
        _log(request, f"{response.status} {error.code}: {error.message}", began_s)
        return response
    _log(request, f"{response.status}{stream_failure.get()}", began_s)
    return response


def _checked(access: NodeAccess) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        access.check(request)
        return await handler(request)

    return check


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[REQUEST_ID_HEADER] = request_id.get()
    if family(request.path) is Family.ANTHROPIC:
        response.headers[our_headers.ANTHROPIC_REQUEST_ID] = request_id.get()


def _log(request: web.Request, outcome: str, began_s: float) -> None:
    level = logging.DEBUG if request.method == "GET" else logging.INFO
    elapsed_ms = (time.monotonic() - began_s) * 1000
    log.log(level, "%s %s %s in %.0f ms", request.method, request.path, outcome, elapsed_ms)
