"""Hostile and invalid bodies: every response is JSON, and none is a 5xx."""

import asyncio
import base64
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cortex.wire.dialects.registry import ROUTES
from cortex.wire.error_encoding import BY_CODE

from ..waiting import WAIT_S

PATHS = [*ROUTES, "/v1/messages/count_tokens", "/tokenize", "/models/load", "/models/unload"]


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def hostile() -> Iterator[bytes]:
    yield b""
    yield b"null"
    yield b"\x00" * 100
    yield b"[" * 300_000
    yield b'{"model": ' * 300_000
    yield b'{"model": "org/tiny", "model_id": "org/tiny", "messages": 1e999}'
    fields = '"messages": [{"role": "user", "content": "hi"}], "input": "hi", "prompt": "hi", "max_tokens": 3'
    for depth in (50, 200, 500, 900, 990, 2000):
        deep = nested(depth)
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
        yield f'{{"model": "org/tiny", {fields}, "tools": [{tool}]}}'.encode()
        yield f'{{"model": "org/tiny", {fields}, "tools": [{{"name": "f", "input_schema": {deep}}}]}}'.encode()
        yield f'{{"model": "org/tiny", {fields}, "chat_template_kwargs": {deep}}}'.encode()
        yield f'{{"model": "org/tiny", {fields}, "metadata": {deep}}}'.encode()
        yield f'{{"model": "org/tiny", {fields}, "guided_json": {deep}}}'.encode()
        call = f'{{"id": "c", "function": {{"name": "f", "arguments": {json.dumps(deep)}}}}}'
        turns = f'[{{"role": "user", "content": "x"}}, {{"role": "assistant", "tool_calls": [{call}]}}]'
        yield f'{{"model": "org/tiny", "messages": {turns}, "input": {turns}}}'.encode()


def hostile_pictures() -> Iterator[bytes]:
    """Files that are none, in every place for pictures."""
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\xff" * 17).decode()
    bad = ["", "%", "A" * 5, "iVBORw0KGgo=", png, "/9j/" + "/" * 100_000, "UklGR" + "A" * 999, "R0lGODlh" + "f" * 200]
    for text in (
        *bad,
        "data:",
        "data:;base64,",
        f"data:image/png;base64,{png}",
        "file:///etc/passwd",
        "https://[::1]/",
    ):
        parts = [
            {"type": "image_url", "image_url": text},
            {"type": "image_url", "image_url": {"url": text, "detail": 1}},
            {"type": "input_image", "image_url": text},
            {"type": "input_image", "image_url": [text]},
            {"type": "image", "source": {"type": "base64", "media_type": 1, "data": text}},
            {"type": "image", "source": {"type": "base64", "data": text}},
            {"type": "image", "source": {"type": "url", "url": text}},
        ]
        for part in parts:
            said = [{"role": "user", "content": [part], "images": [text]}]
            result = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [part]}]}]
            for messages in (said, result):
                body = {"model": "org/tiny", "messages": messages, "input": messages, "prompt": "x", "images": [text]}
                yield json.dumps(body | {"max_tokens": 3, "stream": False}).encode()


def error_in(received: bytes) -> dict[str, Any]:
    """The error of a response in any dialect."""
    body = json.loads(received)
    return {**body, "message": body["error"]} if isinstance(body["error"], str) else body["error"]


@pytest.mark.parametrize("path", PATHS)
async def test_rejects_hostile_bodies_with_json_errors(api: Any, path: str) -> None:
    for data in (*hostile(), *hostile_pictures()):
        async with api.client.post(api.url + path, data=data) as response:
            received = await response.read()
        context = (response.status, data[:80], received if response.status != 200 else None)
        assert response.status < 500, context
        if response.status >= 400:
            assert error_in(received)["message"], context


