"""What a gateway promises for every model holds for one that a server runs: keys, limits, budgets, usage, queue,
activity, explain, the log of the server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio
from faulty_models import running_node, write_model

from cortex.fleet.catalogue import ModelSpec
from cortex.gateway.ledger.keys import generate

from .....waiting import WAIT_S
from ....api.served import served
from .commands import config, through_gateway
from .test_opaque_requests import FILE, form

OPERATOR = generate("operator", operator=True)
USER = generate("user", window_tokens=3500)
MONITOR = generate("monitor", operator=True, requests_per_min=1, window_tokens=1300)
LIMITED = generate("limited", requests_per_min=2, models=("voice",))


@dataclass
class Client:
    session: aiohttp.ClientSession
    node_url: str

    async def __call__(self, path: str, method: str = "POST", *, key: Any = USER, **given: Any) -> tuple[int, Any]:
        sent = given.pop("headers", {}) | {"authorization": f"Bearer {key.text}"}
        async with self.session.request(method, path, headers=sent, **given) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def activity(self, **filters: str) -> list[dict[str, Any]]:
        query = "&".join(f"{name}={value}" for name, value in filters.items())
        return list((await self(f"/fleet/activity?{query}", "GET", key=OPERATOR))[1]["requests"])


@pytest_asyncio.fixture(loop_scope="session")
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    settings = config(max_concurrent=1, upstream_model="theirs")
    settings["models"].append({"id": "native", "source": str(write_model(tmp_path / "native"))})
    keys = (OPERATOR.section, USER.section, MONITOR.section, LIMITED.section)
    models = (ModelSpec(id="m", tokens_per_request=1200, tokens_per_minute=6000), ModelSpec(id="org/n", harness="fake"))
    async with (
        running_node(tmp_path, settings) as node,
        served(node) as (host, port),
        through_gateway(node_url := f"http://{host}:{port}", tmp_path, *keys, models=models) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session,
    ):
        yield Client(session, node_url)


async def test_budgets_and_usage_count_requests_without_tokens(client: Client) -> None:
    speech = {"model": "m", "input": "hi"}
    status, received = await client("/v1/audio/speech", json=speech)
    assert (status, json.loads(received["first"])["model"]) == (200, "theirs"), received
    assert "authorization" not in {name.lower() for name in received["headers"]}
    status, received = await client("/v1/audio/transcriptions", data=form(("model", "m"), ("language", "de")))
    assert status == 200, received
    assert 'name="model"\r\n\r\ntheirs\r\n' in received["first"]
    assert received["last"].endswith("--\r\n")
    [transcription, spoken] = await client.activity(key="user")
    assert (transcription["path"], transcription["model"]) == ("/v1/audio/transcriptions", "m")
    assert (spoken["node"], spoken["status"]) == ("box", 200)
    assert 1200 <= spoken["prompt_tokens"] < 3000, "the request, and the time that it took"
    status, problem = await client("/v1/audio/speech", json=speech)
    assert status == 429, problem
    assert "this request needs at least 1200" in problem["error"]["message"]
    status, usage = await client("/fleet/usage?by=key", "GET", key=OPERATOR)
    assert "user" in json.dumps(usage)


async def test_each_picture_of_a_request_is_charged(client: Client) -> None:
    for field in ("batch_count", "num_images_per_prompt"):
        status, problem = await client("/v1/images/generations", json={"model": "m", "prompt": "x", field: 100})
        assert (status, problem["error"]["param"]) == (400, field), problem
    status, received = await client("/v1/images/generations", json={"model": "m", "prompt": "x", "n": 2})
    assert status == 200, received
    drawn, *_ = await client.activity(key="user")
    assert 2400 <= drawn["prompt_tokens"] < 3400, "both pictures, and the time that they took"
    asked = {"model": "m", "prompt": "x", "n": 3}
    edited = form(("model", "m"), ("n", "3"))
    for path, given in (("/v1/images/generations", {"json": asked}), ("/v1/images/edits", {"data": edited})):
        status, problem = await client(path, **given)
        assert (status, "this request needs at least 3600" in str(problem)) == (429, True), problem
    for n in (0, 1000, "2", 1.5):
        status, problem = await client("/v1/images/generations", json={**asked, "n": n})
        assert (status, problem["error"]["param"]) == (400, "n"), problem


async def test_keys_and_rates_apply(client: Client) -> None:
    async with client.session.post("/v1/audio/speech", json={"model": "m"}) as response:
        assert response.status == 401
    async with client.session.post("/v1/audio/transcriptions", data=form(("model", "m"))) as response:
        assert response.status == 401
    status, problem = await client("/v1/audio/speech", key=LIMITED, json={"model": "m"})
    assert status in (403, 404), problem
    await client("/v1/audio/transcriptions", key=LIMITED, data=form(("model", "m")))
    status, problem = await client("/v1/audio/transcriptions", key=LIMITED, data=form(("model", "m")))
    assert (status, "per minute" in problem["error"]["message"]) == (429, True)
    rejected = await client.activity(key="limited")
    assert [each["outcome"] for each in rejected] == ["rejected"] * 3


async def test_upstream_is_for_operators(client: Client) -> None:
    assert (await client("/upstream/m/health", "GET"))[0] == 403
    assert (await client("/upstream/m/x", key=OPERATOR))[0] == 200
    status, metadata = await client("/upstream/m/health", "GET", key=OPERATOR)
    assert (status, metadata["state"]) == (200, "awake")
    status, received = await client("/upstream/org/n/v1/x?y=1", "PUT", key=OPERATOR, data=FILE)
    assert (status, received["path"]) == (200, "/v1/x?y=1"), received
    assert received["sha256"] == hashlib.sha256(FILE).hexdigest()
    assert (await client("/upstream/nope/x", "GET", key=OPERATOR))[0] == 404
    assert (await client("/upstream/m/x", "OPTIONS", key=OPERATOR))[0] == 405
    [latest, *_] = await client.activity(key="operator")
    assert latest["path"] == "/upstream/{model}"
    session = client.session
    async with session.get("/upstream/m/health", headers={"authorization": f"Bearer {OPERATOR.text}"}) as response:
        assert response.headers["content-security-policy"].startswith("sandbox")
        assert "set-cookie" not in response.headers
    page = {"origin": "http://evil.example"}
    assert (await client("/upstream/m/x", key=OPERATOR, headers=page))[0] == 200, "no browser adds a key by itself"


async def test_root_of_a_server_is_opened_with_its_slash(client: Client) -> None:
    for server, path in (("", "/upstream/org/n"), (client.node_url, "/upstream/m")):
        sent = {"authorization": f"Bearer {OPERATOR.text}"}
        async with client.session.get(f"{server}{path}?a=1", headers=sent, allow_redirects=False) as response:
            assert (response.status, response.headers.get("location")) == (307, f"{path}/?a=1")
    status, received = await client("/upstream/org/n", key=OPERATOR, data=FILE)
    assert (status, received["path"]) == (200, "/"), "what is sent reaches the server"


async def test_health_check_of_a_model_that_is_not_loaded_does_not_load_it(client: Client) -> None:
    for url in (client.node_url, ""):  # of the node, and through the gateway
        status, problem = await client(f"{url}/upstream/m/health", "GET", key=MONITOR)
        assert (status, problem["error"]["code"]) == (503, "model_not_ready")
    status, health = await client(f"{client.node_url}/health", "GET")
    assert {model["state"] for model in health["models"]} == {"cold"}


async def test_health_checks_are_charged_to_nobody_and_wait_for_no_request(client: Client) -> None:
    """The model takes one request at once, and the key one request a minute."""
    streaming = {"model": "m", "messages": [{"role": "user", "content": "forever"}], "stream": True}
    headers = {"authorization": f"Bearer {OPERATOR.text}"}
    async with client.session.post("/v1/chat/completions", json=streaming, headers=headers) as response:
        await response.content.readuntil(b"on and on")
        for _ in range(3):
            status, metadata = await client("/upstream/m/health", "GET", key=MONITOR)
            assert (status, metadata["state"]) == (200, "awake")
    checks = await client.activity(key="monitor")
    assert [(each["status"], each["prompt_tokens"]) for each in checks] == [(200, None)] * 3
    status, usage = await client("/fleet/usage?by=key", "GET", key=OPERATOR)
    assert "monitor" not in json.dumps(usage)
    assert (await client("/upstream/m/v1/x", "PUT", key=MONITOR, data=b"x"))[0] == 200
    assert (await client("/upstream/m/v1/x", "PUT", key=MONITOR, data=b"x"))[0] == 429, "that is no health check"


async def test_what_a_model_cannot_do_is_said_before_it_is_loaded(client: Client) -> None:
    status, problem = await client("/v1/audio/speech", json={"model": "native"})
    assert (status, "built-in engine" in problem["error"]["message"]) == (400, True)
    status, listed = await client("/fleet/status", "GET", key=OPERATOR)
    assert '"ready"' not in json.dumps(listed)
    assert (await client("/v1/audio/speech", "GET", key=OPERATOR))[0] == 405
    status, problem = await client("/v1/audio/transcriptions", data=form())
    assert (status, problem["error"]["code"]) == (400, "missing_model")


async def test_the_log_of_the_server_and_explain(client: Client) -> None:
    assert (await client("/v1/audio/speech", json={"model": "m"}))[0] == 200
    status, log = await client("/fleet/models/m/log", "GET", key=OPERATOR)
    assert (status, log["nodes"][0]["node"]) == (200, "box")
    assert log["nodes"][0]["lines"][-1] == "ready"
    assert (await client("/fleet/models/m/log", "GET"))[0] == 403
    status, problem = await client("/fleet/models/native/log", "GET", key=OPERATOR)
    assert (status, "built-in engine" in problem["error"]["message"]) == (400, True)
    assert (await client("/fleet/models/m/log?node=nope", "GET", key=OPERATOR))[0] == 404
    status, explained = await client("/fleet/explain/m", "GET", key=OPERATOR)
    assert (status, "box" in json.dumps(explained)) == (200, True)


async def test_requests_wait_for_their_turn(client: Client) -> None:
    """The server takes one at a time; the load on demand is part of the wait of the first."""
    calls = [client("/v1/embeddings", key=OPERATOR, json={"model": "m", "input": "x"}) for _ in range(4)]
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 4
    recorded = await client.activity(key="operator")
    assert [each["prompt_tokens"] for each in recorded] == [7] * 4, "as the server reports"


async def test_a_large_file_is_not_held_in_memory(client: Client, tmp_path: Path) -> None:
    """The file is spooled at the gateway and at the node, both of which are this process."""
    size = 96 << 20
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(size)
    assert (await client("/v1/audio/speech", json={"model": "m"}))[0] == 200
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with large.open("rb") as file:
        data = aiohttp.FormData()
        data.add_field("file", file, filename="x.wav")
        data.add_field("model", "m")
        status, received = await client("/v1/audio/transcriptions", key=OPERATOR, data=data)
    assert status == 200, received
    assert size < received["num_bytes"] < size + 1000
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < size // 3
