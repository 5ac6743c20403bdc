"""A key with `models` sees these models, and nothing else of the fleet, whichever route it asks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cortex.gateway.api.live.public_view import FleetView
from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.wire.node.bench import BenchResult, BenchStatus
from cortex.wire.node.protocol import ModelLoad, ModelState

from ..fake_neuron import GB, StartNeuron
from ..started_gateway import Client, StartGateway

SECRETS = ("attic-7", "cellar-9", "Fake 3090", "secret", "/srv/")
"""Nodes, their devices, models of others, and files."""
VALUES = {"name": "mine", "model": "mine", "node": "attic-7", "source": "org/mine", "target": "mine/v1/models"}
STREAMS = re.compile(r"/events$|/stream\b|/sse$")

OPERATOR = generate("operator", operator=True)
USER = generate("user", models=("mine*",))
MEMBER = generate("member", group="lab")


@pytest.fixture
async def client(neurons: StartNeuron, start_gateway: StartGateway) -> Client:
    """A gateway over two nodes, on which models were loaded, evicted and failed."""
    faults = [(502, "load_failed", "no /srv/secret")] * 9
    states = {"mine": ModelState.READY, "secret-1": ModelState.READY}
    attic = await neurons("attic-7", sizes={"mine": GB, "mine-2": 22 * GB, "secret-1": 20 * GB}, states=states)
    cellar = await neurons("cellar-9", sizes={"secret-2": GB, "mine-3": GB}, load_faults=faults)
    sections = (OPERATOR.section, USER.section, MEMBER.section)
    client = await start_gateway(attic, cellar, keys=sections, groups=(GroupSection(name="lab", models=("mine*",)),))
    for model in ("mine", "mine-2", "mine-3", "secret-2"):
        await client.post("/v1/chat/completions", {"model": model, "messages": []}, **bearer(OPERATOR.text))
    return client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def routes_of(index: Any) -> list[str]:
    """Every path that `GET /` lists for reading, with values for its parameters, but those that stream."""
    paths = [path for path, methods in index["routes"].items() if "GET" in methods and not STREAMS.search(path)]
    return [re.sub(r"{(\w+)}", lambda name: VALUES.get(name[1], "none"), path) for path in paths]


@pytest.mark.parametrize("key", [USER.text, MEMBER.text], ids=["own models", "models of its group"])
async def test_no_route_shows_nodes_devices_or_other_models_to_a_key_with_models(client: Client, key: str) -> None:
    _, index = await client.get("/", **bearer(key))
    routes = routes_of(index)
    assert {"/fleet/status", "/fleet/decisions", "/fleet/explain/mine", "/v1/models", "/fleet/models/mine/log"} <= set(
        routes
    )
    extra = ("/v1/models/mine", "/fleet/explain/mine?node=attic-8", "/fleet/usage?by=node", "/fleet/hub/org/mine")
    for path in (*routes, *extra, "/fleet/activity/running", "/api/tags", "/fleet/explain/secret-1"):
        async with client.session.get(client.url + path, headers=bearer(key)) as response:
            body = await response.text()
        asked = [value for value in (*VALUES.values(), "secret-1") if value in path]
        assert not [each for each in SECRETS if each in body and not any(each in value for value in asked)], path


async def test_key_with_models_sees_their_state_memory_and_history(client: Client) -> None:
    _, fleet = await client.get("/fleet/status", **bearer(USER.text))
    (node,) = fleet["nodes"]
    states = {model["id"]: model["state"] for model in node["models"]}
    assert states.keys() | set(node["cold_models"]) == {"mine", "mine-2", "mine-3"}
    assert states["mine-2"] == "ready"
    assert (node["devices"], node["disk"], node["up"]) == ([], None, True)
    _, listed = await client.get("/v1/models", **bearer(USER.text))
    loaded = next(model for model in listed["data"] if model["id"] == "mine-2")
    assert [place["status"] for place in loaded["locations"]] == ["ready"]
    assert loaded["feasible_on"] == [node["name"]]
    _, found = await client.get("/fleet/decisions", **bearer(USER.text))
    assert {each["model"] for each in found["decisions"]} <= {"mine", "mine-2", "mine-3"}
    kinds = {(event["model"], event["kind"]) for event in found["events"]}
    assert {("mine-2", "load_started"), ("mine-2", "model_loaded"), ("mine-3", "load_failed")} <= kinds


async def test_model_on_several_nodes_is_shown_once_and_without_its_speed(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    load = ModelLoad(running=2, waiting=3, waiting_by_class={"default": 2, "flex": 1}, kv_used_fraction=0.5)
    result = BenchResult(measured_at=1.0, version="0", flops=7e14)
    nodes = []
    for name, state in (("attic-7", ModelState.LOADING), ("cellar-9", ModelState.READY), ("beast", ModelState.READY)):
        node = await neurons(name, sizes={"mine": GB}, states={"mine": state})
        node.loads["mine"] = load
        node.bench = BenchStatus(model_id="mine", state="done", result=result)
        nodes.append(node)
    client = await start_gateway(*nodes, keys=(OPERATOR.section, USER.section))
    _, fleet = await client.get("/fleet/status", **bearer(OPERATOR.text))
    assert [model["bench"]["flops"] for node in fleet["nodes"] for model in node["models"]] == [7e14] * 3
    for node_status in fleet["nodes"]:
        node_status["models"][0] |= {"host_bytes": GB, "host_splits": {"splits": [], "is_measured": True}}
    (seen,) = FleetView(is_operator=False, key=USER.section).nodes(fleet["nodes"])
    assert (seen["models"][0]["host_bytes"], seen["models"][0]["host_splits"]) == (0, None)
    _, fleet = await client.get("/fleet/status", **bearer(USER.text))
    (model,) = fleet["nodes"][0]["models"]
    assert (model["state"], model["bench"], model["load"]["running"]) == ("ready", None, 6)
    assert (model["load"]["waiting"], model["load"]["waiting_by_class"]) == (9, {"default": 6, "flex": 3})
    _, listed = await client.get("/v1/models", **bearer(USER.text))
    (place,) = listed["data"][0]["locations"]
    assert (place["status"], place["node"]) == ("ready", "fleet")


@pytest.mark.parametrize(("key", "node"), [(USER, None), (MEMBER, None), (OPERATOR, "attic-7")])
async def test_response_to_a_key_with_models_does_not_name_its_node(
    client: Client, key: NewKey, node: str | None
) -> None:
    path, body = "/v1/chat/completions", {"model": "mine", "messages": []}
    async with client.session.post(client.url + path, json=body, headers=bearer(key.text)) as response:
        assert (response.status, response.headers.get("x-cortex-node")) == (200, node)


async def test_feed_of_a_key_with_models_has_no_nodes(client: Client) -> None:
    async with client.session.get(client.url + "/fleet/events?nodes=1", headers=bearer(USER.text)) as response:
        seen = await response.content.readuntil(b"event: fleet")
        for model, kind in (("secret-1", b"unload_started"), ("mine-2", b"model_loaded")):
            await client.post("/v1/chat/completions", {"model": model, "messages": []}, **bearer(OPERATOR.text))
            seen += await response.content.readuntil(b"event: " + kind)
            seen += await response.content.readuntil(b"event: fleet")
        seen += await response.content.readuntil(b"\n\n")
    assert b"event: node" not in seen
    assert not [each for each in SECRETS if each.encode() in seen]


async def test_operator_gets_what_happened_with_the_decisions(client: Client) -> None:
    _, found = await client.get("/fleet/decisions", **bearer(OPERATOR.text))
    kinds = [(event["kind"], event.get("model"), event["node"]) for event in found["events"]]
    assert {("node_up", None, "attic-7"), ("node_up", None, "cellar-9")} <= set(kinds)
    assert kinds.index(("model_loaded", "mine-2", "attic-7")) < kinds.index(("load_started", "mine-2", "attic-7"))
    failed = next(event for event in found["events"] if event["kind"] == "load_failed")
    assert "/srv/secret" in failed["why"]
    _, found = await client.get("/fleet/decisions?model=mine-2", **bearer(OPERATOR.text))
    assert {event["model"] for event in found["events"]} == {"mine-2"}
