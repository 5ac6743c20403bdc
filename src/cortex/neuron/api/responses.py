"""HTTP responses besides inference: values as JSON, errors in the dialect of their route."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web

from cortex.neuron.text.errors import TextModelError
from cortex.wire import error_encoding
from cortex.wire.dialects.registry import family
from cortex.wire.errors import (
    CortexError,
    LoadFailed,
    MalformedJSON,
    MethodNotAllowed,
    RouteNotFound,
    shorten,
)

log = logging.getLogger(__name__)

INTERNAL_ERROR = "Internal error of the node; its log has the details."


def json(value: Any, *, status: int = 200) -> web.Response:
    """`value`, a wire value or plain data, as a JSON response."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error(problem: CortexError, request: web.BaseRequest) -> web.Response:
    """`problem` in the dialect of the request's path."""
    shape = family(request.path, is_anthropic="anthropic-version" in request.headers)
    return web.Response(
        body=msgspec.json.encode(error_encoding.envelope(problem, shape)),
        status=error_encoding.status(problem, shape),
        headers=error_encoding.headers(problem),
        content_type="application/json",
    )


def error_of(problem: Exception, request: web.Request) -> CortexError:
    """Any exception of a handler as a CortexError. Unexpected exceptions are logged with their traceback."""
    match problem:
        case CortexError():
            return problem
        case TextModelError():
            return LoadFailed(str(problem))
        case web.HTTPMethodNotAllowed(allowed_methods=allowed):
            return MethodNotAllowed(
                f"{shorten(request.method)} is not allowed on {shorten(request.path)}; "
                f"use {' or '.join(sorted(allowed))}.",
                details={"allowed_methods": sorted(allowed)},
            )
        case web.HTTPNotFound():
            return RouteNotFound(f"There is no route {shorten(request.path)}; the API begins at /v1 and /discovery.")
        case web.HTTPBadRequest() | web.RequestPayloadError():
            return MalformedJSON(f"The request could not be read: {shorten(str(problem))}. Check its headers and body.")
        case _:
            log.exception("%s %s failed", request.method, request.path, exc_info=problem)
            return CortexError(INTERNAL_ERROR)
