"""Requests to the inference routes of a node in every dialect, and how their responses are read."""

from __future__ import annotations

from typing import Any

import aiohttp

from cortex.wire.dialects import registry
from cortex.wire.sse import Frame, Parser

from ..conftest import Api

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/infill": {"input_prefix": "hi", "input_suffix": "ho"},
}
ROUTES = tuple(BODIES)
"""Those that can stream."""
assert {*ROUTES, "/v1/responses/compact"} == registry.ROUTES.keys()


def body(path: str, **fields: Any) -> dict[str, Any]:
    """`fields` of sampling are options in Ollama's dialects."""
    options = {name: fields.pop(name) for name in ("stop", "temperature") if name in fields and is_ollama(path)}
    return {"model": "org/tiny", **BODIES[path], **({"options": options} if options else {}), **fields}


def is_ollama(path: str) -> bool:
    return path.startswith("/api/")


def message_of(reply: dict[str, Any]) -> str:
    """The message of an error in any dialect."""
    error = reply["error"]
    return str(error if isinstance(error, str) else error["message"])


def text_of(reply: dict[str, Any]) -> str:
    """The text of a whole response in any dialect."""
    if "created_at" in reply and "done" in reply:
        return str(reply["message"]["content"] if "message" in reply else reply["response"])
    if "stop_type" in reply:
        return str(reply["content"])
    if "choices" in reply:
        choice = reply["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    parts = reply["content"] if "content" in reply else reply["output"][0]["content"]
    return str(parts[0]["text"])


async def frames(api: Api, path: str, request: dict[str, Any]) -> list[Frame]:
    async with api.client.post(api.url + path, json={**request, "stream": True}) as response:
        assert response.status == 200
        content_type = "application/x-ndjson" if is_ollama(path) else "text/event-stream"
        assert response.headers["content-type"].startswith(content_type)
        assert response.headers["x-accel-buffering"] == "no"
        if is_ollama(path):
            return [Frame("message", line.decode()) for line in (await response.read()).splitlines()]
        return Parser().feed(await response.read())


async def received_until(response: aiohttp.ClientResponse, mark: bytes, count: int) -> bytes:
    """What the node sends until it has sent `mark` that often."""
    data = b""
    while data.count(mark) < count:
        piece = await response.content.readany()
        assert piece, data
        data += piece
    return data


async def ask(api: Api, path: str, request: dict[str, Any]) -> None:
    async with api.client.post(api.url + path, json=request) as response:
        await response.read()
