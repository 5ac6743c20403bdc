"""Reads request bodies, and what their headers say about them."""

from __future__ import annotations

from aiohttp import web

from cortex.wire import headers
from cortex.wire.errors import BodyTooLarge


def principal_of(request: web.Request) -> str:
    """The principal that a gateway names, empty for other clients."""
    # Header bytes may be invalid UTF-8.
    return request.headers.get(headers.PRINCIPAL, "").encode("utf-8", "backslashreplace").decode()


async def body_of(request: web.Request) -> bytes:
    """Raises `BodyTooLarge`."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BodyTooLarge(f"The body is larger than {request.client_max_size} bytes; send less.") from None


def strips_billing(request: web.Request, setting: bool) -> bool:
    """Whether this node removes the billing line from a body: a gateway has its own setting for its clients."""
    return setting and headers.PRINCIPAL not in request.headers
