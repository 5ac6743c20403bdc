"""Health says what is true: what is down, why, and whether a request could be served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.topology import Node
from cortex.gateway.api.health import GatewayHealth
from cortex.gateway.config import Config
from cortex.gateway.ledger.keys import generate
from cortex.system.tasks import Supervisor
from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


READY = ModelState.READY


async def test_ready_while_a_node_takes_requests_and_degraded_while_one_does_not(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    near = await neurons("near", sizes={"a": GB}, states={"a": READY})
    far = await neurons("far", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(near, far)
    status, body = await client.get("/ready")
    assert (status, body["status"], body["ready"], body["reasons"]) == (200, "ok", True, [])

    await far.stop()
    await until(lambda: not client.gateway.dispatcher.is_ready("a", "far"))
    status, body = await client.get("/ready")
    assert (status, body["status"], body["ready"]) == (200, "degraded", True)
    (reason,) = body["reasons"]
    assert reason.startswith("node far is down: ")

    assert (await client.post("/fleet/nodes/near/drain"))[0] == 200
    status, body = await client.get("/ready")
    assert (status, body["ready"]) == (503, False)
    assert "node near takes no new requests" in body["reasons"]
    status, body = await client.get("/health")
    assert (status, body["status"], body["ready"]) == (200, "degraded", False), "the gateway itself runs"


async def test_degraded_while_the_database_cannot_be_used(start_gateway: StartGateway, tmp_path: Path) -> None:
    client = await start_gateway()
    Path(Config().database(tmp_path)).mkdir()
    reason = "the database cannot be used; usage and pins are kept in memory"
    body = await client.get_until("/health", lambda body: reason in body["reasons"])
    assert body["status"] == "degraded"


async def test_degraded_while_the_database_of_stored_responses_cannot_be_used(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    client = await start_gateway()
    file = Path(Config().responses_database(tmp_path))
    file.unlink(missing_ok=True)
    file.mkdir()
    assert (await client.get("/v1/responses/resp_1"))[0] == 503
    reasons = (await client.get("/health"))[1]["reasons"]
    assert "the database of responses cannot be used; responses are not stored" in reasons


async def test_gateway_without_nodes_is_not_ready(start_gateway: StartGateway) -> None:
    client = await start_gateway()
    status, body = await client.get("/ready")
    assert (status, body["status"], body["reasons"]) == (503, "degraded", ["no node is configured or found by DNS"])


async def test_only_operators_see_why_a_node_is_down(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    key = generate("alice")
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, keys=(key.section,))
    await beast.stop()
    await until(lambda: not client.gateway.dispatcher.is_ready("a", "beast"))
    for headers in ({}, {"Authorization": f"Bearer {key.text}"}):
        assert (await client.get("/health", **headers))[1]["reasons"] == ["a node is down"]


async def test_models_of_a_node_that_is_down_are_not_shown_as_ready(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    await beast.stop()
    await until(lambda: not client.gateway.dispatcher.is_ready("a", "beast"))
    (node,) = (await client.get("/fleet/status"))[1]["nodes"]
    assert (node["up"], [model["state"] for model in node["models"]]) == (False, ["unreachable"])
    (model,) = (await client.get("/v1/models"))[1]["data"]
    assert (model["loaded"], model["locations"][0]["status"]) == (False, "unreachable")


@pytest.mark.parametrize("is_known", [True, False], ids=["listed by the node", "rejected by the node"])
async def test_unload_clears_a_failed_model(neurons: StartNeuron, start_gateway: StartGateway, is_known: bool) -> None:
    sizes = {"a": GB} if is_known else {}
    beast = await neurons("beast", sizes=sizes, load_faults=[(502, "load_failed", "corrupt file")])
    client = await start_gateway(beast, catalogue=Catalogue(models=(ModelSpec(id="a"),)))

    async def shown() -> list[tuple[str, str]]:
        (node,) = (await client.get("/fleet/status"))[1]["nodes"]
        return [(model["id"], model["state"]) for model in node["models"]]

    assert (await client.post("/fleet/models/a/load", {"node": "beast"}))[0] == 502
    assert await shown() == [("a", "failed")]
    status, body = await client.post("/fleet/models/a/unload")
    assert (status, body["nodes"]) == (200, ["beast"])
    assert await shown() == []
    assert (await client.post("/fleet/models/a/unload"))[0] == 404
    beast.sizes["a"] = GB
    assert (await client.chat("a"))[0] == 200, "a request loads it again without waiting for the retry"


def test_reasons_without_names_are_given_once() -> None:
    down = [Node(name=name, healthy=False) for name in "ab"]
    drained = [Node(name=name, healthy=True, draining=True) for name in "cd"]
    body = GatewayHealth(Supervisor()).body([*down, *drained], for_operator=False)
    assert body["reasons"] == ["a node is down", "a node takes no new requests"]
