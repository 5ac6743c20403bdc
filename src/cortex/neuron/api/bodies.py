"""Reads and parses request bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from cortex.wire import headers
from cortex.wire.anthropic_messages import strip_billing_header
from cortex.wire.errors import BodyTooLarge

T = TypeVar("T")
_LARGE_BYTES = 1 << 18


async def body_of(request: web.Request) -> bytes:
    """Raises `BodyTooLarge`."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BodyTooLarge(f"The body is larger than {request.client_max_size} bytes; send less.") from None


async def messages_body_of(request: web.Request, *, strip_billing: bool) -> bytes:
    """A body of the messages dialect, without the billing line where this node strips it. A request from a gateway is
    left as is: the gateway has its own setting. Raises `BodyTooLarge`."""
    body = await body_of(request)
    return strip_billing_header(body) if strip_billing and headers.PRINCIPAL not in request.headers else body


async def parsed(parse: Callable[[bytes], T], body: bytes) -> T:
    """The parsed body. Large bodies are parsed on a thread, so that they do not delay streams on the loop."""
    return parse(body) if len(body) < _LARGE_BYTES else await asyncio.to_thread(parse, body)
