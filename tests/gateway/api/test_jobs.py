"""Orders as jobs: watched, cancelled and tried without effect; downloads; pins and drained nodes that last."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.rules import EvictionRules
from cortex.gateway.config import Config
from cortex.gateway.ledger.keys import generate
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.orders import HubRepository, HubVariant
from cortex.wire.node.protocol import ModelState, PullStatus

from ...waiting import until
from ..fake_neuron import GB
from ..started_gateway import Client

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


READY = ModelState.READY


async def call(client: Client, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else msgspec.json.encode(body)
    async with client.session.request(method, client.url + path, data=data, headers=headers) as response:
        return response.status, await response.json()


async def ended(client: Client, job_id: str) -> dict[str, Any]:
    return dict(await client.get_until(f"/fleet/jobs/{job_id}", lambda job: job["state"] != "running"))


async def test_load_without_waiting_is_a_job_with_progress(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    status, body = await client.post("/fleet/models/a/load", {"wait": False})
    assert (status, body["nodes"], body["job"]["state"]) == (202, ["beast"], "running")
    await until(lambda: beast.load_requests)
    _, listed = await client.get("/fleet/jobs")
    assert [(job["kind"], job["model"], job["stage"]) for job in listed["jobs"]] == [("load", "a", "loading")]
    beast.load_gate.set()
    job = await ended(client, body["job"]["id"])
    assert (job["state"], job["error"], job["can_cancel"]) == ("done", None, False)
    assert (await client.get("/fleet/jobs/unknown"))[0] == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("models/a/load", {"nod": "beast"}),
        ("models/a/unpin", {"dry_run": True}),
        ("nodes/beast/drain", {"dry_run": True}),
        ("nodes/beast/undrain", {"node": "beast"}),
    ],
)
async def test_order_with_an_option_that_it_does_not_have_changes_nothing(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, body: dict[str, Any]
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast)
    status, rejection = await client.post(f"/fleet/{path}", body)
    assert (status, rejection["error"]["code"]) == (400, "invalid_value")
    assert not beast.load_requests
    assert (await client.get("/ready"))[0] == 200


async def test_cancelled_load_ends_on_the_node_and_is_not_a_failure(
    neurons: StartNeuron, start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    _, body = await client.post("/fleet/models/a/load", {"wait": False})
    await until(lambda: beast.load_requests)
    cancel = asyncio.create_task(call(client, "DELETE", f"/fleet/jobs/{body['job']['id']}"))
    await until(lambda: beast.unload_requests)
    assert beast.unload_requests[0].force
    beast.load_gate.set()
    status, job = await cancel
    assert (status, job["state"]) == (200, "cancelled")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
    assert "load cancelled" in caplog.messages
    _, explained = await client.get("/fleet/explain/a")
    assert explained["action"] != "reject", "the model may be loaded again at once"
    await until(lambda: client.gateway.dispatcher.explain("a").action == "load")
    assert (await client.post("/fleet/models/a/load"))[0] == 200


async def test_cancel_ends_a_load_that_another_gateway_ordered(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.LOADING})
    client = await start_gateway(beast)
    _, body = await client.post("/fleet/models/a/load", {"wait": False})
    assert body["job"]["state"] == "running", "it joins that load"
    status, job = await call(client, "DELETE", f"/fleet/jobs/{body['job']['id']}")
    assert (status, job["state"]) == (200, "cancelled")
    assert not beast.load_requests
    assert beast.states["a"] is ModelState.COLD


async def test_load_that_waits_for_an_unload_of_its_model_can_be_cancelled(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, unload_gate=asyncio.Event())
    client = await start_gateway(beast)
    await client.post("/fleet/models/a/unload", {"wait": False})
    status, body = await client.post("/fleet/models/a/load", {"wait": False})
    assert (status, body["job"]["state"], body["job"]["stage"]) == (202, "running", "unloading")
    cancel = asyncio.create_task(call(client, "DELETE", f"/fleet/jobs/{body['job']['id']}"))
    await until(lambda: beast.unload_requests)
    beast.unload_gate.set()
    assert (await cancel)[1]["state"] == "cancelled"
    assert not beast.load_requests
    assert (await client.post("/fleet/models/a/load"))[0] == 200


async def test_model_that_another_gateway_unloads_is_not_said_to_lack_room(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.UNLOADING})
    client = await start_gateway(beast)
    status, body = await client.post("/fleet/models/a/load")
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert "beast cannot load a now: unloading for" in body["error"]["message"]


async def test_load_that_waits_for_an_eviction_is_cancelled_before_it_begins(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": 20 * GB, "b": 20 * GB}, states={"a": READY}, unload_gate=asyncio.Event())
    client = await start_gateway(beast)
    _, body = await client.post("/fleet/models/b/load", {"wait": False})
    await until(lambda: beast.unload_requests)
    assert body["job"]["stage"] == "unloading a"
    status, job = await call(client, "DELETE", f"/fleet/jobs/{body['job']['id']}")
    assert (status, job["state"]) == (200, "cancelled")
    beast.unload_gate.set()
    await until(lambda: beast.states["a"] is not READY)
    assert not beast.load_requests


async def test_dry_run_shows_what_would_be_evicted_and_changes_nothing(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": 20 * GB, "b": 20 * GB}, states={"a": READY})
    client = await start_gateway(beast)
    for order in ("load", "pin"):
        status, body = await client.post(f"/fleet/models/b/{order}", {"dry_run": True})
        assert (status, body["dry_run"], body["action"], body["victims"]) == (200, True, "load", ["a"])
    status, body = await client.post("/fleet/models/a/unload", {"dry_run": True})
    assert (body["nodes"], body["in_flight"], body["pinned_on"]) == (["beast"], {"beast": 0}, [])
    assert not beast.load_requests
    assert not beast.unload_requests
    assert (await client.get("/fleet/jobs"))[1]["jobs"] == []


async def test_pinned_model_is_unloaded_only_when_that_is_confirmed(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    assert (await client.post("/fleet/models/a/pin"))[0] == 200
    status, body = await client.post("/fleet/models/a/unload")
    assert (status, body["error"]["code"]) == (409, "model_in_use")
    assert beast.states["a"] is READY
    assert (await client.post("/fleet/models/a/unload", {"unpin": True}))[0] == 200
    assert beast.states["a"] is ModelState.COLD
    client.gateway.dispatcher.tick()
    assert not beast.load_requests, "it is not pinned any more"


async def test_pin_whose_load_fails_is_not_kept(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_faults=[(502, "load_failed", "corrupt file")])
    client = await start_gateway(beast)
    status, body = await client.post("/fleet/models/a/pin")
    assert (status, body["error"]["message"]) == (502, "corrupt file")
    assert client.gateway.dispatcher.pins == frozenset()


async def test_status_says_who_pins_a_model_and_whether_a_node_lets_models_sleep(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    sizes = {"a": GB, "b": GB, "c": GB}
    beast = await neurons("beast", sizes=sizes, states=dict.fromkeys(sizes, READY))
    attic = await neurons("attic", sizes=sizes, states=dict.fromkeys(sizes, READY), can_sleep=False)
    catalogue = Catalogue(models=(ModelSpec(id="a", pinned_on=("beast",)), ModelSpec(id="b")))
    client = await start_gateway(beast, attic, catalogue=catalogue)
    await client.post("/fleet/models/b/pin", {"node": "attic"})
    _, fleet = await client.get("/fleet/status")
    pins = {(node["name"], model["id"]): model["pinned_by"] for node in fleet["nodes"] for model in node["models"]}
    assert {place: by for place, by in pins.items() if by} == {
        ("beast", "a"): "catalogue",
        ("attic", "b"): "operator",
    }
    assert all(model["pinned"] is bool(model["pinned_by"]) for node in fleet["nodes"] for model in node["models"])
    assert {node["name"]: node["can_sleep"] for node in fleet["nodes"]} == {"beast": True, "attic": False}


async def test_sampling_of_the_catalogue_reaches_the_node_and_is_shown(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    catalogue = Catalogue(models=(ModelSpec(id="a", sampling=SamplingDefaults(temperature=0.2)),))
    client = await start_gateway(beast, catalogue=catalogue)
    assert (await client.get("/v1/models/a"))[1]["sampling"] == {"temperature": 0.2}
    await client.post("/fleet/models/a/load")
    assert beast.load_requests[0].sampling == SamplingDefaults(temperature=0.2)
    beast.sampling["a"] = SamplingDefaults(temperature=0.2, top_k=40)
    await client.get_until("/v1/models/a", lambda model: model["sampling"] == {"temperature": 0.2, "top_k": 40})


async def test_pin_and_drain_survive_a_restart(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    other = await neurons("other", sizes={"b": GB}, states={"b": READY})
    first = await start_gateway(beast, other, rules=EvictionRules(fair_wait_s=0.1))
    assert (await first.post("/fleet/models/a/pin", {"node": "beast"}))[1]["nodes"] == ["beast"]
    assert (await first.post("/fleet/nodes/other/drain"))[1] == {"node": "other", "drained": True}
    assert (await first.chat("b"))[0] != 200, "a drained node gets no requests"
    await first.gateway.close()
    beast.states["a"] = ModelState.COLD  # the node has restarted
    second = await start_gateway(beast, other)
    await until(lambda: second.gateway.dispatcher.is_ready("a", "beast"))
    _, fleet = await second.get("/fleet/status")
    assert [(node["name"], node["drained"]) for node in fleet["nodes"]] == [("beast", False), ("other", True)]
    assert [model["pinned"] for model in fleet["nodes"][0]["models"]] == [True]
    await second.post("/fleet/nodes/other/undrain")
    assert (await second.chat("b"))[0] == 200
    assert (await second.post("/fleet/nodes/nowhere/drain"))[0] == 404


async def test_pins_and_drained_nodes_are_stored_when_the_order_is_confirmed(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)

    def stored(table: str) -> list[tuple[str, ...]]:
        with closing(sqlite3.connect(Config().database(tmp_path))) as database:
            return database.execute(f"SELECT * FROM {table}").fetchall()

    for order, table, expected in (
        ("models/a/pin", "pin", [("beast", "a")]),
        ("models/a/unpin", "pin", []),
        ("nodes/beast/drain", "drained", [("beast",)]),
        ("nodes/beast/undrain", "drained", []),
    ):
        assert (await client.post(f"/fleet/{order}"))[0] == 200
        assert stored(table) == expected, order


async def test_pull_is_a_job_on_the_node_with_room(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    small = await neurons("small", free_disk_bytes=10)
    large = await neurons("large", free_disk_bytes=900)
    client = await start_gateway(small, large)
    status, body = await client.post("/fleet/pull", {"model": "org/new:Q4_K_M"})
    assert (status, body["job"]["node"], body["job"]["kind"]) == (202, "large", "pull")
    await until(lambda: large.pull_requests)
    assert (large.pull_requests[0].model_id, large.pull_requests[0].quant) == ("org/new", "Q4_K_M")
    job = await client.get_until(f"/fleet/jobs/{body['job']['id']}", lambda job: job["done_bytes"] is not None)
    assert [job[name] for name in ("stage", "done_bytes", "total_bytes", "eta_s")] == ["download", 30, 100, 7.0]
    large.pull = PullStatus(model_id="org/new", state="done")
    assert (await ended(client, job["id"]))["state"] == "done"


async def test_pull_is_cancelled_fails_with_the_reason_and_needs_a_known_name(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast")
    catalogue = Catalogue(models=(ModelSpec(id="mine", source="org/repo", quant="q8"),))
    client = await start_gateway(beast, catalogue=catalogue)
    _, body = await client.post("/fleet/pull", {"model": "mine", "node": "beast"})
    await until(lambda: beast.pull_requests)
    wanted = beast.pull_requests[0]
    assert (wanted.model_id, wanted.source, wanted.quant) == ("mine", "org/repo", "q8")
    status, job = await call(client, "DELETE", f"/fleet/jobs/{body['job']['id']}")
    assert (status, job["state"]) == (200, "cancelled")
    _, body = await client.post("/fleet/pull", {"model": "mine"})
    await until(lambda: len(beast.pull_requests) == 2)
    beast.pull = PullStatus(model_id="mine", state="failed", reason="no such quantisation")
    job = await ended(client, body["job"]["id"])
    assert (job["state"], job["error"]["message"]) == ("failed", "no such quantisation")
    for wrong, status in (({"model": "none"}, 404), ({"model": "a/b", "node": "x"}, 404), ({"modell": "a"}, 400)):
        assert (await client.post("/fleet/pull", wrong))[0] == status


async def test_pull_to_several_nodes_ends_with_the_last_and_names_each_that_failed(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    nodes = [await neurons(name) for name in ("full", "fine", "lost")]
    client = await start_gateway(*nodes)
    ends = [
        PullStatus(model_id="org/new", state="failed", reason="no room"),
        PullStatus(model_id="org/new", state="done"),
        PullStatus(model_id="org/new", state="failed", reason="gone"),
    ]
    _, body = await client.post("/fleet/pull", {"model": "org/new", "nodes": ["full", "fine", "lost"]})
    for node, end in zip(nodes, ends, strict=True):
        await until(lambda: node.pull_requests)  # noqa: B023
        node.pull = end
    job = await ended(client, body["job"]["id"])
    assert (job["state"], job["error"]["message"]) == ("failed", "on full: no room; on lost: gone")


async def test_files_are_deleted_on_one_node_and_disk_use_is_shown(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"org/a": GB, "b": GB}, states={"b": READY})
    client = await start_gateway(beast)
    status, body = await call(client, "DELETE", "/fleet/nodes/beast/files/org/a")
    assert (status, body) == (200, {"node": "beast", "model": "org/a", "freed_bytes": 1234})
    status, body = await call(client, "DELETE", "/fleet/nodes/beast/files/b")
    assert (status, body["error"]["code"]) == (409, "model_in_use")
    _, fleet = await client.get("/fleet/status")
    assert fleet["nodes"][0]["disk"]["free_bytes"] == 500


async def test_hub_offer_has_sizes_and_where_each_would_fit(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    offer = HubRepository(
        repository="org/new",
        commit="c0ffee",
        variants=(
            HubVariant(quant="Q4_K_M", num_bytes=9 * GB, num_files=1),
            HubVariant(quant=None, num_bytes=30 * GB, num_files=4),
        ),
    )
    beast = await neurons("beast", sizes={"b": 20 * GB}, states={"b": READY}, free_disk_bytes=20 * GB)
    attic = await neurons("attic", hub={"org/new@v2": offer})
    client = await start_gateway(beast, attic)
    status, body = await client.get("/fleet/hub/org/new@v2:Q4_K_M?node=attic")
    assert (status, body["repository"], body["asked"]) == (200, "org/new", "attic")
    small, large = body["variants"]
    assert (small["quant"], small["bytes"], large["quant"], large["num_files"]) == ("Q4_K_M", 9 * GB, None, 4)
    verdicts = [{place["node"]: place["verdict"] for place in each["nodes"]} for each in (small, large)]
    assert verdicts[0] == {"attic": "fits", "beast": "fits_after_eviction"}
    assert verdicts[1] == {"attic": "too_small", "beast": "too_small"}
    assert {place["node"]: place["fits_on_disk"] for place in small["nodes"]} == {"attic": False, "beast": True}
    status, body = await client.get("/fleet/hub/org/none?node=attic")
    assert (status, body["error"]["message"]) == (404, "attic: the hub has no such repository")
    await attic.stop()
    status, body = await client.get("/fleet/hub/org/new?node=attic")
    assert (status, body["error"]["code"]) == (502, "upstream_unavailable")
    for wrong, status in (("none", 404), ("org/new?node=x", 404)):
        assert (await client.get(f"/fleet/hub/{wrong}"))[0] == status


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/fleet/pull"),
        ("GET", "/fleet/hub/org/new"),
        ("GET", "/fleet/jobs"),
        ("DELETE", "/fleet/nodes/beast/files/a"),
        ("POST", "/fleet/nodes/beast/drain"),
    ],
)
async def test_only_operators_may_give_orders(
    neurons: StartNeuron, start_gateway: StartGateway, method: str, path: str
) -> None:
    anna = generate("anna")
    client = await start_gateway(await neurons("beast"), keys=(anna.section,))
    status, body = await call(client, method, path, {"model": "a/b"}, Authorization=f"Bearer {anna.text}")
    assert (status, body["error"]["code"]) == (403, "operator_only")
    assert (await call(client, method, path))[0] == 401
