"""Bodies of any size in any dialect occupy the loop of a gateway for no longer than small ones."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from cortex.fleet.catalogue import Alias, Catalogue
from cortex.wire.node import ModelState

from ..gateway.fake_neuron import GB, FakeNeuron
from .loop_watch import unit_s, watched

if TYPE_CHECKING:
    from ..gateway.fake_neuron import StartGateway


MAX_UNITS = 12
"""How long a callback may take, in units of `unit_s`, which are about two milliseconds on a slow core."""

USER = b'{"role":"user","content":"x"}'
BILLING = b'{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: a"}]}'


def filled(before: bytes, unit: bytes, after: bytes, num_bytes: int) -> bytes:
    return before + b",".join([unit] * max(1, (num_bytes - len(before) - len(after)) // (len(unit) + 1))) + after


def shapes(num_bytes: int) -> Iterator[tuple[str, str, bytes]]:
    """Bodies that cost the most: a name, the path, the body."""
    chat, messages, responses = "/v1/chat/completions", "/v1/messages", "/v1/responses"
    turns = b'{"model":"m","max_tokens":5,"messages":['
    text = b"x" * num_bytes
    yield "text", chat, turns + b'{"role":"user","content":"' + text + b'"}]}'
    yield "turns", chat, filled(turns, USER, b"]}", num_bytes)
    yield "arrays", chat, filled(turns + USER + b'],"x":[', b"[]", b"]}", num_bytes)
    fields = b",".join(b'"f%d":1' % number for number in range(num_bytes // 12))
    yield "fields", chat, turns + USER + b"]," + fields + b"}"
    yield "surrogates", chat, turns + b'{"role":"user","content":"' + rb"\ud800" * (num_bytes // 6) + b'"}]}'
    yield "name", chat, b'{"messages":[],"model":"' + text + b'"}'
    yield "prompts", "/v1/completions", filled(b'{"model":"m","prompt":[', b'"a"', b"]}", num_bytes)
    yield (
        "schema",
        chat,
        filled(
            turns + USER + b'],"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"anyOf":[',
            b"{}",
            b"]}}}}",
            num_bytes,
        ),
    )
    yield "billing", messages, filled(turns, BILLING, b"," + USER + b"]}", num_bytes)
    yield "messages", messages, filled(turns, USER, b"]}", num_bytes)
    yield "items", responses, filled(b'{"model":"m","store":false,"input":[', USER, b"]}", num_bytes)


@pytest.fixture
def node() -> Iterator[FakeNeuron]:
    """A node in a thread of its own, so that its work does not occupy the loop of the gateway."""
    ready, ended = threading.Event(), threading.Event()
    beast = FakeNeuron("beast", sizes={"other": GB, "m": GB}, states={"other": ModelState.READY, "m": ModelState.READY})

    async def run() -> None:
        await beast.start()
        ready.set()
        await asyncio.to_thread(ended.wait)
        await beast.stop()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait()
    yield beast
    ended.set()
    thread.join()


def post(port: int, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("way", ["relayed", "renamed", "translated"])
async def test_no_body_occupies_the_loop_of_a_gateway(
    node: FakeNeuron,
    start_gateway: StartGateway,
    monkeypatch: pytest.MonkeyPatch,
    scaled: Callable[[int, int], int],
    way: str,
) -> None:
    if way == "translated":
        client = await start_gateway(foreign=(node,))
    else:
        aliases: dict[str, str | Alias] = {"m": "other"} if way == "renamed" else {}
        client = await start_gateway(node, catalogue=Catalogue(aliases=aliases))
    port = int(client.url.rpartition(":")[2])
    await asyncio.to_thread(post, port, "/v1/chat/completions", b"{" + b" " * (2 << 20))  # starts the processes
    allowed_s = MAX_UNITS * unit_s()
    too_long = {}
    for num_bytes in (60_000, 130_000, 1_000_000, scaled(4, 16) << 20):
        for name, path, body in shapes(num_bytes):
            with watched(monkeypatch) as watch:
                status = await asyncio.to_thread(post, port, path, body)
            assert status in (200, 400, 413), (name, num_bytes, status)
            if watch.worst_s > allowed_s:
                too_long[name, num_bytes] = (round(watch.worst_s / unit_s(), 1), watch.what)
    assert not too_long
