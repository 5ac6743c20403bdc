"""Measurements of models as jobs: where they run, what they find, how they end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cortex.wire.node.bench import BenchRequest, BenchResult, BenchStatus, StreamRate
from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..fake_neuron import GB
from ..started_gateway import Client

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

READY = ModelState.READY
RESULT = BenchResult(measured_at=1.0, version="0", streams=(StreamRate(streams=1, tokens_per_s=70.0, share=0.5),))
DONE = BenchStatus(model_id="a", state="done", result=RESULT)


async def ended(client: Client, job_id: str) -> dict[str, Any]:
    return dict(await client.get_until(f"/fleet/jobs/{job_id}", lambda job: job["state"] != "running"))


async def test_measures_a_model_where_it_is_ready_and_shows_the_result(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    attic = await neurons("attic", sizes={"a": GB}, states={"a": READY})
    cold = await neurons("cold", sizes={"a": GB})
    client = await start_gateway(beast, attic, cold)
    status, body = await client.post("/fleet/models/a/bench", {"wait": False, "reload": False})
    assert (status, sorted(body["nodes"]), body["job"]["kind"]) == (202, ["attic", "beast"], "bench")
    await until(lambda: beast.bench_requests and attic.bench_requests)
    assert beast.bench_requests == [BenchRequest(model_id="a", reload=False)]
    job = await client.get_until(f"/fleet/jobs/{body['job']['id']}", lambda job: job["stage"] == "8 streams")
    assert (job["results"], job["can_cancel"]) == ({}, True)
    beast.bench = attic.bench = DONE
    job = await ended(client, body["job"]["id"])
    assert job["state"] == "done"
    assert {node: found["streams"][0]["tokens_per_s"] for node, found in job["results"].items()} == {
        "attic": 70.0,
        "beast": 70.0,
    }
    assert not cold.bench_requests
    explained = await client.get_until("/fleet/explain/a", lambda found: any(node["bench"] for node in found["nodes"]))
    nodes = {node["node"]: node for node in explained["nodes"]}
    assert nodes["beast"]["bench"]["streams"][0]["share"] == 0.5
    assert nodes["cold"]["bench"] is None


async def test_loads_a_model_that_is_ready_nowhere_and_reports_a_failure(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    _, body = await client.post("/fleet/models/a/bench", {"wait": False, "node": "beast", "force": True})
    await until(lambda: beast.load_requests)
    assert not beast.bench_requests
    beast.load_gate.set()
    await until(lambda: beast.bench_requests)
    assert beast.bench_requests == [BenchRequest(model_id="a", force=True)]
    beast.bench = BenchStatus(model_id="a", state="failed", reason="it was unloaded", code="overloaded")
    job = await ended(client, body["job"]["id"])
    assert (job["state"], job["results"]) == ("failed", {})
    assert "it was unloaded" in str(job["error"])


async def test_failure_on_one_node_leaves_the_others_to_their_end(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    attic = await neurons("attic", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, attic)
    _, body = await client.post("/fleet/models/a/bench", {"wait": False})
    await until(lambda: beast.bench_requests and attic.bench_requests)
    one, other = (beast, attic) if body["nodes"][0] == "beast" else (attic, beast)
    other.bench = BenchStatus(model_id="a", state="running", stage="wake")
    one.bench = BenchStatus(model_id="a", state="failed", reason="a has 2 requests", code="model_in_use")
    job = await client.get_until(f"/fleet/jobs/{body['job']['id']}", lambda job: job["stage"] == "wake")
    assert (job["state"], job["can_cancel"]) == ("running", True)
    other.bench = DONE
    job = await ended(client, body["job"]["id"])
    assert (job["state"], list(job["results"])) == ("failed", [other.name])
    assert job["error"] == {"code": "model_in_use", "message": f"on {one.name}: a has 2 requests"}


async def test_cancelled_measurement_ends_on_the_node_and_bad_orders_are_rejected(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    _, body = await client.post("/fleet/models/a/bench", {"wait": False})
    await until(lambda: beast.bench_requests)
    async with client.session.delete(f"{client.url}/fleet/jobs/{body['job']['id']}") as response:
        assert (response.status, (await response.json())["state"]) == (200, "cancelled")
    assert beast.bench == BenchStatus(model_id="a", state="cancelled")
    for name, wrong, status in (("none", {}, 404), ("a", {"node": "x"}, 404), ("a", {"fast": True}, 400)):
        assert (await client.post(f"/fleet/models/{name}/bench", wrong))[0] == status
