"""A request that is relayed to a server without being understood: its model, and the request as the server gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cortex.http.composed_body import Body
from cortex.http.limits import ClientLimits
from cortex.http.request import Headers, Request
from cortex.http.routing import routed_path
from cortex.http.server.parser import Spooled
from cortex.wire.opaque import fields as opaque_fields
from cortex.wire.opaque.fields import OpaqueFields, form_of
from cortex.wire.opaque.routes import CLIENT_HEADERS

_CLIENT_HEADERS = tuple(name.encode() for name in CLIENT_HEADERS)
_CONTENT_TYPE = b"content-type"


class WrittenRequest(NamedTuple):
    """What a server gets."""

    target: bytes
    """Path and query."""
    headers: Headers
    body: Body


def spooled_form(request: Request, limits: ClientLimits) -> int | Spooled:
    """The body limit of a head: files are spooled, what must be parsed as a whole is not."""
    kind = form_of(request.text(_CONTENT_TYPE) or "")
    return Spooled(limits.upload_bytes) if kind in ("multipart", "other") else limits.body_bytes


async def read_fields(request: Request) -> OpaqueFields:
    """Raises MissingModel, InvalidValue, UnsupportedMediaType or MalformedJSON."""
    content_type = request.text(_CONTENT_TYPE) or ""
    if request.upload is None:
        return opaque_fields.read(content_type, request.body, request.query)
    upload = request.upload

    # A gigabyte takes a second.
    return await asyncio.to_thread(opaque_fields.read, content_type, upload, request.query)


def written(
    request: Request, fields: OpaqueFields, values: Mapping[str, Any], without: Iterable[str] = ()
) -> WrittenRequest:
    """A request whose body is a form, or that has none, with other values for some fields. Its query, headers and body
    are written here: the server reads what was read here. Raises InvalidValue for another spelling of a field that is
    set or removed."""
    without = tuple(without)
    fields.check_overrides((*values, *without))
    target = target_of(routed_path(request), opaque_fields.written_query(fields, values, without))
    headers = [pair for pair in passed_headers(request) if pair[0] != _CONTENT_TYPE]
    if fields.form == "other":
        return WrittenRequest(target, headers, b"")
    content_type, pieces = opaque_fields.written_form(fields, values, without)
    headers.append((_CONTENT_TYPE, content_type.encode()))
    if request.upload is not None:
        return WrittenRequest(target, headers, request.upload.composed(pieces))
    body = request.body
    joined = b"".join(piece if isinstance(piece, bytes) else body[piece[0] : piece[1]] for piece in pieces)
    return WrittenRequest(target, headers, joined)


def passed_headers(request: Request) -> list[tuple[bytes, bytes]]:
    """The headers of the client that its server may see."""
    return [pair for pair in request.headers if pair[0] in _CLIENT_HEADERS]


def target_of(path: bytes, query: bytes) -> bytes:
    return b"%b?%b" % (path, query) if query else path
