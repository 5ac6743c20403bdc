"""Reads request bodies, and what their headers say about them."""

from __future__ import annotations

from io import BytesIO

from aiohttp import web

from cortex.wire.errors import BodyTooLarge, InvalidValue, shorten
from cortex.wire.node import headers

_MAX_LIMIT_DIGITS = 18


def principal_of(request: web.Request) -> str:
    """The principal that a gateway names, empty for other clients."""
    # Header bytes may be invalid UTF-8.
    return request.headers.get(headers.PRINCIPAL, "").encode("utf-8", "backslashreplace").decode()


def token_limit_of(request: web.Request) -> int | None:
    """The most tokens that a gateway allows a request to use; None without a limit. Raises InvalidValue."""
    value = request.headers.get(headers.TOKEN_LIMIT)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= _MAX_LIMIT_DIGITS):
        raise InvalidValue(f"{headers.TOKEN_LIMIT} must be a number of tokens, got `{shorten(value)}`.")
    return int(value)


def client_of(request: web.Request) -> str:
    """Who shares what all clients share: the principal, or the address of a client without one."""
    return principal_of(request) or request.remote or ""


async def body_of(request: web.Request) -> bytes:
    """Raises `BodyTooLarge`."""
    body = BytesIO()  # grows as the body arrives; copying tens of megabytes at the end would delay the loop
    async for data in request.content.iter_any():
        body.write(data)
        if body.tell() > request.client_max_size:
            raise BodyTooLarge(f"The body is larger than {request.client_max_size} bytes; send less.")
    return body.getvalue()


def strips_billing(request: web.Request, setting: bool) -> bool:
    """Whether this node removes the billing line from a body: a gateway has its own setting for its clients."""
    return setting and headers.PRINCIPAL not in request.headers
