"""Operators' orders wake the nodes that they need."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cortex.fleet.sleeping import WakeRules
from cortex.wire.node.bench import BenchStatus
from cortex.wire.node.protocol import ModelState, PullStatus

from ...waiting import until
from ..fake_neuron import GB, FakeNeuron
from ..started_gateway import Client

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


class Box:
    """A node that sleeps, until its wake command has run."""

    def __init__(self, node: FakeNeuron, awake: FakeNeuron, client: Client, woken: Path) -> None:
        self.node, self.awake, self.client, self.woken = node, awake, client, woken

    async def wakes(self) -> None:
        """Starts the node once its wake command has run."""
        await until(self.woken.exists)
        self.woken.unlink()
        await self.node.start(self.node.port)

    async def sleeps(self) -> None:
        await self.node.stop()
        await self.client.get_until("/fleet/status", lambda body: self.sleep_of(body) == "asleep")

    def sleep_of(self, status: Any) -> str:
        return next(str(node["sleep"]) for node in status["nodes"] if node["name"] == self.node.name)


async def asleep(
    neurons: StartNeuron,
    start_gateway: StartGateway,
    tmp_path: Path,
    command: str = "touch",
    timeout_s: float = 120,
    on_disk: str = "b",
) -> Box:
    """`beast` has `a` ready, the files of another model, and sleeps; `small` is awake, and has nothing."""
    beast = await neurons(
        "beast",
        sizes={"a": GB, on_disk: GB},
        states={"a": ModelState.READY},
        quants_on_disk={on_disk: "q8_0"},
    )
    small = await neurons("small")
    woken = tmp_path / "woken"
    rules = WakeRules(command=(command, str(woken)), suspend_after_s=0, timeout_s=timeout_s)
    client = await start_gateway(beast, small, wakes={"beast": rules})
    box = Box(beast, small, client, woken)
    await box.sleeps()
    return box


async def call(client: Client, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else msgspec.json.encode(body)
    async with client.session.request(method, client.url + path, data=data) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("method", "path", "body", "done"),
    [
        ("POST", "/fleet/models/b/load", {}, "load_requests"),
        ("POST", "/fleet/models/b/load", {"node": "beast"}, "load_requests"),
        ("POST", "/fleet/models/a/unload", {}, "unload_requests"),
        ("POST", "/fleet/models/b/pin", {"node": "beast"}, "load_requests"),
        ("POST", "/fleet/models/a/pin", {"node": "beast"}, None),
        ("DELETE", "/fleet/nodes/beast/files/b", None, "delete_requests"),
        ("POST", "/fleet/forget", {"everything": True, "node": "beast"}, "forget_requests"),
        ("DELETE", "/fleet/models/a/size", None, None),
    ],
)
async def test_order_wakes_the_node_that_it_needs_and_waits(
    neurons: StartNeuron,
    start_gateway: StartGateway,
    tmp_path: Path,
    method: str,
    path: str,
    body: Any,
    done: str | None,
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path)
    order = asyncio.create_task(call(box.client, method, path, body))
    await box.wakes()
    status, reply = await order
    assert status == 200, reply
    assert "asleep" not in str(reply)
    assert done is None or getattr(box.node, done)
    if path.endswith("/pin"):
        assert box.client.gateway.dispatcher.pins


async def ended(box: Box, job_id: str) -> dict[str, Any]:
    return dict(await box.client.get_until(f"/fleet/jobs/{job_id}", lambda job: job["state"] != "running"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/fleet/models/b/load", {"wait": False}),
        ("/fleet/models/a/unload", {"wait": False}),
        ("/fleet/models/b/pin", {"wait": False}),
        ("/fleet/models/a/bench", {"wait": False}),
        ("/fleet/pull", {"model": "b", "node": "beast"}),
    ],
)
async def test_job_says_that_it_waits_for_a_node_and_how_long_that_takes(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path)
    status, reply = await box.client.post(path, body)
    assert status == 202, reply
    await box.client.get_until(
        f"/fleet/jobs/{reply['job']['id']}", lambda job: job["stage"].startswith("waking beast, about ")
    )
    await box.wakes()
    if path.endswith("bench"):
        await until(lambda: box.node.bench_requests)
        box.node.bench = BenchStatus(model_id="a", state="done")
    if path.endswith("pull"):
        await until(lambda: box.node.pull_requests)
        box.node.pull = PullStatus(model_id="b", state="done")
    job = await ended(box, reply["job"]["id"])
    assert (job["state"], job["nodes"], job["error"]) == ("done", ["beast"], None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/fleet/models/b/load", {"wait": False}),
        ("/fleet/models/b/pin", {"wait": False}),
        ("/fleet/models/a/bench", {"wait": False}),
        ("/fleet/pull", {"model": "b", "node": "beast"}),
    ],
)
async def test_cancelled_job_does_not_wait_for_its_node(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path)
    _, reply = await box.client.post(path, body)
    status, job = await call(box.client, "DELETE", f"/fleet/jobs/{reply['job']['id']}")
    assert (status, job["state"]) == (200, "cancelled")
    await box.wakes()
    await box.client.get_until("/fleet/status", lambda body: box.sleep_of(body) == "awake")
    assert not box.node.load_requests
    assert not box.node.bench_requests
    assert not box.node.pull_requests
    assert not box.client.gateway.dispatcher.pins


async def test_copy_wakes_the_only_node_that_has_the_files(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path, on_disk="org/m")
    wanted = {"model": "org/m", "node": "small", "copy": True}
    status, reply = await box.client.post("/fleet/pull", wanted)
    assert status == 202, reply
    job_path = f"/fleet/jobs/{reply['job']['id']}"
    await box.client.get_until(job_path, lambda job: job["stage"].startswith("waking beast, about "))
    await box.wakes()
    small = box.awake
    await until(lambda: small.pull_requests)
    (order,) = small.pull_requests
    assert [neighbour.name for neighbour in order.neighbours] == ["beast"]
    small.pull = PullStatus(model_id="org/m", state="done")
    assert (await ended(box, reply["job"]["id"]))["state"] == "done"


async def test_copy_fails_with_the_reason_where_no_node_with_the_files_can_be_woken(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path, command="false", on_disk="org/m")
    _, reply = await box.client.post("/fleet/pull", {"model": "org/m", "node": "small", "copy": True})
    job = await ended(box, reply["job"]["id"])
    assert job["state"] == "failed"
    assert "beast" in job["error"]["message"]
    assert "`false` failed with status 1" in job["error"]["message"]
    assert not box.awake.pull_requests


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/fleet/models/b/load"),
        ("POST", "/fleet/models/a/unload"),
        ("POST", "/fleet/models/a/bench"),
        ("DELETE", "/fleet/nodes/beast/files/b"),
        ("DELETE", "/fleet/models/a/size"),
    ],
)
async def test_order_fails_with_the_reason_where_its_node_cannot_be_woken(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path, method: str, path: str
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path, command="false")
    _, reply = await call(box.client, method, path)
    assert "beast" in str(reply)
    assert "`false` failed with status 1" in str(reply)


async def test_order_wakes_a_node_that_could_not_be_woken_before(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path, timeout_s=0.1)
    status, reply = await box.client.post("/fleet/models/b/load", {"node": "beast"})
    assert status == 502
    assert "beast did not come back" in reply["error"]["message"]
    box.woken.unlink()
    await box.client.get_until("/fleet/status", lambda body: box.sleep_of(body) == "lost")
    await box.client.post("/fleet/models/b/load", {"node": "beast"})
    assert box.woken.exists()


async def test_log_of_a_model_on_a_sleeping_node_wakes_nobody_and_says_so(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path)
    _, reply = await box.client.get("/fleet/models/a/log")
    assert "beast: does not respond, and may be asleep" in reply["error"]["message"]
    assert not box.woken.exists()


@pytest.mark.parametrize(
    ("path", "body"), [("/api/generate", {"model": "a", "keep_alive": 0}), ("/api/models/unload", {})]
)
async def test_requests_that_unload_idle_models_wake_no_node(
    path: str, body: dict[str, Any], neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path)
    await box.client.stream(path, body)
    assert box.sleep_of((await box.client.get("/fleet/status"))[1]) == "asleep"
    assert not box.node.unload_requests


async def test_order_of_a_client_that_disconnects_is_carried_out_and_recorded(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path)
    path = "/fleet/nodes/beast/files/b"
    order = asyncio.create_task(call(box.client, "DELETE", path))
    await until(box.woken.exists)
    order.cancel()
    await asyncio.wait([order])
    await box.wakes()
    await until(lambda: box.node.delete_requests)
    await box.client.get_until(
        "/fleet/audit",
        lambda body: (f"DELETE {path}", 200) in [(each["action"], each["status"]) for each in body["entries"]],
    )


async def test_gateway_that_ends_does_not_wait_for_a_node_to_wake(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    box = await asleep(neurons, start_gateway, tmp_path)
    order = asyncio.create_task(call(box.client, "DELETE", "/fleet/nodes/beast/files/b"))
    await until(box.woken.exists)
    await box.client.gateway.close(grace_s=5)
    status, reply = await order
    assert (status, reply["error"]["code"]) == (503, "shutting_down")
