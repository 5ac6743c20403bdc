"""Bodies that nobody sends by accident: every one gets an answer of ours, none a 5xx, none plain text."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cortex.wire.dialects import ROUTES

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
    said = '"messages": [{"role": "user", "content": "hi"}], "input": "hi", "prompt": "hi", "max_tokens": 3'
    for depth in (50, 200, 500, 900, 990, 2000):
        deep = nested(depth)
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
        yield f'{{"model": "org/tiny", {said}, "tools": [{tool}]}}'.encode()
        yield f'{{"model": "org/tiny", {said}, "tools": [{{"name": "f", "input_schema": {deep}}}]}}'.encode()
        yield f'{{"model": "org/tiny", {said}, "chat_template_kwargs": {deep}}}'.encode()
        yield f'{{"model": "org/tiny", {said}, "metadata": {deep}}}'.encode()
        yield f'{{"model": "org/tiny", {said}, "guided_json": {deep}}}'.encode()
        call = f'{{"id": "c", "function": {{"name": "f", "arguments": {json.dumps(deep)}}}}}'
        asked = f'[{{"role": "user", "content": "x"}}, {{"role": "assistant", "tool_calls": [{call}]}}]'
        yield f'{{"model": "org/tiny", "messages": {asked}, "input": {asked}}}'.encode()


@pytest.mark.parametrize("path", PATHS)
async def test_a_hostile_body_gets_a_proper_answer(api: Any, path: str) -> None:
    for data in hostile():
        async with api.client.post(api.url + path, data=data) as response:
            answer = json.loads(await response.read())
        told = (response.status, data[:80], answer if response.status != 200 else None)
        assert response.status < 500, told
        if response.status >= 400:
            assert answer["error"]["message"], told
