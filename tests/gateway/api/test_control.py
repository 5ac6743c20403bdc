"""Models, status, explanations, events and the operator's orders, as clients and SDKs see them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anthropic
import msgspec
import openai
import pytest
from aiohttp import web

from cortex import __version__
from cortex.fleet.catalogue import Alias, Catalogue, Cost, ModelSpec
from cortex.gateway.api.live.public_view import HIDDEN
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..fake_neuron import GB, FakeNeuron

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


READY = ModelState.READY
CHAT = "/v1/chat/completions"
CATALOGUE = Catalogue(
    models=(ModelSpec(id="org/big", cost=Cost(input=1.0, output=2.0)), ModelSpec(id="org/small")),
    aliases={"claude-*haiku*": Alias(model="org/small", background=True), "gpt-4o": "org/big"},
)


async def test_models_are_merged_from_catalogue_nodes_and_aliases(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"org/big": 10 * GB, "extra": GB}, states={"org/big": READY})
    client = await start_gateway(beast, catalogue=CATALOGUE)
    status, listed = await client.get("/v1/models")
    entries = {entry["id"]: entry for entry in listed["data"]}
    assert status == 200
    assert set(entries) == {"org/big", "org/small", "extra", "gpt-4o"}, "a pattern is not a name to send"
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][-1]["id"])
    _, page = await client.get(f"/v1/models?limit=2&after_id={listed['first_id']}")
    assert (page["data"], page["has_more"]) == (listed["data"][1:3], True)
    assert (await client.get("/v1/models?limit=none"))[0] == 400
    big = entries["org/big"]
    assert big["loaded"] is True
    assert big["locations"] == [{"node": "beast", "status": "ready", "vram_mb": 10 * 1024}]
    assert big["max_model_len"] == 32768
    assert big["limit"] == {"context": 32768, "input": 32768, "output": 8192}
    assert big["capabilities"]["tools"] is True
    assert big["cost"]["output"] == 2.0
    assert big["feasible_on"] == ["beast"]
    assert entries["extra"]["loaded"] is False
    assert entries["gpt-4o"]["alias_of"] == "org/big"
    assert entries["gpt-4o"]["loaded"] is True


async def test_status_says_why_requests_wait(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    began, ends = asyncio.Event(), asyncio.Event()

    async def respond(node: FakeNeuron, request: web.Request, body: Any) -> web.StreamResponse:
        began.set()
        await ends.wait()
        return web.json_response({})

    beast = await neurons("beast", sizes={"a": 14 * GB, "b": 14 * GB}, states={"a": READY}, respond=respond)
    ops, bound = generate("ops", operator=True), generate("bound", models=("b",))
    client = await start_gateway(beast, keys=(ops.section, bound.section))

    def ask(model: str) -> asyncio.Task[Any]:
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": model, "messages": messages}
        return asyncio.create_task(client.post(CHAT, body, authorization=f"Bearer {ops.text}"))

    async def reasons(key: NewKey) -> dict[str, str]:
        _, status = await client.get("/fleet/status", Authorization=f"Bearer {key.text}")
        return dict(status["waiting_reasons"])

    requests = [ask("a")]
    await began.wait()
    assert await reasons(ops) == {}
    requests.append(ask("b"))
    try:
        await until(lambda: client.gateway.dispatcher.queue_depths)
        assert await reasons(ops) == {"b": "b waits for room on beast: waits for a: busy with 1 request."}
        assert await reasons(bound) == {"b": f"wait: {HIDDEN}"}
    finally:
        ends.set()
        await asyncio.gather(*requests)


async def test_both_sdks_read_the_listing_and_ids_with_slashes(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"org/big": GB}, states={"org/big": READY})
    client = await start_gateway(beast, catalogue=CATALOGUE)
    openai_sdk = openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0)
    anthropic_sdk = anthropic.AsyncAnthropic(base_url=client.url, api_key="x", max_retries=0)
    assert "org/big" in [model.id async for model in openai_sdk.models.list()]
    assert "org/big" in [model.id async for model in anthropic_sdk.models.list()]
    assert (await openai_sdk.models.retrieve("org/big")).id == "org/big"
    found = await anthropic_sdk.models.retrieve("org/big")
    assert (found.id, found.type) == ("org/big", "model")
    assert found.created_at.year >= 2024
    assert (await openai_sdk.models.retrieve("claude-3-haiku-x")).id == "claude-3-haiku-x"
    with pytest.raises(openai.NotFoundError, match="org/big"):
        await openai_sdk.models.retrieve("org/bigg")


async def test_loading_model_is_listed_as_loading(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    request = asyncio.create_task(client.chat("a"))
    await until(lambda: beast.load_requests)
    _, entry = await client.get("/v1/models/a")
    assert entry["loaded"] is False
    assert entry["locations"][0]["status"] == "loading"
    beast.load_gate.set()
    await request


async def test_node_receives_the_model_id_behind_an_alias(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"org/big": GB, "org/small": GB}, states={"org/big": READY})
    client = await start_gateway(beast, catalogue=CATALOGUE)
    assert (await client.chat("gpt-4o"))[0] == 200
    assert (await client.chat("claude-3-5-haiku-latest"))[0] == 200
    large = "word " * 300_000
    assert (await client.chat("gpt-4o", metadata={"kept": large}))[0] == 200
    assert [seen.body["model"] for seen in beast.seen] == ["org/big", "org/small", "org/big"]
    assert beast.seen[-1].body["metadata"]["kept"] == large


async def test_index_lists_name_and_routes(start_gateway: StartGateway) -> None:
    client = await start_gateway()
    status, greeting = await client.get("/")
    assert (status, greeting["name"]) == (200, "cortex")
    assert greeting["routes"]["/v1/chat/completions"] == ["POST"]
    assert greeting["routes"]["/v1/responses/{id}"] == ["GET", "DELETE"]
    assert greeting["routes"]["/fleet/models/{name}/pin"] == ["POST"]
    async with client.session.head(client.url + "/") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "route_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/fleet/models/a/load", 405, "method_not_allowed"),
        ("POST", "/fleet/models/a/dance", 404, "route_not_found"),
        ("GET", "/v1/models/%ff", 404, "model_not_found"),
        ("DELETE", "/", 405, "method_not_allowed"),
    ],
)
async def test_wrong_path_or_method_gets_a_json_error(
    start_gateway: StartGateway, method: str, path: str, status: int, code: str
) -> None:
    client = await start_gateway()
    async with client.session.request(method, client.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == code
        assert ("allow" in response.headers) == (status == 405)


async def test_mistyped_route_is_not_found_whatever_its_body_is(start_gateway: StartGateway) -> None:
    client = await start_gateway()
    for path in ("/v1/chat/completion", "/v1/complete"):
        status, body = await client.post(path, b"model=a", **{"content-type": "application/x-www-form-urlencoded"})
        assert (status, body["error"]["code"]) == (404, "route_not_found")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/responses/resp_1/cancel", "POST"),
        ("/v1/conversations", "POST"),
        ("/v1/batches/batch_1", "GET, HEAD"),
        ("/v1/audio/voices", "GET"),
        ("/fleet/events", "GET"),
        ("/session/methods", "GET, HEAD"),
        ("/logs/stream", "GET"),
        ("/logs/stream/m", "GET"),
        ("/page/index.html", "GET, HEAD"),
    ],
)
async def test_wrong_method_gets_the_allowed_ones(start_gateway: StartGateway, path: str, allowed: str) -> None:
    client = await start_gateway()
    async with client.session.delete(client.url + path) as response:
        assert (response.status, response.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/v1/messages/none", "/v1/messages/batches/none", "/v1/files", "/v1/models/none"])
async def test_anthropic_client_gets_its_form_of_not_found(start_gateway: StartGateway, path: str) -> None:
    client = await start_gateway()
    status, body = await client.get(path, **{"anthropic-version": "2023-06-01"})
    assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/none", "/v1/messages/batches", "/v1/none"])
async def test_anthropic_client_without_a_key_gets_no_other_error(start_gateway: StartGateway, path: str) -> None:
    client = await start_gateway(keys=(generate("anna").section,))
    status, body = await client.get(path, **{"anthropic-version": "2023-06-01"})
    assert (status, body["error"]["type"]) == (401, "authentication_error")


async def test_anthropic_client_gets_its_form_of_an_unknown_model(start_gateway: StartGateway) -> None:
    client = await start_gateway()
    status, body = await client.post("/v1/messages", {"model": "none", "max_tokens": 5, "messages": []})
    assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")


async def test_anthropic_paths_get_anthropic_errors(start_gateway: StartGateway) -> None:
    client = await start_gateway()
    status, body = await client.get("/v1/messages")
    assert (status, body["type"]) == (405, "error")


async def test_status_and_explain_show_need_and_have(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": 20 * GB, "b": 10 * GB}, states={"a": READY})
    client = await start_gateway(beast)
    _, status = await client.get("/fleet/status")
    node = status["nodes"][0]
    assert (node["name"], node["up"], node["kind"]) == ("beast", True, "neuron")
    assert [model["id"] for model in node["models"]] == ["a"]
    assert (node["cold_models"], node["cold_reasons"]) == (["b"], {})
    _, explained = await client.get("/fleet/explain/b")
    assert (explained["action"], explained["victims"]) == ("load", ["a"])
    device = explained["nodes"][0]["devices"][0]
    assert (device["need_bytes"], device["have_bytes"]) == (10 * GB, 4 * GB)
    assert "beast" in explained["text"]
    assert not beast.load_requests, "explaining changes nothing"


async def test_decisions_are_listed_newest_first(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": 20 * GB, "b": 20 * GB})
    client = await start_gateway(beast)
    await client.chat("a")
    await client.chat("b")
    _, body = await client.get("/fleet/decisions")
    assert [(each["model"], each["action"]) for each in body["decisions"]] == [("b", "load"), ("a", "load")]
    assert body["decisions"][0]["victims"] == ["a"]
    _, body = await client.get("/fleet/decisions?model=a")
    assert [each["model"] for each in body["decisions"]] == ["a"]


async def test_events_are_streamed_as_they_happen(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast)
    async with client.session.get(client.url + "/fleet/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        await client.chat("a")
        kinds = []
        while "model_loaded" not in kinds:
            frame = await response.content.readuntil(b"\n\n")
            if frame.startswith(b"event: "):
                kinds.append(frame.split(b"\n")[0].removeprefix(b"event: ").decode())
                assert msgspec.json.decode(frame.split(b"data: ")[1])["kind"] == kinds[-1]
    assert kinds == ["decision", "load_started", "model_loaded"]


async def test_operator_load_and_unload_respond_when_done(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"org/a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    order = asyncio.create_task(client.post("/fleet/models/org%2Fa/load"))
    await until(lambda: beast.load_requests)
    assert not order.done()
    beast.load_gate.set()
    assert (await order)[0] == 200
    assert (await client.post("/fleet/models/org/a/load"))[0] == 200
    assert len(beast.load_requests) == 1
    status, body = await client.post("/fleet/models/org/a/unload", {"force": True})
    assert (status, body["nodes"]) == (200, ["beast"])
    assert beast.unload_requests[0].force
    status, body = await client.post("/fleet/models/org/a/unload")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_sleeping_model_is_reported_on_every_route_and_wakes_for_a_request(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": 2 * GB}, states={"a": READY}, has_host_memory=True)
    client = await start_gateway(beast)
    status, body = await client.post("/fleet/models/a/unload", {"sleep": True})
    assert (status, body["nodes"]) == (200, ["beast"])
    assert beast.unload_requests[0].sleep
    _, listed = await client.get("/v1/models")
    (entry,) = listed["data"]
    assert entry["loaded"] is False
    assert entry["locations"] == [{"node": "beast", "status": "asleep", "vram_mb": 0, "host_mb": 1024}]
    _, fleet = await client.get("/fleet/status")
    (held,) = fleet["nodes"][0]["models"]
    assert (held["state"], held["host_bytes"]) == ("asleep", GB)
    _, why = await client.get("/fleet/explain/a")
    assert (why["action"], why["outcome"]) == ("wake", "wake a on beast (device 0).")
    assert 'cortex_model_sleeping_bytes{model="a",node="beast"} 1.073741824e+09' in client.metrics()
    assert 'cortex_model_memory_bytes{model="a",node="beast"} 0.0' in client.metrics()
    status, _ = await client.post(
        "/v1/chat/completions", {"model": "a", "messages": [{"role": "user", "content": "x"}]}
    )
    assert status == 200
    assert beast.load_requests[0].devices == (0,)


async def test_evicted_model_sleeps_if_the_node_has_host_memory_else_unloads(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    for has_host_memory, left in ((True, ModelState.ASLEEP), (False, ModelState.COLD)):
        beast = await neurons(
            "beast", sizes={"a": 20 * GB, "b": 20 * GB}, states={"a": READY}, has_host_memory=has_host_memory
        )
        client = await start_gateway(beast)
        body = {"model": "b", "messages": [{"role": "user", "content": "x"}]}
        assert (await client.post("/v1/chat/completions", body))[0] == 200
        assert beast.unload_requests[0].sleep
        assert beast.states == {"a": left, "b": READY}


async def test_failed_operator_load_returns_the_reason(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_faults=[(502, "load_failed", "corrupt file")])
    client = await start_gateway(beast)
    status, body = await client.post("/fleet/models/a/load", {"node": "beast"})
    assert (status, body["error"]["message"]) == (502, "corrupt file")
    beast.load_faults.append((422, "model_unsupported", "mamba9000 is not supported"))
    status, body = await client.post("/fleet/models/a/load", {"node": "beast"})
    assert (status, body["error"]["message"]) == (422, "mamba9000 is not supported")
    status, body = await client.post("/fleet/models/a/load", {"node": "nobody"})
    assert (status, body["error"]["code"]) == (404, "node_not_found")
    assert "beast" in body["error"]["message"]
    assert (await client.get("/fleet/explain/a?node=nobody"))[0] == 404
    for order in ("unload", "pin", "unpin"):
        status, body = await client.post(f"/fleet/models/a/{order}", {"node": "nobody"})
        assert (status, body["error"]["code"]) == (404, "node_not_found")
    await client.post("/fleet/models/a/unload", {"node": "beast"})  # clears the failure
    status, body = await client.post("/fleet/models/a/unload", {"node": "beast"})
    assert (status, body["error"]["message"]) == (404, "a is not loaded on beast.")


async def test_load_on_a_node_that_the_catalogue_excludes_is_a_wrong_request(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"m": GB})
    attic = await neurons("attic", sizes={"m": GB})
    client = await start_gateway(beast, attic, catalogue=Catalogue(models=(ModelSpec(id="m", only_on=("beast",)),)))
    status, rejected = await client.post("/fleet/models/m/load", {"node": "attic"})
    assert (status, rejected["error"]["param"]) == (400, "node")
    assert "attic cannot serve m now: loaded only on beast" in rejected["error"]["message"]
    assert (await client.post("/fleet/models/m/load"))[0] == 200


async def test_pin_loads_and_protects_until_unpin(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": 20 * GB, "b": 20 * GB})
    client = await start_gateway(beast)
    assert (await client.post("/fleet/models/a/pin"))[1]["nodes"] == ["beast"]
    assert beast.states["a"] is READY
    status, body = await client.chat("b")
    assert (status, body["error"]["code"]) == (507, "insufficient_capacity")
    assert (await client.post("/fleet/models/a/pin", {"pinned": False}))[1]["nodes"] == ["beast"]
    assert (await client.chat("b"))[0] == 200


async def test_only_index_and_health_are_open_with_keys(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    key = generate("alice", models=("a",))
    beast = await neurons("beast", sizes={"a": GB, "b": GB}, states={"a": READY, "b": READY})
    client = await start_gateway(beast, keys=(key.section,))
    for path in ("/", "/health"):
        assert (await client.get(path))[0] == 200
    for path in ("/v1/models", "/fleet/status", "/fleet/events", "/version"):
        status, body = await client.get(path)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert (await client.chat("a"))[0] == 401
    authorized = {"Authorization": f"Bearer {key.text}"}
    status, _ = await client.post("/v1/chat/completions", {"model": "a", "messages": []}, **authorized)
    assert status == 200
    assert beast.seen[-1].headers["x-cortex-principal"] == "alice"
    status, body = await client.post("/v1/messages", {"model": "b", "messages": []}, **{"x-api-key": key.text})
    assert (status, body["error"]["type"]) == (403, "permission_error")
    assert 'cortex_completion_tokens_total{key="alice",model="a"} 3.0' in client.metrics()


async def test_version_reports_the_build(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(await neurons("beast"))
    status, body = await client.get("/version")
    assert (status, body["name"], body["version"]) == (200, "cortex", __version__)
    assert set(body) == {"name", "version", "commit", "python", "platform"}


async def test_only_operator_keys_may_order_loads(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    anna, olga = generate("anna"), generate("olga", operator=True)
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast, keys=(anna.section, olga.section))
    as_anna, as_olga = ({"Authorization": f"Bearer {key.text}"} for key in (anna, olga))
    for order in ("load", "unload", "pin", "unpin"):
        status, body = await client.post(f"/fleet/models/a/{order}", {}, **as_anna)
        assert (status, body["error"]["code"], body["error"]["type"]) == (403, "operator_only", "invalid_request_error")
        assert "anna" in body["error"]["message"]
        status, body = await client.post(f"/fleet/models/a/{order}", {})
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert "a" not in beast.states
    for path in ("/v1/models", "/fleet/status", "/fleet/decisions", "/fleet/explain/a"):
        assert (await client.get(path, **as_anna))[0] == 200, path
    for order in ("load", "pin", "unpin", "unload"):
        assert (await client.post(f"/fleet/models/a/{order}", {}, **as_olga))[0] == 200
    status, _ = await client.post("/v1/chat/completions", {"model": "a", "messages": []}, **as_anna)
    assert status == 200, "a request may still cause a load"


async def test_exhausted_budget_responds_429(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    key = generate("bob", balance_tokens=10)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, keys=(key.section,))
    headers = {"Authorization": f"Bearer {key.text}"}
    body = {"model": "a", "messages": [], "max_tokens": 1}
    assert (await client.post("/v1/chat/completions", body, **headers))[0] == 200
    status, response = await client.post("/v1/chat/completions", body, **headers)
    assert (status, response["error"]["code"]) == (429, "insufficient_quota")


async def test_models_stay_below_the_ceiling_of_their_node(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": 6 * GB, "b": 5 * GB}, states={"a": READY})
    client = await start_gateway(beast, memory_mb=8 * GB >> 20)
    _, fleet = await client.get("/fleet/status")
    assert fleet["nodes"][0]["ceiling_bytes"] == 8 * GB
    status, _ = await client.post("/fleet/models/b/load", {})
    assert status == 200
    assert [request.model_id for request in beast.unload_requests] == ["a"], "24 GiB are there, but 8 may be used"
    assert beast.load_requests[-1].max_bytes == 8 * GB
