"""llama.cpp's routes about models, and its token routes, which a node serves."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.api.model_servers import ModelServerRoutes
from cortex.gateway.api.parts import ApiServices
from cortex.gateway.ledger.keys import generate
from cortex.gateway.proxy.deferred_responses import DeferredResponses
from cortex.http.request import Request
from cortex.system.tasks import OwnedTasks
from cortex.wire.node.protocol import ModelState

from ...waiting import WAIT_S, until
from ..fake_neuron import GB, FakeNeuron

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


async def test_models_have_states_and_are_loaded_and_unloaded(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    node = await neurons("beast", sizes={"a": GB, "b": GB}, states={"a": ModelState.READY})
    client = await start_gateway(node)
    status, listed = await client.get("/models")
    assert status == 200
    assert {each["id"]: each["status"]["value"] for each in listed["data"]} == {"a": "loaded", "b": "unloaded"}
    assert await client.post("/models/load", {"model": "b"}) == (200, {"success": True})
    await until(lambda: node.states.get("b") is ModelState.READY)
    assert await client.post("/models/unload", {"model": "a"}) == (200, {"success": True})
    await until(lambda: [each.model_id for each in node.unload_requests] == ["a"])
    _, props = await client.get("/props?model=a")
    assert (props["default_generation_settings"]["n_ctx"], props["model_alias"]) == (32768, "a")
    assert (await client.get("/props"))[1]["role"] == "router"
    assert (await client.post("/models/load", {"model": "none"}))[0] == 404


async def test_running_models_are_those_in_memory_that_the_key_may_use(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    states = {"a": ModelState.READY, "b": ModelState.READY, "c": ModelState.COLD}
    node = await neurons("beast", sizes=dict.fromkeys("abc", GB), states=states)
    every, limited = generate("every"), generate("limited", models=("b",))
    specs = (ModelSpec(id="a", ttl_s=60, display_name="A", unlisted=True),)
    keys = (every.section, limited.section)
    client = await start_gateway(node, catalogue=Catalogue(models=specs), keys=keys)
    _, found = await client.get("/running", Authorization=f"Bearer {every.text}")
    assert [(each["model"], each["state"], each["ttl"], each["name"]) for each in found["running"]] == [
        ("a", "ready", 60, "A"),
        ("b", "ready", 0, ""),
    ]
    _, found = await client.get("/running", Authorization=f"Bearer {limited.text}")
    assert [each["model"] for each in found["running"]] == ["b"]
    assert (await client.get("/running"))[0] == 401


async def test_model_is_loaded_until_its_unload_has_ended_and_is_loaded_again_then(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    node = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}, unload_gate=asyncio.Event())
    client = await start_gateway(node)

    def is_loaded(models: Any) -> bool:
        return [each["status"]["value"] for each in models["data"]] == ["loaded"]

    assert await client.post("/models/unload", {"model": "a"}) == (200, {"success": True})
    await until(lambda: node.unload_requests)
    assert is_loaded((await client.get("/models"))[1])
    assert await client.post("/models/load", {"model": "a"}) == (200, {"success": True})
    assert not node.load_requests
    node.unload_gate.set()
    await until(lambda: node.load_requests)
    await until(lambda: node.states.get("a") is ModelState.READY)
    await client.get_until("/models", is_loaded)


async def test_events_report_changes_of_states(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    node = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(node)
    async with client.session.get(client.url + "/models/sse") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        await client.post("/models/load", {"model": "a"})
        received = b""
        while b'"loaded"' not in received:
            received += await response.content.readany()
    events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: ")]
    assert [(event["model"], event["data"]["status"]) for event in events] == [("a", "loading"), ("a", "loaded")]


async def test_loads_need_an_operator(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    key = generate("user", models=("a",))
    node = await neurons("beast", sizes={"a": GB, "b": GB})
    client = await start_gateway(node, keys=(key.section,))
    bearer = {"authorization": f"Bearer {key.text}"}
    assert [each["id"] for each in (await client.get("/models", **bearer))[1]["data"]] == ["a"]
    assert (await client.post("/models/load", {"model": "a"}, **bearer))[0] == 403
    assert (await client.get("/props?model=b", **bearer))[0] == 404
    assert (await client.get("/models"))[0] == 401


async def test_token_routes_are_relayed_to_a_node_that_has_the_model(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def echo(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"path": request.path, "model": body["model"]})

    node = await neurons("beast", sizes={"a": GB}, respond=echo)
    client = await start_gateway(node)
    for path in ("/tokenize", "/detokenize", "/apply-template"):
        assert await client.post(path, {"model": "a:latest", "content": "x"}) == (200, {"path": path, "model": "a"})


async def test_unload_by_get_spares_pinned_models_and_needs_no_browser(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    states = {"a": ModelState.READY, "b": ModelState.READY}
    beast = await neurons("beast", sizes={"a": GB, "b": GB}, states=states)
    foreign = await neurons("cloud", sizes={"far": GB}, states={"far": ModelState.READY})
    pinned = Catalogue(models=(ModelSpec(id="b", load="pinned"),))
    client = await start_gateway(beast, foreign=(foreign,), catalogue=pinned)
    await until(lambda: "far" in client.gateway.dispatcher.fleet.live_models())
    async with client.session.get(client.url + "/unload", headers={"user-agent": "Mozilla/5.0"}) as response:
        assert response.status == 403
    async with client.session.get(client.url + "/unload") as response:
        assert (response.status, await response.text()) == (200, "OK")
    await until(lambda: beast.states["a"] is not ModelState.READY)
    assert beast.states["b"] is ModelState.READY
    _, audit = await client.get("/fleet/audit")
    assert {(each["action"], each["status"]) for each in audit["entries"]} == {
        ("GET /unload", 200),
        ("GET /unload", 403),
    }


async def test_models_of_a_profile_are_loaded_together(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB, "b": GB, "c": GB})
    client = await start_gateway(beast, catalogue=Catalogue(profiles={"coding": ("a", "b")}))
    status, body = await client.post("/fleet/profiles/coding/load", {})
    assert (status, [each["model"] for each in body["models"]]) == (202, ["a", "b"])
    await until(lambda: {each for each, state in beast.states.items() if state is ModelState.READY} == {"a", "b"})
    status, body = await client.post("/fleet/profiles/play/load", {})
    assert (status, "there are coding" in body["error"]["message"]) == (404, True)


async def test_models_of_a_profile_that_cannot_be_loaded_do_not_keep_the_others_from_it(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"huge": 900 * GB, "a": GB})
    client = await start_gateway(beast, catalogue=Catalogue(profiles={"coding": ("huge", "a")}))
    status, body = await client.post("/fleet/profiles/coding/load", {})
    jobs = {each["model"]: each["job"] for each in body["models"]}
    assert (status, jobs["huge"]["state"], jobs["huge"]["error"]["code"]) == (202, "failed", "insufficient_capacity")
    assert "huge" in jobs["huge"]["error"]["message"]
    await until(lambda: beast.states.get("a") is ModelState.READY)


async def test_logs_have_the_events_of_the_fleet_and_follow_them(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB, "b": GB})
    client = await start_gateway(beast)
    await client.chat("a")
    async with client.session.get(client.url + "/logs/stream/proxy?no-history") as stream:
        await client.chat("b")
        while b"model loaded" not in (line := await stream.content.readline()):
            pass
        assert b"model=b" in line
    async with client.session.get(client.url + "/logs") as response:
        assert "model loaded model=a" in (await response.text()).replace("node=beast ", "")


async def test_stream_of_logs_keeps_what_a_slow_client_has_not_read(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    class SlowExchange:
        request = Request(b"GET", b"/logs/stream/proxy", b"", (), b"", "client")
        closed, written = False, b""

        def __init__(self) -> None:
            self.num_looks = 0

        @property
        def paused(self) -> bool:
            self.num_looks += 1
            return self.num_looks < 5

        def write(self, data: bytes) -> None:
            self.written += data
            self.closed = True

    client = await start_gateway(await neurons("beast", sizes={"a": GB}))
    await client.chat("a")
    slow, gateway = SlowExchange(), client.gateway
    api = ApiServices(gateway.dispatcher, {}, gateway._metering, OwnedTasks(), DeferredResponses())  # noqa: SLF001
    routes = ModelServerRoutes(api, gateway.event_log, follow_s=0.01)
    async with asyncio.timeout(WAIT_S):
        await routes._follow(slow, "proxy", None, has_history=True)  # type: ignore[arg-type]  # noqa: SLF001
    assert b"model loaded" in slow.written
