"""What a fake node responds to chat requests, whole or in pieces, and how it fails to."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from cortex.wire.events import Usage
from cortex.wire.node import usage_report
from cortex.wire.node.headers import PRINCIPAL

from ..waiting import NEVER_S

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}
"""As the dialect has it."""
REPORTED = Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=3)
"""The same, as a node reports it to a gateway."""


async def hang() -> NoReturn:
    """A node that no longer responds. A disconnected client cancels it."""
    await asyncio.sleep(NEVER_S)
    raise AssertionError("nobody disconnected")


async def reset_connection(request: web.Request) -> NoReturn:
    """What a client sees of a node that dies."""
    assert request.transport is not None
    request.transport.abort()
    await hang()


def chunk(model: str, delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage_chunk(model: str) -> bytes:
    value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": []}
    return b"data: " + msgspec.json.encode(value | {"usage": USAGE}) + b"\n\n"


async def begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


async def stream_chat(
    request: web.Request, body: dict[str, Any], deltas: list[dict[str, Any]], finish: str = "stop"
) -> web.StreamResponse:
    response = await begin_stream(request)
    for delta in deltas:
        await response.write(chunk(body["model"], delta))
    wants_usage = (body.get("stream_options") or {}).get("include_usage")
    await response.write(chunk(body["model"], {}, finish))
    if wants_usage:
        await response.write(usage_chunk(body["model"]))
    report = usage_report.comment(REPORTED) if PRINCIPAL in request.headers else b""
    await response.write(b"data: [DONE]\n\n" + report)
    await response.write_eof()
    return response