@pytest.mark.parametrize("path", [*PATHS, "/v1/" + "z" * 5000, "/requests/" + "z" * 5000 + "/usage"])
async def test_errors_repeat_little_of_the_request(api: Any, path: str) -> None:
    turn = [{"role": "user", "content": "hi"}]
    long = "z" * 100_000
    body = {"model": long, "model_id": long, "messages": turn, "input": "hi", "prompt": "hi", "max_tokens": 3}
    method = api.client.get if path.startswith("/requests/") else api.client.post
    async with method(api.url + path, data=json.dumps(body)) as response:
        reply = json.loads(await response.read())
    assert 400 <= response.status < 500
    assert json.dumps(reply).count("z") < 300


NOT_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"hello\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
    b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 70_000 + b"\r\n\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
]


@pytest.mark.parametrize("sent", NOT_HTTP, ids=range(len(NOT_HTTP)))
async def test_rejects_invalid_http_with_json(api: Any, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    writer.write(sent)
    async with asyncio.timeout(WAIT_S):
        reply = await reader.read()
    writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.split(b" ")[1].startswith(b"4"), reply
    assert b"content-type: application/json" in head.lower()
    assert json.loads(body)["error"]["message"]


VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1e308,
    2**70,
    "",
    "x" * 10_000,
    "\ud800",
    [],
    [[]],
    {},
    {"type": "?"},
    [None] * 50,
]


def mutations(seed: int, count: int) -> Iterator[bytes]:
    """Valid bodies in which one value was replaced."""
    chooser = random.Random(seed)
    content = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    tool = {"type": "function", "name": "f", "function": {"name": "f", "parameters": parameters}, "input_schema": {}}
    for _ in range(count):
        body: dict[str, Any] = {
            "model": "org/tiny",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}],
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "prompt": "hi",
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "tools": [tool],
            "tool_choice": {"type": "auto"},
            "stop": ["a"],
            "temperature": 0.5,
            "max_tokens": 3,
            "n": 1,
            "logit_bias": {"5": 1.0},
            "stream_options": {"include_usage": True},
            "response_format": {"type": "json_object"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "stream": chooser.random() < 0.3,
        }
        body = json.loads(json.dumps(body))
        parent: Any = body
        key: str | int = chooser.choice(list(body))
        while isinstance(parent[key], dict | list) and parent[key] and chooser.random() < 0.7:
            parent = parent[key]
            key = chooser.choice(list(parent)) if isinstance(parent, dict) else chooser.randrange(len(parent))
        parent[key] = chooser.choice(VALUES)
        yield json.dumps(body).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("path", PATHS)
async def test_nearly_valid_body_gets_a_response_or_a_known_error(
    api: Any, scaled: Callable[[int, int], int], path: str
) -> None:
    for data in mutations(7, scaled(30, 80)):
        async with api.client.post(api.url + path, data=data) as response:
            reply = await response.read()
        if response.status >= 400:
            error = error_in(reply)
            assert response.status < 500, (data, error)
            assert error["message"], data
            assert error.get("code", "malformed_json") in BY_CODE, (data, error)


@pytest.mark.parametrize("path", ROUTES)
async def test_rejects_a_number_out_of_range_by_name_without_ending_other_streams(
    api: Any, chat_body: Any, path: str
) -> None:
    api.node.script.pause_s = 0.02
    fields = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "input": "hi"}
    if path == "/v1/completions":
        fields["prompt"] = "hi"
    async with api.client.post(api.url + "/v1/chat/completions", json=chat_body(stream=True)) as live:
        for field in ("top_k", "temperature", "top_p"):
            for value in (2**63, 2**70, -(2**70), 1e300):
                prefix = "options." if path.startswith("/api/") else ""
                given = {"options": {field: value}} if prefix else {field: value}
                async with api.client.post(api.url + path, json={**fields, **given}) as response:
                    assert response.status == 400
                    assert f"'{prefix}{field}'" in error_in(await response.read())["message"]
        stream = await live.read()
    assert b"[DONE]" in stream
    assert b"error" not in stream
    assert len(api.node.submitted) == 1
