"""Budgets against clients that try to get around them, through a real gateway in every dialect."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import ClientResponse, ClientSession, web

from cortex.gateway.config import Config
from cortex.gateway.ledger.keys import NewKey, as_toml, generate
from cortex.gateway.ledger.store import open_store, other_claims
from cortex.wire.events import Usage
from cortex.wire.node import usage_report
from cortex.wire.node.headers import BUDGET, PROMPT_TOKENS, TOKEN_LIMIT
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB, FakeNeuron
from ..gateway.fake_responses import REPORTED, begin_stream, chunk
from ..gateway.started_gateway import Process
from ..waiting import NEVER_S, until

if TYPE_CHECKING:
    from ..gateway.fake_neuron import FakeNeuron, StartNeuron
    from ..gateway.started_gateway import Client, SpawnGateway, StartGateway


READY = ModelState.READY
LIMITS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
USED = REPORTED.prompt_tokens + REPORTED.completion_tokens
"""By each request that a node serves."""
EVERY_LIMIT = ("max_tokens", "max_completion_tokens", "max_output_tokens")
PATHS = list(LIMITS)
SAID = [{"role": "user", "content": "hi"}]
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": SAID},
}


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


def limit_of(node: FakeNeuron) -> int:
    """The tokens that the latest request at `node` may use."""
    return int(node.seen[-1].headers[TOKEN_LIMIT])


MAY_BE_EMPTY = ("/v1/completions", "/v1/messages")
"""Responses that may have no tokens."""
MAY_BE_OPEN = ("/v1/chat/completions", "/v1/completions")
"""Where -1 is no limit, as in llama.cpp."""


@pytest.mark.parametrize("path", PATHS)
async def test_rejects_negative_limit_before_reserving(keyed: StartKeyed, path: str) -> None:
    beast, ask = await keyed(balance_tokens=300)
    for field in LIMITS[path]:
        accepted = {0} if path in MAY_BE_EMPTY else set()
        accepted |= {-1} if path in MAY_BE_OPEN and field == "max_tokens" else set()
        for value in {-1_000_000, -1, 0, 10**25} - accepted:
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
    for number, fields in enumerate((foreign, foreign_low)):
        assert (await ask(path, **fields, **{LIMITS[path][0]: 1000}))[0] == 200
        assert limit_of(beast) == 300 - number * USED, "all that was left"


def spent_by(client: Client, key: str) -> float:
    """Prompt and completion tokens that were counted for a key."""
    found = re.findall(r'cortex_(?:prompt|completion)_tokens_total{key="(\w+)",model="a"} (\S+)', client.metrics())
    return sum(float(value) for name, value in found if name == key)


REQUIRED = {"/v1/messages": {"max_tokens": 5000}}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    *((path, REQUIRED.get(path, {})) for path in PATHS),
    *((path, {LIMITS[path][0]: 10**6}) for path in PATHS),
    *((path, {"stream": True, **REQUIRED.get(path, {})}) for path in PATHS),
    *((path, {"n": 8}) for path in PATHS[:2]),
    *((path, {"n": 2, "best_of": 8}) for path in PATHS[:2]),
    ("/v1/chat/completions", {"max_completion_tokens": 10**6, "max_tokens": 1}),
    ("/v1/chat/completions", {"max_tokens": 1, "n_predict": 10**6}),
    ("/v1/chat/completions", {"min_tokens": 10**6}),
    ("/v1/chat/completions", {"max_tokens": -1}),
    ("/v1/chat/completions", {"max_tokens": -1, "max_completion_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
    ("/v1/completions", {"prompt": ["a"] * 10}),
    ("/v1/completions", {"prompt": ["a"] * 4, "n": 4, "max_tokens": 10**6}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
    ("/v1/messages", {"max_tokens": 10**6, "thinking": {"type": "enabled", "budget_tokens": 5000}}),
    ("/v1/responses", {"input": "a", "background": True}),
]

UNCOUNTED: list[tuple[str, dict[str, Any]]] = [
    *((path, {"n": 2, "best_of": 8}) for path in PATHS[:2]),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
]
"""What foreign servers do not get for a key with a budget."""


async def greedy(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Generates as long as the gateway lets it, after a prompt of twice as many tokens as its size suggests."""
    prompt_tokens = int(request.headers["content-length"]) // 2
    left = int(request.headers[TOKEN_LIMIT]) - prompt_tokens
    if left < 1:
        error = {"message": "The prompt is over the budget.", "code": "insufficient_quota"}
        headers = {PROMPT_TOKENS: str(prompt_tokens)}
        return web.json_response({"error": error}, status=429, headers=headers)
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=left)
    if not body.get("stream"):
        return web.json_response({}, headers={usage_report.HEADER: usage_report.header_value(usage)})
    response = await begin_stream(request)
    await response.write(b"data: {}\n\n" + usage_report.comment(usage))
    return response


