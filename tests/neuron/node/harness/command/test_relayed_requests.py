"""Requests to a model that a server of its own runs, through the API of a node and through a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from faulty_models import running_node

from cortex.neuron.node.harness.command.host import ServerTimes
from cortex.neuron.node.node import Node
from cortex.wire.node import headers, usage_report
from cortex.wire.node.orders import UnloadRequest
from cortex.wire.node.protocol import ModelState
from cortex.wire.sse import Parser

from .....waiting import NEVER_S, WAIT_S, until
from ....api.inference.route_calls import BODIES, text_of
from ....api.served import served
from .commands import config, servers, through_gateway

CHAT = "/v1/chat/completions"
GATEWAY_HEADERS = {headers.PRINCIPAL: "someone"}


class Caller:
    def __init__(self, node: Node, url: str, session: aiohttp.ClientSession) -> None:
        self.node = node
        self.url = url
        self.session = session

    def post(self, path: str = CHAT, text: str = "hi", sent: dict[str, str] | None = None, **fields: Any) -> Any:
        given = {"messages": [{"role": "user", "content": text}]} if path == CHAT else BODIES[path]
        return self.session.post(self.url + path, json={"model": "m", **given, **fields}, headers=sent)

    def with_url(self, url: str) -> Caller:
        return Caller(self.node, url, self.session)


@pytest_asyncio.fixture(loop_scope="session")
async def caller(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    entry: dict[str, Any] = {
        "upstream_model": "theirs",
        "set_params": {"top_k": 3, "nested": {"a": 1}},
        "strip_params": ["seed"],
    }
    given = dict(getattr(request, "param", {}))
    times = given.pop("times", ServerTimes())
    entry |= {**given, "set_params": entry["set_params"] | given.get("set_params", {})}
    settings = config("--log", str(tmp_path / "log"), max_concurrent=1, **entry)
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with (
        running_node(tmp_path, settings, server_times=times) as node,
        served(node, keepalive_s=0.2) as (host, port),
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        yield Caller(node, f"http://{host}:{port}", session)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_whole_and_streamed_in_every_dialect(caller: Caller, path: str) -> None:
    async with caller.post(path, sent=GATEWAY_HEADERS) as response:
        assert response.status == 200, await response.text()
        received = json.loads(text_of(await response.json()))
        assert (received["model"], received["messages"][-1]) == ("theirs", {"role": "user", "content": "hi"})
        assert usage_report.HEADER in response.headers
    async with caller.post(path, stream=True, sent=GATEWAY_HEADERS) as response:
        data = await response.read()
        assert response.status == 200, data
        assert response.content_type == "text/event-stream"
        text = data.decode()
        assert all(f'"{piece}"' in text for piece in "abc")
        reported = usage_report.from_stream(data)
        assert reported is not None
        assert (reported.prompt_tokens, reported.completion_tokens) == (5, 3)


async def test_a_chat_request_reaches_the_server_as_it_is_but_for_the_operators_fields(caller: Caller) -> None:
    async with caller.post(seed=7, temperature=0.5, unheard_of=[1, {"x": None}], top_k=9) as response:
        reply = await response.json()
        received = json.loads(text_of(reply))
    assert received == {
        "model": "theirs",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "unheard_of": [1, {"x": None}],
        "top_k": 3,
        "nested": {"a": 1},
    }
    assert reply["model"] == "m"
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (7, 2)
    stats = caller.node.engine_stats()["m"]
    assert (stats.prompt_tokens, stats.completion_tokens) == (7, 2)


async def test_ollamas_dialect(caller: Caller) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with caller.session.post(caller.url + "/api/chat", json={"model": "m", "messages": messages}) as response:
        assert response.status == 200, await response.text()
        lines = [json.loads(line) for line in (await response.text()).splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "abc"
    assert (lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == (5, 3)
    async with caller.session.post(caller.url + "/api/chat", json={"model": "m", "keep_alive": 0}) as response:
        assert response.status == 200, await response.text()
    await until(lambda: not servers())


async def test_durations_of_a_whole_response_are_those_of_the_server_or_of_its_generation(caller: Caller) -> None:
    fields = {"model": "m", "stream": False, "messages": [{"role": "user", "content": "hi"}]}
    async with caller.session.post(caller.url + "/api/chat", json=fields) as response:
        reply = await response.json()
    assert (reply["prompt_eval_duration"], reply["eval_duration"] > 0) == (0, True)
    fields["messages"] = [{"role": "user", "content": "timings"}]
    async with caller.session.post(caller.url + "/api/chat", json=fields) as response:
        reply = await response.json()
    durations = [reply[f"{name}_duration"] for name in ("load", "prompt_eval", "eval", "total")]
    assert durations[1:3] == [1_000, 2_000]
    assert durations[-1] == pytest.approx(sum(durations[:-1]), abs=3)


async def test_ollamas_embeddings_are_those_of_the_server(caller: Caller) -> None:
    body = json.dumps({"model": "m:latest", "input": ["hi"]}).encode()  # as curl sends it: without a type, or another
    async with caller.session.post(caller.url + "/api/embed", data=body) as response:
        reply = await response.json()
    assert (reply["model"], reply["embeddings"], reply["prompt_eval_count"]) == ("m", [[0.5, -1.0]], 7)
    assert 0 < reply["load_duration"] <= reply["total_duration"], "the server was started"
    async with caller.session.post(caller.url + "/api/embeddings", json={"model": "m", "prompt": "hi"}) as response:
        assert await response.json() == {"embedding": [0.5, -1.0]}
    async with caller.session.post(caller.url + "/api/embed", json={"model": "m", "input": "spicy"}) as response:
        assert response.status == 400
        assert isinstance((await response.json())["error"], str)


async def test_usage_of_a_stream_is_asked_for_and_passed_on(caller: Caller) -> None:
    async with caller.post(stream=True, stream_options={"include_usage": True}) as response:
        frames = Parser().feed(await response.read())
    chunks = [json.loads(frame.data) for frame in frames if frame.data.startswith("{")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk.get("choices")) == "abc"
    assert (chunks[-1]["usage"]["prompt_tokens"], chunks[-1]["usage"]["completion_tokens"]) == (5, 3)


async def test_errors_of_the_server_are_the_clients(caller: Caller) -> None:
    async with caller.post(text="reject") as response:
        assert (response.status, (await response.json())["error"]["message"]) == (400, "too spicy")


async def test_the_budget_of_a_request_is_a_limit_of_the_server(caller: Caller) -> None:
    async with caller.post(max_completion_tokens=90_000, sent={headers.TOKEN_LIMIT: "5000"}) as response:
        received = json.loads(text_of(await response.json()))
    assert 4000 < received["max_tokens"] < 5000
    assert "max_completion_tokens" not in received
    async with caller.post(sent={headers.TOKEN_LIMIT: "20"}) as response:
        assert (await response.json())["error"]["code"] == "insufficient_quota"


@pytest.mark.parametrize(
    ("caller", "least", "most"),
    [
        ({"set_params": {"max_tokens": 100}}, 100, 100),
        ({"set_params": {"max_tokens": 90_000}}, 4000, 5000),
        ({"set_params": {"max_completion_tokens": 90_000, "n_predict": 200}}, 200, 200),
        ({"set_params": {"n_predict": -1, "best_of": 3, "n": 2}}, 2000, 2500),
    ],
    indirect=["caller"],
)
async def test_the_operators_fields_do_not_lift_the_budget(caller: Caller, least: int, most: int) -> None:
    async with caller.post(max_tokens=80_000, sent={headers.TOKEN_LIMIT: "5000"}) as response:
        received = json.loads(text_of(await response.json()))
    assert least <= received["max_tokens"] <= most
    assert not {"max_completion_tokens", "n_predict", "best_of"} & received.keys()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/infill"])
@pytest.mark.parametrize("name", ["n_cmpl", "best_of", "max_new_tokens", "max_length", "num_predict", "N"])
async def test_fields_that_the_budget_does_not_know_are_rejected(caller: Caller, path: str, name: str) -> None:
    least = {CHAT: "messages", "/v1/completions": "prompt", "/infill": "input_prefix"}[path]
    text: Any = [{"role": "user", "content": "x"}] if path == CHAT else "x"
    sent, fields = {headers.TOKEN_LIMIT: "5000"}, {"model": "m", least: text, name: 100_000}
    async with caller.session.post(caller.url + path, json=fields, headers=sent) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, name)


async def test_a_budget_is_not_sent_as_a_limit_of_zero(caller: Caller) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 0}
    sent = {headers.TOKEN_LIMIT: "5000"}
    async with caller.session.post(caller.url + "/v1/completions", json=body, headers=sent) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "max_tokens")


async def test_the_server_is_sent_no_address_to_fetch(caller: Caller) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}]
    async with caller.post(messages=[{"role": "user", "content": parts}]) as response:
        assert response.status == 400
        assert "not fetched from addresses" in (await response.json())["error"]["message"]
    image = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/latest"}}
    async with caller.post("/v1/messages", messages=[{"role": "user", "content": [image]}]) as response:
        assert response.status == 400
        assert "not fetched from addresses" in (await response.json())["error"]["message"]


async def test_a_client_that_leaves_ends_the_response_and_frees_its_slot(caller: Caller, tmp_path: Path) -> None:
    async with caller.post(text="forever", stream=True) as response:
        await _first_piece(response)
        assert caller.node.model("m").load.running == 1
        waiting = asyncio.create_task(_status(caller))
        await until(lambda: caller.node.model("m").load.waiting == 1)  # max_concurrent
    await until((tmp_path / "log").exists)
    assert await waiting == 200
    await until(lambda: caller.node.model("m").load.running == 0)


async def test_the_prompt_of_a_client_that_leaves_counts_by_its_bytes(caller: Caller) -> None:
    padding = "x" * 5000
    sent = {**GATEWAY_HEADERS, headers.ATTEMPT_ID: "attempt"}
    async with caller.post(text="forever", stream=True, user=padding, sent=sent) as response:
        await _first_piece(response)
    async with caller.session.get(f"{caller.url}/requests/attempt/usage") as response:
        usage = await response.json()
    assert 5000 < usage["prompt_tokens"] < 6000
    assert usage["completion_tokens"] >= 1


async def test_a_crash_in_a_response_is_a_retryable_error_and_the_next_one_is_served(caller: Caller) -> None:
    async with caller.post(text="crash") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "recovering")
    await until(lambda: caller.node.model("m").state is ModelState.READY)
    assert await _status(caller) == 200


async def test_a_crash_within_a_stream_is_reported_as_the_end_of_the_server(caller: Caller) -> None:
    async with caller.post(text="forever", stream=True) as response:
        await _first_piece(response)
        [server] = servers()
        os.kill(server, signal.SIGKILL)
        body = (await response.read()).decode()
    error = json.loads(body[body.rindex("data: {") :].splitlines()[0].removeprefix("data: "))["error"]
    assert error["code"] == "recovering"
    assert "of m has ended" in error["message"]


@pytest.mark.parametrize("caller", [{"times": ServerTimes(loss_s=NEVER_S)}], indirect=True)
async def test_a_closed_connection_frees_its_slot_before_the_server_is_known_to_live(caller: Caller) -> None:
    async with caller.post(text="forever", stream=True) as response:
        await _first_piece(response)
        failing = asyncio.create_task(_status(caller, "close"))
        await until(lambda: caller.node.model("m").load.waiting == 1)
        next_one = asyncio.create_task(_status(caller))
        await until(lambda: caller.node.model("m").load.waiting == 2)
    assert await next_one == 200
    assert not failing.done()
    async with caller.post(text="crash") as response:
        assert response.status == 503
    assert await failing == 503, "it hears of the end, too"


@pytest.mark.parametrize("caller", [{"silence_timeout_s": 3.0}], indirect=True)
async def test_a_long_response_that_is_no_stream_is_awaited_while_the_server_is_healthy(caller: Caller) -> None:
    async with caller.post(text="slow") as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    "caller", [{"silence_timeout_s": 3.0, "times": ServerTimes(begin_s=3.0, loss_s=0.1)}], indirect=True
)
async def test_a_response_that_hangs_fails_alone_while_the_server_is_healthy(caller: Caller) -> None:
    assert await _status(caller) == 200
    before = servers()
    async with caller.post(text="hang") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (502, "upstream_interrupted")
    assert await _status(caller) == 200
    assert servers() == before


@pytest.mark.parametrize("caller", [{"silence_timeout_s": 3.0, "times": ServerTimes(health_s=2.0)}], indirect=True)
async def test_a_server_that_hangs_is_killed_and_started_again(caller: Caller) -> None:
    assert await _status(caller) == 200
    async with caller.post(text="freeze") as response:
        assert response.status == 503, await response.text()
    await until(lambda: caller.node.model("m").state is ModelState.READY)
    async with caller.post() as response:
        assert response.status == 200, await response.text()


async def test_a_drain_waits_for_the_response(caller: Caller) -> None:
    async with caller.post(text="forever", stream=True) as response:
        await _first_piece(response)
        unloading = asyncio.create_task(caller.node.unload(UnloadRequest(model_id="m", drain_s=NEVER_S)))
        await until(lambda: caller.node.model("m").state is ModelState.UNLOADING)
        assert len(servers()) == 1
    await unloading
    assert not servers()


async def test_through_a_gateway(caller: Caller, tmp_path: Path) -> None:
    """It loads the model on demand, relays, and lists it."""
    async with through_gateway(caller.url, tmp_path) as url:
        client = caller.with_url(url)
        async with client.post() as response:
            reply = await response.json()
            assert response.status == 200, reply
            assert json.loads(text_of(reply))["model"] == "theirs"
        async with client.post("/v1/messages", stream=True) as response:
            assert response.status == 200
            assert b"message_stop" in await response.read()
        async with client.session.get(f"{client.url}/v1/models") as response:
            assert "m" in [model["id"] for model in (await response.json())["data"]]


async def test_models_of_servers_take_turns_in_the_memory_of_a_node(tmp_path: Path) -> None:
    """The gateway evicts the one for the other, by their measured sizes."""
    settings = config("--holds-mb", "64", memory_mb=64)
    settings["models"] = [{"id": name, "harness": "fake"} for name in ("m", "n")]
    settings["limits"] = {"memory_mb": 120}
    async with (
        running_node(tmp_path, settings) as node,
        served(node) as (host, port),
        through_gateway(f"http://{host}:{port}", tmp_path) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session,
    ):
        num_files: list[int] = []
        for model in ("m", "n") * 4:
            async with Caller(node, url, session).post(model=model) as response:
                assert response.status == 200, await response.text()
            assert len(servers()) == 1
            assert 64 << 20 < (node.model(model).measured_bytes or 0) < 120 << 20
            num_files.append(len(os.listdir("/proc/self/fd")))
        most = max(num_files[:4])  # connections that ended are closed a little later
        await until(lambda: len(os.listdir("/proc/self/fd")) <= most)


async def _first_piece(response: aiohttp.ClientResponse) -> None:
    """Keepalives come before it."""
    await response.content.readuntil(b"on and on")


async def _status(caller: Caller, text: str = "hi") -> int:
    async with caller.post(text=text) as response:
        return int(response.status)
