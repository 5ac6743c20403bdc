"""The audit log over the API: who did what, with which outcome, and who may read it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cortex.gateway.ledger.keys import NewKey, generate
from cortex.wire.node.protocol import ModelState, PullStatus

from ...waiting import until, until_response
from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


def bearer(key: NewKey) -> dict[str, str]:
    return {"authorization": f"Bearer {key.text}"}


async def test_actions_are_recorded_with_key_client_and_outcome(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    operator, user = generate("olga", operator=True), generate("ben")
    node = await neurons("node", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(node, keys=(operator.section, user.section))
    assert (await client.post("/fleet/models/a/unload", {"force": True}, **bearer(operator)))[0] == 200
    assert (await client.post("/fleet/nodes/node/drain", {}, **bearer(user)))[0] == 403
    assert (await client.post("/fleet/nodes/absent/drain", {}, **bearer(operator)))[0] == 404
    assert (await client.post("/fleet/nodes/node/drain", {}, authorization="Bearer nobody"))[0] == 401
    assert (await client.get("/fleet/status", **bearer(operator)))[0] == 200

    status, body = await client.get("/fleet/audit", **bearer(operator))
    assert status == 200
    entries: list[dict[str, Any]] = body["entries"][::-1]
    assert [(entry["key_name"], entry["action"], entry["status"]) for entry in entries] == [
        ("olga", "POST /fleet/models/a/unload", 200),
        ("ben", "POST /fleet/nodes/node/drain", 403),
        ("olga", "POST /fleet/nodes/absent/drain", 404),
    ]
    assert entries[0]["client"] == "127.0.0.1"
    assert "force" in entries[0]["detail"]
    assert entries[0]["key_id"] == operator.section.id
    assert len((await client.get("/fleet/audit?limit=1&key=ben", **bearer(operator)))[1]["entries"]) == 1
    assert (await client.get(f"/fleet/audit?since={entries[-1]['at'] + 60}", **bearer(operator)))[1] == {"entries": []}
    assert (await client.get("/fleet/audit", **bearer(user)))[0] == 403


async def test_dry_runs_are_no_changes(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    operator, user = generate("olga", operator=True), generate("ben")
    node = await neurons("node", sizes={"a": GB, "b": GB}, states={"a": ModelState.READY})
    client = await start_gateway(node, keys=(operator.section, user.section))
    for model, order in (("a", "unload"), ("b", "load"), ("b", "pin")):
        body = {"dry_run": True}
        assert (await client.post(f"/fleet/models/{model}/{order}", body, **bearer(operator)))[0] == 200
    for model, order, status in (("nosuch", "load", 404), ("b", "unload", 404), ("b", "unpin", 400)):
        assert (await client.post(f"/fleet/models/{model}/{order}", body, **bearer(operator)))[0] == status
    assert (await client.post("/fleet/models/b/load", {"dry_run": True}, **bearer(user)))[0] == 403
    entries = (await client.get("/fleet/audit", **bearer(operator)))[1]["entries"]
    assert [(entry["key_name"], entry["status"]) for entry in entries] == [("ben", 403)], "rejected attempts are kept"


async def test_orders_of_clients_that_disconnect_are_recorded(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    node = await neurons("node", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(node)
    _, load = await client.post("/fleet/models/a/load", {"wait": False})
    await until(lambda: node.load_requests)
    job = f"/fleet/jobs/{load['job']['id']}"
    cancelling = asyncio.create_task(client.session.delete(client.url + job))
    pulling = asyncio.create_task(client.post("/api/pull", {"model": "org/new", "stream": False}))
    await until(lambda: node.unload_requests and node.pull_requests)
    for task in (cancelling, pulling):
        task.cancel()
        await asyncio.wait([task])
    await client.get("/health")
    node.load_gate.set()
    node.pull = PullStatus(model_id="org/new", state="done")
    await until(lambda: client.gateway.dispatcher.explain("a").action == "load")

    async def recorded() -> set[str]:
        return {entry["action"] for entry in (await client.get("/fleet/audit"))[1]["entries"]}

    await until_response(recorded, {f"DELETE {job}", "POST /api/pull"}.issubset)


async def test_open_gateway_records_its_orders(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(await neurons("node", sizes={"a": GB}, states={"a": ModelState.READY}))
    assert (await client.post("/fleet/nodes/node/drain", {}))[0] == 200
    (entry,) = (await client.get("/fleet/audit"))[1]["entries"]
    assert (entry["key_name"], entry["key_id"], entry["status"]) == ("anonymous", "", 200)
