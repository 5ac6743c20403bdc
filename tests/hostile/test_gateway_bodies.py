"""Every route responds to hostile bodies with a response or a JSON error of ours, and never crashes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.gateway.proxy.routes import ROUTES
from cortex.wire.error_encoding import BY_CODE
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB, Seen, plain_response

if TYPE_CHECKING:
    from ..gateway.fake_neuron import StartNeuron
    from ..gateway.started_gateway import Client, StartGateway


INFERENCE = [path.decode() for path in ROUTES]
CONTROL = [
    "/",
    "/health",
    "/v1/models",
    "/v1/models/a",
    "/v1/models/org/a",
    "/v1/models/org%2Fa/",
    "/v1/models/a/b/c?x=%ff",
    "/v1/models/%00%ff%2e%2e/x",
    "/fleet/status",
    "/fleet/decisions?model=%ff&model",
    "/fleet/explain/a",
    "/fleet/explain/org/a",
    "/fleet/explain/%F0%9F%92%A9",
    "/fleet/events",
    "/fleet/models/org/a/load",
    "/fleet/models/org%2Fa/unload",
    "/fleet/models/a/load",
    "/fleet/models/a/unload",
    "/fleet/models/a/pin",
    "/fleet/models/a/unpin",
    "/fleet/models//load",
    "/fleet/pull",
    "/fleet/jobs",
    "/fleet/jobs/%00%ff",
    "/fleet/nodes/%2e%2e/drain",
    "/fleet/nodes/beast/files/../../etc/passwd",
    "/fleet/activity?limit=%ff&after=1e9&status=%00",
    "/fleet/activity/%2e%2e%2f%00",
    "/fleet/usage?by=%27&since=inf&until=nan",
    "/fleet/usage.csv?since=-1",
    "/keys",
    "/keys/%2e%2e%2fcortex.toml",
    "/fleet/models/" + "a/" * 500 + "load",
    "//",
    "/v1/" + "x" * 5000,
]
VALUES: list[Any] = [None, True, 0, -1, 1e308, 2**63, "", "x" * 5000, "\x00", [], [[]], {}, {"type": "?"}, [None] * 20]


def garbage() -> Iterator[bytes]:
    yield b""
    yield b"null"
    yield b"\xff\xfe{"
    yield b"\x00" * 1000
    yield b"[" * 200_000
    yield b'{"model":' * 200_000
    yield b'{"model":"a","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield b'{"model":"a","messages":[],"x":' + b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"}"
    yield b'{"model":"a","model":"b","model":7}'
    yield b'{"model":"a","max_tokens":1e400}'
    yield b'{"model":"a","stream":"yes"}'
    yield b'{"model":"' + b"a" * 500_000 + b'"}'
    yield b'{"model":"\\ud800"}'
    yield b"x" * (2 << 20)


def almost_right(seed: int, count: int) -> Iterator[bytes]:
    """Valid bodies with one value replaced."""
    dice = random.Random(seed)
    for _ in range(count):
        tool = {"type": "function", "name": "f", "function": {"name": "f", "parameters": {}}, "input_schema": {}}
        body: dict[str, Any] = {
            "model": "a",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "4"},
            ],
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "prompt": "hi",
            "system": [{"type": "text", "text": "x-anthropic-billing-header: 1", "cache_control": {}}],
            "tools": [tool],
            "tool_choice": {"type": "auto"},
            "stop": ["a"],
            "max_tokens": 3,
            "stream_options": {"include_usage": True},
            "response_format": {"type": "json_object"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "stream": dice.random() < 0.3,
        }
        place: Any = body
        key: str | int = dice.choice([name for name in body if name != "model"])
        while isinstance(place[key], dict | list) and place[key] and dice.random() < 0.7:
            place = place[key]
            key = dice.choice(list(place)) if isinstance(place, dict) else dice.randrange(len(place))
        place[key] = dice.choice(VALUES)
        yield msgspec.json.encode(body)


async def tolerant(node: Any, request: web.Request, body: Any) -> web.StreamResponse:
    """A node that accepts everything: only the gateway is tested here."""
    return await plain_response(node, request, {"model": "a", "stream": body.get("stream") is True})


def check(status: int, content_type: str, response: bytes, about: Any) -> None:
    if status < 400:
        return
    assert content_type.startswith("application/json"), (about, response[:200])
    body = msgspec.json.decode(response)
    error = {**body, "message": body["error"]} if isinstance(body["error"], str) else body["error"]  # Ollama's form
    assert error["message"], about
    assert error.get("code", "malformed_json") in BY_CODE, (about, error)
    assert status < 500, (about, error)


@pytest.fixture
async def client(neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(Seen, "body", property(lambda seen: _decoded(seen.raw)))
    ready = {"a": ModelState.READY}
    beast = await neurons("beast", sizes={"a": GB, "org/a": GB}, states=ready, respond=tolerant)
    return await start_gateway(beast, max_body_mb=1)


@pytest.fixture
async def translating(neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A gateway whose only node speaks only chat, so that other dialects are translated."""
    monkeypatch.setattr(Seen, "body", property(lambda seen: _decoded(seen.raw)))
    other = await neurons("other", sizes={"a": GB}, respond=tolerant)
    return await start_gateway(foreign=(other,), max_body_mb=1)


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


async def ask(client: Client, method: str, path: str, data: bytes) -> None:
    async with client.session.request(method, client.url + path, data=data) as response:
        if response.headers.get("content-type", "").startswith("text/event-stream") and path == "/fleet/events":
            return
        content = await response.read()
    check(response.status, response.headers.get("content-type", ""), content, (method, path, data[:120]))


@pytest.mark.parametrize("path", INFERENCE)
async def test_inference_routes_survive_garbage(client: Client, path: str) -> None:
    for data in garbage():
        await ask(client, "POST", path, data)
    assert (await client.chat("a"))[0] == 200
    assert client.gateway.dispatcher.in_flight == {}


@pytest.mark.parametrize("path", INFERENCE)
async def test_inference_routes_survive_almost_valid_bodies(
    client: Client, translating: Client, scaled: Callable[[int, int], int], path: str
) -> None:
    for number, data in enumerate(almost_right(11, scaled(30, 60))):
        await ask((client, translating)[number % 2], "POST", path, data)
    assert translating.gateway.dispatcher.in_flight == client.gateway.dispatcher.in_flight == {}


@pytest.mark.parametrize("path", CONTROL)
async def test_control_routes_survive_garbage_and_any_method(client: Client, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        for data in (b"", b"nonsense", b'{"node": 7}', b'{"node": "nowhere"}', b"[" * 100_000, b"\xff"):
            await ask(client, method, path, data)
    assert (await client.get("/health"))[0] == 200