async def greedy_foreign(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A server of another kind, which reads the limits of its own dialect."""
    assert TOKEN_LIMIT not in request.headers
    limit = body.get("n_predict") or body.get("max_completion_tokens") or body["max_tokens"]
    prompts = body.get("prompt")
    num_choices = max(body.get("n", 1), body.get("best_of", 1)) * (len(prompts) if isinstance(prompts, list) else 1)
    usage = {"prompt_tokens": int(request.headers["content-length"]) // 2, "completion_tokens": limit * num_choices}
    if not body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
        return web.json_response({"model": "a", "created": 1, "id": "1", "choices": [choice], "usage": usage})
    response = await begin_stream(request)
    await response.write(chunk("a", {"content": "x"}, "length"))
    last = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "a", "choices": [], "usage": usage}
    await response.write(b"data: " + msgspec.json.encode(last) + b"\n\ndata: [DONE]\n\n")
    return response


@pytest.mark.parametrize("is_foreign", [False, True], ids=["own", "foreign"])
async def test_no_request_spends_more_than_its_key_has(
    neurons: StartNeuron, start_gateway: StartGateway, is_foreign: bool
) -> None:
    """Requests of every shape, several of each at once, until the key has nothing left."""
    keys = [generate(f"key{number}", balance_tokens=700, window_tokens=600) for number in range(len(SHAPES))]
    respond = greedy_foreign if is_foreign else greedy
    node = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=respond)
    sections = tuple(key.section for key in keys)
    client = await start_gateway(*(() if is_foreign else (node,)), foreign=(node,) if is_foreign else (), keys=sections)

    async def send(key: NewKey, path: str, fields: dict[str, Any]) -> int:
        body = {"model": "a", **PROMPTS[path], **fields}
        headers = {"authorization": f"Bearer {key.text}"}
        async with client.session.post(client.url + path, json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def exhaust(key: NewKey, path: str, fields: dict[str, Any]) -> list[int]:
        rounds = [await asyncio.gather(*(send(key, path, fields) for _ in range(4))) for _ in range(3)]
        return [status for statuses in rounds for status in statuses]

    found = await asyncio.gather(*(exhaust(key, *shape) for key, shape in zip(keys, SHAPES, strict=True)))
    await until(lambda: all(seen.ended for seen in node.seen))
    await client.gateway.close()
    for key, statuses, shape in zip(keys, found, SHAPES, strict=True):
        spent = spent_by(client, key.section.name)
        assert set(statuses) <= {200, 400, 429}, shape
        assert spent <= 600, shape
        assert is_foreign or spent > 500, f"served as long as it could be: {shape}"
    served = [shape for statuses, shape in zip(found, SHAPES, strict=True) if 200 in statuses]
    not_served = [shape for shape in SHAPES if shape not in served]
    assert not_served == ([shape for shape in SHAPES if shape in UNCOUNTED] if is_foreign else [])


async def test_small_window_serves_the_next_chat_without_a_limit(keyed: StartKeyed) -> None:
    beast, ask = await keyed(window_tokens=1000)
    for used in range(0, 50, USED):
        assert (await ask("/v1/chat/completions"))[0] == 200
        assert limit_of(beast) == 1000 - used


async def test_client_learns_that_its_budget_may_end_the_response(
    neurons: StartNeuron, start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cortex.gateway.proxy.accounting")
    key = generate("alice", balance_tokens=9000, operator=True)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=greedy)
    client = await start_gateway(beast, keys=(key.section,))

    async def budget_of(**fields: Any) -> str | None:
        body = {"model": "a", "messages": [], **fields}
        headers = {"authorization": f"Bearer {key.text}"}
        async with client.session.post(client.url + PATHS[0], json=body, headers=headers) as response:
            return response.headers.get(BUDGET)

    def logged() -> list[str]:
        return [message for message in caplog.messages if "budget" in message]

    assert await budget_of(max_tokens=10) is None
    assert not logged()
    left = 9000 - limit_of(beast)
    assert await budget_of() == f"{left // 2} tokens"
    assert logged() == [f"response ended at its budget: {left // 2} tokens"]
    _, page = await client.get("/fleet/activity", Authorization=f"Bearer {key.text}")
    assert "ended at" in str(page)


async def test_rejects_too_many_choices(keyed: StartKeyed) -> None:
    beast, ask = await keyed(balance_tokens=10**9)
    for value in (-32, 0, 129, 10**25):
        status, response = await ask("/v1/chat/completions", max_tokens=1, n=value)
        assert (status, response["error"]["param"]) == (400, "n")
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
        await asyncio.sleep(NEVER_S)
        return response

    key = generate("alice", balance_tokens=1000)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=endless)
    settings = f"{as_toml(key.section)}[ledger]\nflush_s = 0.05\n"
    gateway = await spawn(beast, settings)
    headers = {"authorization": f"Bearer {key.text}"}
    body = {"model": "a", "messages": [], "stream": True, "max_tokens": 600}

    async def ask(session: ClientSession, gateway: Process, **fields: Any) -> ClientResponse:
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        return await session.post(url, json={**body, **fields}, headers=headers)

    async with ClientSession() as session:
        running = await ask(session, gateway)
        await running.content.readuntil(b"data: ")  # after keepalives, on a slow machine
        store = open_store(Config().database(tmp_path))
        await until(lambda: store.run(lambda execute: other_claims(execute, "")))
        store.close_connection()
        gateway.process.send_signal(signal.SIGKILL)
        await gateway.process.wait()
        running.close()
        beast.respond = None
        again = await spawn(beast, settings)
        reserved = limit_of(beast)
        assert (await ask(session, again, max_tokens=600)).status == 200
        assert limit_of(beast) == 1000 - reserved
    await until(lambda: all(seen.ended for seen in beast.seen))
