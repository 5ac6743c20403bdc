"""The requests that known clients of Ollama's API send, in their order and with their fields, as their sources have
them: Copilot Chat of VS Code, Zed, and Home Assistant."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.ledger.keys import generate
from cortex.wire.node.protocol import ModelState, PullStatus
from cortex.wire.sse import Parser

from ....waiting import until
from ...fake_neuron import GB

if TYPE_CHECKING:
    from ...fake_neuron import FakeNeuron, StartNeuron
    from ...started_gateway import Client, StartGateway

Exchange = tuple[str, str, dict[str, Any] | None]
KEY = generate("editor")
DISCOVERY: list[Exchange] = [
    ("GET", "/api/version", None),
    ("GET", "/api/tags", None),
    ("POST", "/api/show", {"model": "org/big"}),
]
VS_CODE: list[Exchange] = [
    *DISCOVERY,
    (
        "POST",
        "/v1/chat/completions",
        {
            "model": "org/big",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [
                {"role": "system", "content": "You code."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "read_file", "description": "", "parameters": {"type": "object"}},
                }
            ],
            "tool_choice": "auto",
            "temperature": 0.1,
            "top_p": 1,
            "n": 1,
        },
    ),
]


def _zed(*messages: dict[str, Any]) -> Exchange:
    body = {
        "model": "org/big",
        "messages": messages,
        "stream": True,
        "keep_alive": -1,
        "options": {"num_ctx": 16384, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None},
        "tools": [{"type": "function", "function": {"name": "grep", "description": None, "parameters": {}}}],
        "think": True,
    }
    return "POST", "/api/chat", body


_GREP = [{"function": {"name": "grep", "arguments": {"regex": "x"}}}]
ZED: list[Exchange] = [
    ("GET", "/api/tags", None),
    ("POST", "/api/show", {"model": "org/big"}),
    _zed({"role": "user", "content": "hi", "images": None}),
    _zed(
        {"role": "system", "content": "You edit."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": _GREP, "thinking": "Look."},
        {"role": "tool", "tool_name": "grep", "content": "x.py"},
    ),
]


def _home_assistant(*messages: dict[str, Any], **fields: Any) -> Exchange:
    shared = {"model": "org/big", "stream": True, "keep_alive": -1, "options": {"num_ctx": 8192}}
    return "POST", "/api/chat", {**shared, "messages": messages, **fields}


_HOUSE = {"role": "system", "content": "You run a house."}
_LIGHT = [{"function": {"name": "HassTurnOn", "arguments": {"name": "light"}}}]
_HASS_TOOLS = [{"type": "function", "function": {"name": "HassTurnOn", "parameters": {"type": "object"}}}]
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
HOME_ASSISTANT: list[Exchange] = [
    ("GET", "/api/tags", None),
    ("POST", "/api/pull", {"model": "org/big:latest", "stream": False}),
    _home_assistant(_HOUSE, {"role": "user", "content": "light?"}, tools=_HASS_TOOLS, think=False),
    _home_assistant(
        _HOUSE,
        {"role": "user", "content": "light?"},
        {"role": "assistant", "content": None, "tool_calls": _LIGHT},
        {"role": "tool", "content": '{"data": {"success": true}, "error": null}'},
        tools=_HASS_TOOLS,
        think=False,
    ),
    _home_assistant({"role": "user", "content": "How many?"}, format=_SCHEMA, keep_alive="300s"),
]


@pytest.fixture
async def node(neurons: StartNeuron) -> FakeNeuron:
    return await neurons("beast", sizes={"org/big": 10 * GB}, states={"org/big": ModelState.READY})


@pytest.mark.parametrize("exchanges", [VS_CODE, ZED, HOME_ASSISTANT], ids=["vs-code", "zed", "home-assistant"])
async def test_known_clients_get_what_they_need(
    node: FakeNeuron, start_gateway: StartGateway, exchanges: list[Exchange]
) -> None:
    client = await start_gateway(node, catalogue=Catalogue(models=(ModelSpec(id="org/big"),)))
    for method, path, body in exchanges:
        checking = asyncio.create_task(_check(client, method, path, body))
        if path == "/api/pull":
            await until(lambda: node.pull_requests)
            node.pull = PullStatus(model_id="org/big", state="done")
        await checking
    assert not client.gateway.dispatcher.pins
    assert not node.unload_requests


async def test_discovery_without_a_key_is_opt_in(node: FakeNeuron, start_gateway: StartGateway) -> None:
    """VS Code sends its key with conversations only."""
    catalogue = Catalogue(models=(ModelSpec(id="org/big"),))
    client = await start_gateway(node, catalogue=catalogue, keys=(KEY.section,), open_listing=True)
    for method, path, body in DISCOVERY:
        await _check(client, method, path, body)
    method, path, body = VS_CODE[-1]
    await _check(client, method, path, body, authorization=f"Bearer {KEY.text}")


async def _check(client: Client, method: str, path: str, body: Any, **headers: str) -> None:
    async with client.session.request(method, client.url + path, json=body, headers=headers) as response:
        data = await response.read()
        assert response.status == 200, data
    if path.startswith("/v1/"):
        chunks = [json.loads(frame.data) for frame in Parser().feed(data) if frame.data != "[DONE]"]
        assert "".join(_said(chunk) for chunk in chunks) == "from beast"
        assert any(chunk.get("usage") for chunk in chunks)
        return
    replies = [json.loads(line) for line in data.splitlines()]
    assert not any("error" in reply for reply in replies)
    if path == "/api/chat":
        assert "".join(reply["message"]["content"] for reply in replies) == "from beast"
        assert {reply["message"]["role"] for reply in replies} == {"assistant"}
        assert replies[-1]["done"]
    if path == "/api/show":
        information = replies[0]["model_info"]
        assert information[f"{information['general.architecture']}.context_length"] == 32768
        assert {"template", "capabilities", "details"} <= set(replies[0])


def _said(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
