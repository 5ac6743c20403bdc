"""Many clients, some of which disconnect or read slowly: nothing leaks, and no client delays another."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from cortex.gateway.proxy.request import ProxyRequest
from cortex.http.relay import Relay
from cortex.http.server.exchange import Exchange
from cortex.http.upstream.call import UpstreamCall
from cortex.wire.node.protocol import ModelState

from ...waiting import WAIT_S, at_rest, until
from ..fake_neuron import GB, JSON
from ..fake_responses import begin_stream, chunk

if TYPE_CHECKING:
    from ..fake_neuron import FakeNeuron, StartNeuron
    from ..started_gateway import Client, StartGateway


READY = ModelState.READY
BODY = b'{"model":"a","stream":true,"messages":[]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)


@pytest.fixture
async def many_clients() -> AsyncIterator[ClientSession]:
    async with ClientSession(
        headers=JSON, connector=TCPConnector(limit=0), timeout=ClientTimeout(total=WAIT_S)
    ) as session:
        yield session


def num_running_calls() -> int:
    return sum(isinstance(each, UpstreamCall) and not each.done for each in gc.get_objects())


async def assert_idle(client: Client, *nodes: FakeNeuron) -> None:
    """Every counter is back at its initial value."""
    gateway = client.gateway
    await until(lambda: gateway.dispatcher.in_flight == {} and gateway.server.num_exchanges == 0)
    assert gateway.dispatcher.queue_depths == {}
    await until(lambda: num_running_calls() <= len(nodes))  # each node may be responding to a poll
    await until(lambda: all(seen.ended for node in nodes for seen in node.seen))
    text = client.metrics()
    assert not [line for line in text.splitlines() if line.startswith("cortex_in_flight_requests{")]


async def test_counters_return_to_zero_when_a_third_of_500_streams_disconnect(
    neurons: StartNeuron, start_gateway: StartGateway, many_clients: ClientSession
) -> None:
    async def paced(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        response = await begin_stream(request)
        for _ in range(5):
            await response.write(chunk(body["model"], {"content": "x"}))
            await asyncio.sleep(0.2)
        await response.write(b"data: [DONE]\n\n")
        return response

    gate = asyncio.Event()
    nodes = [await neurons(f"n{i}", sizes={"a": GB, "b": GB}, states={"a": READY}, respond=paced) for i in range(2)]
    for node in nodes:
        node.load_gate = gate
    client = await start_gateway(*nodes, max_waiting=500, missed_polls=1000)
    chance = random.Random(5)

    async def stay(model: str) -> bool:
        body = {"model": model, "messages": [], "stream": True}
        async with many_clients.post(client.url + "/v1/chat/completions", json=body) as response:
            return (await response.read()).endswith(b"data: [DONE]\n\n")

    left_while_loading = asyncio.Event()

    async def leave(model: str, after_s: float) -> bool:
        staying = asyncio.create_task(stay(model))
        if model == "b":  # however slow the machine is, some disconnect in the queue
            await until(lambda: any(node.load_requests for node in nodes))
        await asyncio.wait({staying}, timeout=after_s)
        staying.cancel()
        await asyncio.wait({staying})
        if model == "b":
            left_while_loading.set()
        return True

    def one(number: int) -> Coroutine[Any, Any, bool]:
        model = "b" if number % 5 == 0 else "a"  # some wait for a load, and disconnect in the queue
        return leave(model, chance.uniform(0.0, 3.0)) if number % 3 == 0 else stay(model)

    everybody = asyncio.gather(*(one(number) for number in range(500)))
    await until(left_while_loading.is_set)
    gate.set()
    assert all(await everybody)
    await assert_idle(client, *nodes)
    assert sum(len(node.load_requests) for node in nodes) == 1


async def test_slow_readers_delay_only_their_own_responses(
    neurons: StartNeuron, start_gateway: StartGateway, many_clients: ClientSession
) -> None:
    piece = chunk("a", {"content": "x" * 16_000})
    num_written: dict[int, int] = {}

    async def torrent(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("quick"):
            response = await begin_stream(request)
            await response.write(b"data: [DONE]\n\n")
            return response
        mine = len(num_written)
        num_written[mine] = 0
        response = await begin_stream(request)
        for _ in range(2_000):
            await response.write(piece)
            num_written[mine] += len(piece)
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=torrent)
    client = await start_gateway(beast, missed_polls=1000)
    readers = []
    for _ in range(10):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", client.port))
        await asyncio.get_running_loop().sock_sendall(sock, HEAD + BODY)
        readers.append(sock)
    await until(lambda: len(num_written) == 10 and min(num_written.values()) > 0)

    num_bytes = await at_rest(lambda: sum(num_written.values()))
    assert num_bytes < 10 * 16_000_000, "half of it: more than the sockets buffer"
    body = {"model": "a", "messages": [], "stream": True, "quick": True}
    async with many_clients.post(client.url + "/v1/chat/completions", json=body) as response:
        assert (await response.read()) == b"data: [DONE]\n\n"
    one = readers.pop()
    before = sum(num_written.values())
    async with asyncio.timeout(WAIT_S):
        while sum(num_written.values()) == before:  # its node goes on when it reads on
            await asyncio.get_running_loop().sock_recv(one, 1 << 16)
    for sock in (one, *readers):
        sock.close()
    await assert_idle(client, beast)


async def test_a_thousand_requests_leave_no_objects(
    neurons: StartNeuron, start_gateway: StartGateway, many_clients: ClientSession
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, missed_polls=1000)

    async def ask(number: int) -> None:
        body: dict[str, Any] = {"model": "a" if number % 7 else "nobody", "messages": [], "stream": number % 2 == 0}
        async with many_clients.post(client.url + "/v1/chat/completions", json=body) as response:
            await response.read()

    for _ in range(20):
        await asyncio.gather(*(ask(number) for number in range(50)))
    await assert_idle(client, beast)

    def are_gone() -> bool:
        gc.collect()
        return not any(isinstance(each, ProxyRequest | Relay | Exchange) for each in gc.get_objects())

    await until(are_gone)  # the last exchange ends a moment after its response was read
