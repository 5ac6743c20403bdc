"""A fake node that responds in the dialect of the Responses API, and requests to the gateway above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.wire.dialects import openai_chat, openai_responses
from cortex.wire.dialects.openai_responses import kept
from cortex.wire.events import AnyEvent, Finish, Start, TextDelta, ToolCallDelta, ToolCallStart, ToolCallStop, Usage
from cortex.wire.node import usage_report
from cortex.wire.node.protocol import ModelState

from ...waiting import until_response
from ..fake_neuron import GB, FakeNeuron
from ..fake_responses import REPORTED, begin_stream
from ..started_gateway import Client

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron


READY = {"sizes": {"a": GB}, "states": {"a": ModelState.READY}}
CALL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def events_of(request: Any) -> list[AnyEvent]:
    """What the fake model says: it calls a tool once, then reports how many messages it was sent."""
    start = Start(id="x", model="a", created=1, prompt_tokens=7)
    last = request.messages[-1]
    finish = Finish(reason="stop", usage=Usage(prompt_tokens=7, completion_tokens=3))
    if request.tools and last.role == "user":
        call: list[AnyEvent] = [
            ToolCallStart(call=0, id="call_1", name="weather"),
            ToolCallDelta(call=0, arguments="{}"),
            ToolCallStop(call=0),
        ]
        return [start, *call, msgspec.structs.replace(finish, reason="tool_calls")]
    return [start, TextDelta(text=f"{len(request.messages)} "), TextDelta(text="messages"), finish]


async def respond(node: FakeNeuron, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A node's response: the real codec of the dialect."""
    raw = msgspec.json.encode(body)
    if http.path == "/v1/chat/completions":  # what the gateway translates
        request = openai_chat.parse(raw)
        whole = openai_chat.fold(events_of(request), request, id="x", created=1, model="a")
        return web.Response(body=whole, content_type="application/json")
    request = openai_responses.parse(raw)
    if http.path == "/v1/responses/input_tokens":
        return web.json_response({"object": "response.input_tokens", "input_tokens": 12})
    id = "resp_" + "0" * 32
    if stored := kept.from_header(http.headers.get(kept.HEADER, "")):
        id, request = stored.id, stored.described(request)
    events = events_of(request)
    if not request.stream:
        whole = openai_responses.fold(events, request, id=id, created=1, model="a")
        headers = {usage_report.HEADER: usage_report.header_value(REPORTED)}
        return web.Response(body=whole, content_type="application/json", headers=headers)
    response = await begin_stream(http)
    encoder = openai_responses.Encoder(request, id=id, created=1, model="a")
    for event in events:
        await response.write(encoder.encode(event))
        if isinstance(event, Start):
            await node.stream_gate.wait()
    await response.write(usage_report.comment(REPORTED))
    await response.write_eof()
    return response


@pytest.fixture
async def node(neurons: StartNeuron) -> FakeNeuron:
    return await neurons("beast", respond=respond, **READY)


async def create(client: Client, _headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, Any]:
    return await client.post("/v1/responses", {"model": "a", "input": "hello", **fields}, **(_headers or {}))


async def send(client: Client, method: str, path: str, **headers: str) -> tuple[int, Any]:
    async with client.session.request(method, client.url + path, headers=headers) as response:
        return response.status, msgspec.json.decode(await response.read())


async def found(client: Client, path: str, status: str = "completed") -> dict[str, Any]:
    """The response at `path`, once it is there and has the status."""
    _, response = await until_response(
        lambda: client.get(path), lambda got: got[0] == 200 and got[1]["status"] == status
    )
    return dict(response)


def stream_events(text: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: ")]
