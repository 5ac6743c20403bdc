"""A request that is relayed as it is, but for a few fields: the model in it, and its body with other values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from cortex.http.composed_body import Body
from cortex.http.request import Headers, Request
from cortex.http.server.parser import Spooled
from cortex.wire.opaque import fields as opaque_fields
from cortex.wire.opaque.fields import OpaqueFields, form_of
from cortex.wire.opaque.routes import CLIENT_HEADERS

_CLIENT_HEADERS = tuple(name.encode() for name in CLIENT_HEADERS)


def body_limit(request: Request, *, body_bytes: int, upload_bytes: int) -> int | Spooled:
    """How long the body of a head may be: files are spooled, what must be parsed as a whole is not."""
    form = form_of(request.text(b"content-type") or "")
    return Spooled(upload_bytes) if form in ("multipart", "other") else body_bytes


async def read_fields(request: Request) -> OpaqueFields:
    """Raises MissingModel, InvalidValue or MalformedJSON."""
    content_type = request.text(b"content-type") or ""
    if request.upload is None:
        return opaque_fields.read(content_type, request.body, request.query)
    upload = request.upload

    # A gigabyte takes a second.
    return await asyncio.to_thread(opaque_fields.read, content_type, upload, request.query)


def with_fields(
    request: Request, fields: OpaqueFields, values: Mapping[str, Any], without: Iterable[str] = ()
) -> tuple[bytes, Body]:
    """Query and body with other values for some fields."""
    query = opaque_fields.edited_query(request.query, values)
    if request.upload is not None:
        empty = b""  # such a body is only divided
        pieces = opaque_fields.edited(fields, empty, values, without, num_bytes=len(request.upload))
        return query, request.upload.composed(pieces)
    pieces = opaque_fields.edited(fields, request.body, values, without, num_bytes=len(request.body))
    body = request.body
    return query, b"".join(piece if isinstance(piece, bytes) else body[piece[0] : piece[1]] for piece in pieces)


def passed_headers(request: Request) -> Headers:
    """The headers of the client that its server may see."""
    return [pair for pair in request.headers if pair[0] in _CLIENT_HEADERS]


def target_of(path: bytes, query: bytes) -> bytes:
    return b"%b?%b" % (path, query) if query else path
