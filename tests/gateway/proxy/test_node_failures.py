"""Requests whose node dies, hangs, misses polls or is overloaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import pytest
from aiohttp import web

from cortex.gateway.proxy.services import RequestLimits
from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..fake_neuron import GB
from ..fake_responses import begin_stream, chunk, hang, reset_connection

if TYPE_CHECKING:
    from ..fake_neuron import FakeNeuron, StartNeuron
    from ..started_gateway import StartGateway


READY = ModelState.READY


async def test_tries_another_node_when_one_dies_before_the_first_byte(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def die(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await reset_connection(request)

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, respond=die)
    good = await neurons("good", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(bad, good)
    for _ in range(4):
        status, response = await client.chat("a")
        assert (status, response["choices"][0]["message"]["content"]) == (200, "from good")
    assert bad.seen


async def test_node_that_always_dies_before_the_first_byte_is_502(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def die(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await reset_connection(request)

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, respond=die)
    client = await start_gateway(bad)
    status, body = await client.chat("a")
    assert (status, body["error"]["code"]) == (502, "upstream_unavailable")
    assert client.gateway.dispatcher.in_flight == {}


async def test_stream_of_a_dead_node_ends_with_an_error_event(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def half(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk(body["model"], {"content": "half"}))
        await asyncio.sleep(0.05)
        await reset_connection(request)

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, respond=half)
    good = await neurons("good", sizes={"a": GB}, states={"a": ModelState.COLD})
    client = await start_gateway(bad, good)
    text = await client.stream("/v1/chat/completions", {"model": "a", "messages": [], "stream": True})
    assert b"half" in text
    assert b'"upstream_interrupted"' in text
    assert not good.seen
    await until(lambda: client.gateway.dispatcher.in_flight == {})


async def test_tries_another_node_when_one_dies_during_a_load(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    bad = await neurons("bad", sizes={"a": GB}, load_gate=asyncio.Event())
    good = await neurons("good", sizes={"a": GB}, total_bytes=48 * GB)
    client = await start_gateway(bad, good)
    request = asyncio.create_task(client.chat("a"))
    await until(lambda: bad.load_requests)
    await bad.stop()
    status, response = await request
    assert (status, response["choices"][0]["message"]["content"]) == (200, "from good")


async def test_tries_another_node_when_a_loading_one_misses_polls(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    bad = await neurons("bad", sizes={"a": GB}, load_gate=asyncio.Event())
    good = await neurons("good", sizes={"a": GB}, total_bytes=48 * GB)
    client = await start_gateway(bad, good, poll_timeout_s=0.5)
    request = asyncio.create_task(client.chat("a"))
    await until(lambda: bad.load_requests)
    bad.control_gate.clear()
    status, response = await request
    assert (status, response["choices"][0]["message"]["content"]) == (200, "from good")


async def test_silent_stream_ends_after_the_idle_timeout(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def fall_silent(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk(body["model"], {"content": "half"}))
        await hang()

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, respond=fall_silent)
    client = await start_gateway(bad, idle_timeout_s=0.5, keepalive_s=0.2)
    text = await client.stream("/v1/chat/completions", {"model": "a", "messages": [], "stream": True})
    assert b'"upstream_interrupted"' in text


@pytest.mark.parametrize(
    ("path", "is_foreign", "is_too_busy_for_polls"),
    [
        ("/v1/audio/speech", True, False),
        ("/v1/audio/speech", True, True),
        ("/v1/chat/completions", True, False),
        ("/v1/chat/completions", False, False),
    ],
)
async def test_slow_response_that_is_no_stream_is_neither_sent_again_nor_held_against_its_node(
    path: str,
    is_foreign: bool,
    is_too_busy_for_polls: bool,
    neurons: StartNeuron,
    start_gateway: StartGateway,
) -> None:
    async def work(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if is_too_busy_for_polls:
            node.control_gate.clear()
            for _ in range(3):
                client.gateway.dispatcher.missed(node.name, "did not respond to a poll")
        if body["input"] == "endless":
            await hang()
        await asyncio.sleep(0.6)
        node.control_gate.set()
        return web.Response(body=b"sound")

    nodes = [await neurons(name, sizes={"a": GB}, states={"a": READY}, respond=work) for name in ("one", "two")]
    foreign, own = (tuple(nodes), ()) if is_foreign else ((), tuple(nodes))
    client = await start_gateway(*own, foreign=foreign, idle_timeout_s=0.2)
    events: list[dict[str, Any]] = []
    client.gateway.event_log.subscribe(events.append)
    headers = {"content-type": "application/json"}
    data = msgspec.json.encode({"model": "a", "messages": [], "input": "long"})
    async with client.session.post(client.url + path, data=data, headers=headers) as response:
        assert (response.status, await response.read()) == (200, b"sound")
    limits = RequestLimits(whole_silence_s=0.5)
    client = await start_gateway(*own, foreign=foreign, idle_timeout_s=0.2, request_limits=limits)
    client.gateway.event_log.subscribe(events.append)
    status, body = await client.post(path, {"model": "a", "messages": [], "input": "endless"}, **headers)
    assert (status, body["error"]["code"]) == (502, "upstream_unavailable")
    assert sum(len(node.seen) for node in nodes) == 2
    assert not [event for event in events if event["kind"] == "node_suspected"]


async def _hang_with(node: FakeNeuron) -> NoReturn:
    """The whole node hangs from now on, as a stopped process does."""
    node.control_gate.clear()
    await hang()


async def test_request_at_a_node_that_hangs_moves_when_the_node_is_down(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def hang_at_once(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await _hang_with(node)

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, respond=hang_at_once)
    good = await neurons("good", sizes={"a": GB})
    client = await start_gateway(bad, good, poll_timeout_s=0.2)
    status, response = await client.chat("a")
    assert (status, response["choices"][0]["message"]["content"]) == (200, "from good")


async def test_stream_of_a_node_that_hangs_ends_when_the_node_is_down(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def hang_in_the_middle(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk(body["model"], {"content": "half"}))
        await _hang_with(node)

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, respond=hang_in_the_middle)
    client = await start_gateway(bad, poll_timeout_s=0.2)
    text = await client.stream("/v1/chat/completions", {"model": "a", "messages": [], "stream": True})
    assert b'"upstream_interrupted"' in text


async def test_stream_of_a_node_that_is_down_goes_on_while_it_sends(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        node.control_gate.clear()
        while "bad" not in down:
            await response.write(chunk(body["model"], {"content": "more"}))
            await asyncio.sleep(0.05)
        await response.write(chunk(body["model"], {"content": "last"}, "stop"))
        await response.write_eof(b"data: [DONE]\n\n")
        return response

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, respond=respond)
    client = await start_gateway(bad, poll_timeout_s=0.2)
    down = set[str]()
    nodes = client.gateway.dispatcher

    def note_down() -> bool:
        down.update(node.name for node in nodes.fleet.nodes if not node.healthy)
        return bool(down)

    stream = asyncio.create_task(client.stream("/v1/chat/completions", {"model": "a", "messages": [], "stream": True}))
    await until(note_down)
    assert b"last" in await stream


async def test_request_waits_for_a_model_that_recovers(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def recover(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        node.states["a"], node.respond = ModelState.RECOVERING, None
        error = {"message": "recovers", "code": "recovering", "type": "x"}
        return web.json_response({"error": error}, status=503, headers={"x-cortex-recovers": "true"})

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=recover)
    client = await start_gateway(beast)
    response = asyncio.create_task(client.chat("a"))
    await until(lambda: client.gateway.dispatcher.queue_depths == {"a": 1})
    beast.states["a"] = READY
    assert (await response)[0] == 200


async def test_one_missed_poll_does_not_take_a_node_down(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, missed_polls=3, poll_timeout_s=0.5)
    polls = beast.polls
    beast.control_gate.clear()
    await until(lambda: beast.polls > polls + 1)
    beast.control_gate.set()
    assert (await client.chat("a"))[0] == 200
    assert (await client.get("/health"))[1]["nodes"] == {"beast": "up"}


async def test_tries_another_replica_when_one_is_overloaded(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def full(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full", "code": "overloaded", "type": "x"}}, status=503)

    full_node = await neurons("a-full", sizes={"a": GB}, states={"a": READY}, respond=full)
    free_node = await neurons("b-free", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(full_node, free_node)
    assert [(await client.chat("a"))[0] for _ in range(3)] == [200] * 3
    free_node.respond = full
    status, body = await client.chat("a")
    assert (status, body["error"]["code"]) == (503, "overloaded")
