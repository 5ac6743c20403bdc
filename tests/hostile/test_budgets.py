"""Budgets against clients that try to get around them, through a real gateway in every dialect."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import ClientResponse, ClientSession, web

from cortex.gateway.config import Config
from cortex.gateway.ledger.keys import as_toml, generate
from cortex.gateway.ledger.store import open_store
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB, REPORTED, FakeNeuron, begin_stream, chunk
from ..gateway.started_gateway import Process, until

if TYPE_CHECKING:
    from ..gateway.fake_neuron import FakeNeuron, StartNeuron
    from ..gateway.started_gateway import SpawnGateway, StartGateway


READY = ModelState.READY
LIMITS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
EVERY_LIMIT = ("max_tokens", "max_completion_tokens", "max_output_tokens")
PATHS = list(LIMITS)


Ask = Callable[..., Awaitable[tuple[int, Any]]]
"""`(path, **fields)`: the status and the body of the response."""
StartKeyed = Callable[..., Awaitable[tuple[FakeNeuron, Ask]]]


@pytest.fixture
async def keyed(neurons: StartNeuron, start_gateway: StartGateway) -> StartKeyed:
    """Starts a gateway with one key that has the given limits; returns the node and a function that sends requests."""

    async def start(**limits: Any) -> tuple[FakeNeuron, Ask]:
        key = generate("alice", **limits)
        beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
        client = await start_gateway(beast, keys=(key.section,))

        async def ask(path: str, **fields: Any) -> tuple[int, Any]:
            body = {"model": "a", "messages": [], **fields}
            return await client.post(path, body, Authorization=f"Bearer {key.text}")

        return beast, ask

    return start


def code_of(response: Any) -> str:
    return str(response["error"].get("code") or response["error"]["type"])


@pytest.mark.parametrize("path", PATHS)
async def test_rejects_negative_limit_before_reserving(keyed: StartKeyed, path: str) -> None:
    beast, ask = await keyed(balance_tokens=300)
    for field in LIMITS[path]:
        for value in (-1_000_000, -1, *(() if path == "/v1/completions" else (0,)), 10**25):
            status, response = await ask(path, **{field: value})
            assert status == 400
            assert field in response["error"]["message"]
    assert not beast.seen
    assert (await ask(path, **{LIMITS[path][0]: 250}))[0] == 200, "nothing was reserved or returned"


@pytest.mark.parametrize("path", PATHS)
async def test_limit_of_another_dialect_does_not_lower_the_reservation(keyed: StartKeyed, path: str) -> None:
    beast, ask = await keyed(balance_tokens=300)
    foreign = {field: -1_000_000 for field in EVERY_LIMIT if field not in LIMITS[path]}
    foreign_low = dict.fromkeys(foreign, 1)
    for fields in (foreign, foreign_low):
        status, response = await ask(path, **fields, **{LIMITS[path][0]: 1000})
        assert (status, code_of(response)) in ((429, "insufficient_quota"), (429, "rate_limit_error"))
    assert not beast.seen


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("choices", [{"n": 32}, {"best_of": 32}, {"n": 1, "best_of": 32}])
@pytest.mark.parametrize("limit", [{"max_tokens": 96}, {}])
async def test_charges_every_choice(
    keyed: StartKeyed, path: str, choices: dict[str, Any], limit: dict[str, Any]
) -> None:
    beast, ask = await keyed(balance_tokens=300)
    status, response = await ask(path, **limit, **choices)
    assert (status, code_of(response)) == (429, "insufficient_quota")
    assert not beast.seen
    assert (await ask(path, max_tokens=96, n=2))[0] == 200


async def test_rejects_too_many_choices(keyed: StartKeyed) -> None:
    beast, ask = await keyed(balance_tokens=10**9)
    for field in ("n", "best_of"):
        for value in (-32, 0, 129, 10**25):
            status, response = await ask("/v1/chat/completions", max_tokens=1, **{field: value})
            assert (status, response["error"]["param"]) == (400, field)
    assert not beast.seen


async def test_charges_every_prompt_of_a_list(keyed: StartKeyed) -> None:
    beast, ask = await keyed(balance_tokens=500)
    status, response = await ask("/v1/completions", prompt=["a"] * 10, max_tokens=96)
    assert (status, code_of(response)) == (429, "insufficient_quota")
    assert not beast.seen


@pytest.mark.parametrize("path", PATHS)
async def test_rejects_a_key_without_balance(keyed: StartKeyed, path: str) -> None:
    beast, ask = await keyed(balance_tokens=40)
    statuses = [(await ask(path, **{LIMITS[path][0]: 10}))[0] for _ in range(6)]
    assert statuses[0] == 200
    assert statuses[-2:] == [429, 429]
    assert len(beast.seen) * (REPORTED.prompt_tokens + REPORTED.completion_tokens) <= 40


async def test_impossible_usage_of_a_foreign_server_is_estimated(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def absurd(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        message = {"role": "assistant", "content": "hi"}
        value = {"id": "1", "object": "chat.completion", "created": 1, "model": "a", "choices": []}
        value["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = b'{"prompt_tokens":10000000000000000000000000,"completion_tokens":-7,"total_tokens":3}'
        text = msgspec.json.encode(value)[:-1] + b',"usage":' + usage + b"}"
        return web.Response(body=text, content_type="application/json")

    key = generate("alice", balance_tokens=1000)
    foreign = await neurons("foreign", sizes={"a": GB}, respond=absurd)
    client = await start_gateway(foreign=(foreign,), keys=(key.section,))
    for path, limit in (("/v1/chat/completions", "max_tokens"), ("/v1/messages", "max_tokens")):
        body = {"model": "a", "messages": [{"role": "user", "content": "hello " * 20}], limit: 50}
        assert (await client.post(path, body, Authorization=f"Bearer {key.text}"))[0] == 200
    spent = 'cortex_prompt_tokens_total{key="alice",model="a"}'
    (line,) = [line for line in client.metrics().splitlines() if line.startswith(spent)]
    assert 10 < float(line.rpartition(" ")[2]) < 1000, "estimated by size"


async def test_requests_of_a_killed_gateway_stay_charged(
    neurons: StartNeuron, spawn: SpawnGateway, tmp_path: Path
) -> None:
    async def endless(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk("a", {"content": "first"}))
        await asyncio.sleep(60)
        return response

    key = generate("alice", balance_tokens=1000)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=endless)
    settings = f"{as_toml(key.section)}[ledger]\nflush_s = 0.05\n"
    gateway = await spawn(beast, settings)
    headers = {"authorization": f"Bearer {key.text}"}
    body = {"model": "a", "messages": [], "stream": True, "max_tokens": 900}

    async def ask(session: ClientSession, gateway: Process, **fields: Any) -> ClientResponse:
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        return await session.post(url, json={**body, **fields}, headers=headers)

    async with ClientSession() as session:
        running = await ask(session, gateway)
        assert (await running.content.readuntil(b"\n\n")).startswith(b"data")
        store = open_store(Config().database(tmp_path))
        await until(lambda: store.other_claims(""))
        store.close()
        gateway.process.send_signal(signal.SIGKILL)
        await gateway.process.wait()
        running.close()
        beast.respond = None
        again = await spawn(beast, settings)
        rejected = await ask(session, again, max_tokens=200)
        assert rejected.status == 429, await rejected.text()
        assert (await rejected.json())["error"]["code"] == "insufficient_quota"
        assert (await ask(session, again, max_tokens=10)).status == 200
    await until(lambda: all(seen.ended for seen in beast.seen))
