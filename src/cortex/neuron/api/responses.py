"""HTTP responses besides inference: values as JSON, errors in the dialect of their route."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from cortex.http.request import Headers, Request, loggable
from cortex.http.routing import path_of
from cortex.http.server.server import Response
from cortex.neuron.text.errors import TextModelError
from cortex.wire import error_encoding
from cortex.wire.dialects.registry import family
from cortex.wire.error_encoding import Family
from cortex.wire.errors import CortexError, LoadFailed

log = logging.getLogger(__name__)

INTERNAL_ERROR = "Internal error of the node; its log has the details."
JSON: Headers = ((b"content-type", b"application/json"),)


def json(value: Any, *, status: int = 200) -> Response:
    """`value`, a wire value or plain data, as a JSON response."""
    return Response(status, JSON, msgspec.json.encode(value))


def family_of(request: Request) -> Family:
    """The family of the client of a request."""
    return family(path_of(request), request.header)


def error(problem: CortexError, shape: Family) -> Response:
    """`problem` in the shape of a dialect family."""
    headers = [(name.encode(), value.encode()) for name, value in error_encoding.headers(problem).items()]
    body = msgspec.json.encode(shape.envelope(problem))
    return Response(shape.status(problem), (*JSON, *headers), body)


def rejection(problem: CortexError, path: bytes) -> Response:
    """`problem` for a client whose request was not read to its end."""
    return error(problem, family(path.decode("utf-8", "replace")))


def error_of(problem: Exception, request: Request) -> CortexError:
    """Any exception of a handler as a CortexError. Unexpected exceptions are logged with their traceback."""
    match problem:
        case CortexError():
            return problem
        case TextModelError():
            return LoadFailed(str(problem))
        case _:
            log.exception("%s %s failed", loggable(request.method), loggable(request.path), exc_info=problem)
            return CortexError(INTERNAL_ERROR)
