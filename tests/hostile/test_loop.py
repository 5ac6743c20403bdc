"""Bodies of any size in any dialect occupy the loop of a gateway for no longer than small ones."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.fleet.catalogue import Alias, Catalogue
from cortex.parsing.cost import LARGE_BYTES, LARGE_RELAYED_BYTES
from cortex.wire.dialects.openai_responses import kept
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB, FakeNeuron
from ..waiting import WAIT_S
from .loop_watch import Unit, watched

if TYPE_CHECKING:
    from ..gateway.started_gateway import StartGateway


TRIES = 8
"""A busy machine may pause the loop; what occupies it does so every time."""
MAX_UNITS = 12
"""How long a callback may take, in multiples of `Unit`, which is about two milliseconds on a slow core."""

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
    yield "pictures", chat, filled(turns + b'{"role":"user","content":";base64,"},', USER, b"]}", num_bytes)
    yield "limit", chat, filled(b'{"model":"m","messages":[%b],"max_tokens":[' % USER, b"[]", b"]}", num_bytes)
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
    return send(port, path, body)[0]


def send(port: int, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET" if body is None else "POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
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
    too_long, unit = {}, Unit()
    # The largest bodies that are parsed on the loop, the largest that are relayed without, and larger ones.
    for num_bytes in (LARGE_BYTES - 1, LARGE_RELAYED_BYTES - 1, scaled(2, 16) << 20):
        for name, path, body in shapes(num_bytes):
            for _ in range(TRIES):
                with watched(monkeypatch) as watch:
                    status = await asyncio.to_thread(post, port, path, body)
                assert status in (200, 400, 413), (name, num_bytes, status)
                if (took := unit.count(watch.worst_s, MAX_UNITS)) <= MAX_UNITS:
                    break
            else:
                too_long[name, num_bytes] = (round(took, 1), watch.what)
    assert not too_long


def items_of(num_bytes: int, *more: Any) -> list[Any]:
    """About as many items as a conversation may have, with as many bytes in all."""
    content = [{"type": "input_text", "text": "é" * (num_bytes // 8000)}]
    return [{"type": "message", "role": "user", "content": content}] * 4000 + list(more)


async def stored_response(node: FakeNeuron, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A response object that a gateway can store."""
    stored = kept.from_header(http.headers.get(kept.HEADER, ""))
    id = stored.id if stored is not None else "resp_" + "0" * 32
    output = [{"type": "message", "id": f"msg_{id.removeprefix('resp_')}_0", "role": "assistant", "content": []}]
    return web.json_response({"id": id, "object": "response", "status": "completed", "output": output})


async def test_no_request_with_state_occupies_the_loop_of_a_gateway_or_its_threads(
    node: FakeNeuron,
    start_gateway: StartGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node.respond = stored_response
    client = await start_gateway(node)
    port = int(client.url.rpartition(":")[2])
    too_long, unit = {}, Unit()
    with ThreadPoolExecutor(1, "client") as clients:

        async def sent(path: str, **fields: Any) -> Any:
            body = msgspec.json.encode({"model": "m", **fields}) if fields else None
            status, response = await asyncio.get_running_loop().run_in_executor(clients, send, port, path, body)
            assert status == 200, response[:200]
            return msgspec.json.decode(response)

        path = "/v1/responses"
        earlier: str | None = None
        for _ in range(2):  # which starts the processes, too
            earlier = (await sent(path, input=items_of(3 << 20), previous_response_id=earlier))["id"]
        assert earlier is not None
        reference = {"type": "item_reference", "id": f"msg_{earlier.removeprefix('resp_')}_0"}
        large = items_of(6 << 20)
        requests: dict[str, tuple[str, dict[str, Any]]] = {
            "history": (path, {"input": "x", "previous_response_id": earlier}),
            "history and body": (path, {"input": large, "previous_response_id": earlier}),
            "reference to history": (path, {"input": [reference]}),
            "reference and body": (path, {"input": [*large, reference]}),
            "in background": (path, {"input": large, "background": True}),
            "count": (f"{path}/input_tokens", {"input": [*large, reference]}),
            "list": (f"{path}/{earlier}/input_items", {}),
        }
        for name, (to, fields) in requests.items():
            for _ in range(TRIES):
                with watched(monkeypatch) as watch:
                    await sent(to, **fields)
                if (took := unit.count(max(watch.worst_s, watch.threads_s), MAX_UNITS)) <= MAX_UNITS:
                    break
            else:
                too_long[name] = (round(took, 1), watch.what)
    assert not too_long
