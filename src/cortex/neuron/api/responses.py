"""HTTP answers that are not inference: typed values as JSON, errors in the dialect of their route."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web

from cortex.neuron.text.errors import TextModelError
from cortex.wire import errors
from cortex.wire.dialects import family
from cortex.wire.errors import (
    CortexError,
    LoadFailed,
    MalformedJSON,
    MethodNotAllowed,
    RouteNotFound,
    shorten,
)

log = logging.getLogger(__name__)


def json(value: Any, *, status: int = 200) -> web.Response:
    """`value`, a wire value or plain data, as a JSON body."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error(problem: CortexError, path: str) -> web.Response:
    """`problem` as clients of `path` read errors."""
    shape = family(path)
    return web.Response(
        body=msgspec.json.encode(errors.envelope(problem, shape)),
        status=errors.status(problem, shape),
        headers=errors.headers(problem),
        content_type="application/json",
    )


def known(problem: Exception, request: web.Request) -> CortexError:
    """Any exception of a handler as one of our errors. What nobody foresaw is logged with its traceback."""
    match problem:
        case CortexError():
            return problem
        case TextModelError():
            return LoadFailed(str(problem))
        case web.HTTPMethodNotAllowed(allowed_methods=allowed):
            return MethodNotAllowed(
                f"{shorten(request.method)} is not for {shorten(request.path)}; use {' or '.join(sorted(allowed))}."
            )
        case web.HTTPNotFound():
            return RouteNotFound(f"There is nothing at {shorten(request.path)}; the API begins at /v1 and /discovery.")
        case web.HTTPBadRequest() | web.RequestPayloadError():
            return MalformedJSON(f"The request could not be read: {shorten(str(problem))}. Check its headers and body.")
        case _:
            log.exception("%s %s failed", request.method, request.path, exc_info=problem)
            return CortexError("Something went wrong inside the node; its log has the details.")
