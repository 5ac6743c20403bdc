"""Loads run next to each other where there is room for all of them, and say what they wait for where there is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from faulty_models import models, running_node, write_model

from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.harness.estimates import Footprint
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.loading.loads_in_progress import LoadsInProgress
from cortex.neuron.node.memory.allocation import ChosenDevices, DeviceAllocation, Reservation
from cortex.neuron.node.node import Node
from cortex.neuron.worker.discovery import DeviceReading, Inventory
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import ModelHost, Resident
from cortex.wire.errors import InsufficientCapacity
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import Device, ModelState, ModelStatus

from ....waiting import until
from ...worker.hosts.fake_host import FakeHost
from ..harness.test_harness import EchoEstimates, EchoFacts, EchoHarness
from ..node_calls import load

GIB = 1 << 30
CARD = Device(index=0, kind="cuda", name="card", total_bytes=40 * GIB)


class SizedEstimates(EchoEstimates):
    """The size of a model is in its name: `a-10` takes 10 GiB, and the size of `a-0` is unknown."""

    def least_bytes(self, model: KnownModel, metadata: EchoFacts, device: Device) -> int:
        return int(model.id.split("-")[1]) * GIB

    smallest_bytes = expected_bytes = least_bytes

    def footprint(self, model: KnownModel, metadata: EchoFacts, devices: Any) -> Footprint:
        size = self.least_bytes(model, metadata, devices[0])
        return Footprint(size, size)


class SlowHarness(EchoHarness):
    """Servers that are loaded when the test lets them."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__(SizedEstimates(NeuronConfig()))
        self.hosts: dict[str, FakeHost] = {}
        self.rooms: dict[str, DeviceAllocation] = {}
        self.free_bytes = free_bytes

    async def host(
        self, model: KnownModel, metadata: EchoFacts, room: DeviceAllocation
    ) -> tuple[ModelHost, ChosenDevices]:
        host = self.hosts[model.id] = FakeHost(0)
        host.may_load.clear()
        self.rooms[model.id] = room
        return host, room.chosen

    def finish(self, model_id: str) -> None:
        """Its load ends, and the device shows the memory as taken."""
        self.free_bytes -= int(model_id.split("-")[1]) * GIB
        self.hosts[model_id].may_load.set()

    def readings(self, _: object = None) -> dict[int, DeviceReading]:
        return {0: DeviceReading(CARD.total_bytes, self.free_bytes)}


@asynccontextmanager
async def card_node(tmp_path: Path, *, limits: dict[str, Any] | None = None) -> AsyncIterator[tuple[Node, SlowHarness]]:
    harness = SlowHarness(CARD.total_bytes)
    config = {"model_roots": [str(tmp_path)], "limits": limits or {}}
    changes = {
        "discover": lambda: Inventory((CARD,), readings=harness.readings()),
        "read_devices": harness.readings,
        "harnesses": (harness,),
    }
    async with running_node(tmp_path, config, **changes) as node:
        yield node, harness


def server(tmp_path: Path, model_id: str) -> LoadRequest:
    return LoadRequest(model_id=model_id, source=str(write_model(tmp_path / "model")), harness="echo")


async def begin(tmp_path: Path, node: Node, harness: SlowHarness, model_id: str) -> None:
    """Returns when the server of the model starts."""
    await node.load(server(tmp_path, model_id), wait=False)
    await until(lambda: model_id in harness.hosts)


async def finish(tmp_path: Path, node: Node, harness: SlowHarness, model_id: str) -> ModelStatus:
    """Ends a load that has begun."""
    harness.finish(model_id)
    return await node.load(server(tmp_path, model_id), wait=True)


def waits_for(node: Node, model_id: str) -> str:
    progress = node.model(model_id).progress
    return (progress.waits_for or "") if progress is not None else ""


async def test_slow_load_does_not_delay_a_model_with_room_next_to_it(tmp_path: Path) -> None:
    async with card_node(tmp_path) as (node, harness):
        await begin(tmp_path, node, harness, "slow-10")
        await begin(tmp_path, node, harness, "quick-10")
        assert (await finish(tmp_path, node, harness, "quick-10")).state is ModelState.READY
        assert node.model("slow-10").state is ModelState.LOADING


async def test_server_that_starts_does_not_delay_a_load_of_the_engine(tmp_path: Path) -> None:
    harness = SlowHarness(0)
    harness.estimates = EchoEstimates(NeuronConfig())
    config = models(tmp_path, m={}) | {"model_roots": [str(tmp_path)]}
    async with running_node(tmp_path, config, harnesses=(harness,)) as node:
        await begin(tmp_path, node, harness, "slow")
        assert (await load(node, "m")).state is ModelState.READY
        assert node.model("slow").state is ModelState.LOADING


async def test_load_without_room_next_to_another_waits_and_says_for_what(tmp_path: Path) -> None:
    async with card_node(tmp_path) as (node, harness):
        await begin(tmp_path, node, harness, "slow-30")
        await node.load(server(tmp_path, "next-10"), wait=False)
        await until(lambda: waits_for(node, "next-10"))
        progress = node.model("next-10").progress
        assert progress is not None
        assert progress.finest_stage == "waits for the load of slow-30, which may take the memory that it needs"
        assert "next-10" not in harness.hosts
        await finish(tmp_path, node, harness, "slow-30")  # it is as large as expected
        await until(lambda: node.model("next-10").state is ModelState.FAILED)
        assert "too little is free" in (node.model("next-10").reason or "")


async def test_load_of_unknown_size_takes_the_rest_of_the_device_until_it_is_measured(tmp_path: Path) -> None:
    async with card_node(tmp_path) as (node, harness):
        await begin(tmp_path, node, harness, "docker-0")
        assert node.model("docker-0").estimate_bytes is None
        for model_id in ("next-0", "next-10"):
            await node.load(server(tmp_path, model_id), wait=False)
        await until(lambda: all("docker-0" in waits_for(node, each) for each in ("next-0", "next-10")))
        await finish(tmp_path, node, harness, "docker-0")
        await until(lambda: {"next-0", "next-10"} & harness.hosts.keys())


async def test_load_that_waited_begins_when_the_other_one_is_cancelled(tmp_path: Path) -> None:
    async with card_node(tmp_path) as (node, harness):
        await begin(tmp_path, node, harness, "slow-30")
        await node.load(server(tmp_path, "next-10"), wait=False)
        await until(lambda: waits_for(node, "next-10"))
        await node.unload(UnloadRequest(model_id="slow-30"))
        await until(lambda: "next-10" in harness.hosts)
        assert waits_for(node, "next-10") == ""
        assert (await finish(tmp_path, node, harness, "next-10")).state is ModelState.READY


@pytest.mark.parametrize("limits", [{}, {"memory_mb": 35 << 10}], ids=["device", "ceiling"])
async def test_load_waits_for_the_unload_that_makes_room_for_it(tmp_path: Path, limits: dict[str, Any]) -> None:
    async with card_node(tmp_path, limits=limits) as (node, harness):
        await begin(tmp_path, node, harness, "old-30")
        await finish(tmp_path, node, harness, "old-30")
        host, may_end = harness.hosts["old-30"], asyncio.Event()
        host.resident = Resident(host.info, 30 * GIB, 30 * GIB)
        unload = host.unload

        async def slow_unload() -> Reclaimed:
            await may_end.wait()
            harness.free_bytes += 30 * GIB
            return await unload()

        host.unload = slow_unload  # type: ignore[method-assign]
        unloading = asyncio.create_task(node.unload(UnloadRequest(model_id="old-30")))
        await until(lambda: node.model("old-30").state is ModelState.UNLOADING)
        with pytest.raises(InsufficientCapacity):  # that is not enough
            await node.load(server(tmp_path, "huge-39"), wait=True)
        await node.load(server(tmp_path, "next-20"), wait=False)
        await until(lambda: waits_for(node, "next-20") == "waits for the unload of old-30")
        may_end.set()
        await unloading
        await until(lambda: "next-20" in harness.hosts)


async def test_memory_that_a_load_has_taken_already_is_not_counted_twice(tmp_path: Path) -> None:
    async with card_node(tmp_path) as (node, harness):
        await begin(tmp_path, node, harness, "slow-20")
        harness.free_bytes -= 18 * GIB
        harness.rooms["slow-20"].took(18 * GIB)
        await begin(tmp_path, node, harness, "next-10")
        assert not harness.rooms["slow-20"].was_alone
        assert not harness.rooms["next-10"].was_alone


async def test_loads_at_once_do_not_exceed_a_ceiling_together(tmp_path: Path) -> None:
    async with card_node(tmp_path, limits={"memory_mb": 15 << 10}) as (node, harness):
        await begin(tmp_path, node, harness, "a-10")
        await node.load(server(tmp_path, "b-10"), wait=False)
        await until(lambda: waits_for(node, "b-10"))
        await node.unload(UnloadRequest(model_id="a-10"))
        await until(lambda: "b-10" in harness.hosts)
        assert (await finish(tmp_path, node, harness, "b-10")).state is ModelState.READY


async def test_no_more_loads_than_allowed_run_at_once(tmp_path: Path) -> None:
    async with card_node(tmp_path, limits={"max_loads": 2}) as (node, harness):
        for model_id in ("a-5", "b-5"):
            await begin(tmp_path, node, harness, model_id)
        await node.load(server(tmp_path, "c-5"), wait=False)
        await until(lambda: waits_for(node, "c-5") == "waits for one of 2 loads to end (limits.max_loads)")
        harness.finish("a-5")
        await until(lambda: "c-5" in harness.hosts)


async def test_loads_in_one_worker_take_turns_and_say_so(tmp_path: Path) -> None:
    slow = {"pieces": 1000, "piece_s": 0.01}
    async with running_node(tmp_path, models(tmp_path, slow=slow, quick={})) as node:
        await node.load(LoadRequest(model_id="slow"), wait=False)
        await until(lambda: (p := node.model("slow").progress) is not None and p.stage == "read")
        await node.load(LoadRequest(model_id="quick"), wait=False)
        await until(lambda: waits_for(node, "quick") == "waits for the load of slow on device 0")
        await node.unload(UnloadRequest(model_id="slow"))
        assert (await load(node, "quick")).state is ModelState.READY


async def test_load_that_waits_for_a_worker_takes_the_device_that_is_free_first(tmp_path: Path) -> None:
    slow = {"pieces": 10_000, "piece_s": 0.01}
    config = models(tmp_path, a=slow, b=slow, quick={}) | {"cpu_devices": 2}
    async with running_node(tmp_path, config) as node:
        for model_id in "ab":
            await node.load(LoadRequest(model_id=model_id), wait=False)
            await until(lambda: (p := node.model(model_id).progress) is not None and p.stage == "read")  # noqa: B023
        await node.load(LoadRequest(model_id="quick"), wait=False)
        await until(lambda: waits_for(node, "quick").startswith("waits for the load of "))
        awaited, other = ("a", "b") if "load of a" in waits_for(node, "quick") else ("b", "a")
        await node.unload(UnloadRequest(model_id=other))
        await until(lambda: node.model("quick").state is ModelState.READY)
        assert node.model(awaited).state is ModelState.LOADING


def test_first_load_to_come_to_a_worker_is_the_first_to_run() -> None:
    loads = LoadsInProgress([CARD])
    with loads.queued("later") as later:
        with loads.queued("first") as first:
            assert loads.start(first, (0, 1)) is None
            with loads.queued("last") as last:
                assert loads.start(later, (1,)) == "waits for the load of first on device 1"
                assert loads.start(last, (1, 2)) == "waits for the load of later on device 1"
                assert loads.busy_devices(last) == {0, 1}
                assert loads.start(last, (2,)) is None
        assert loads.start(later, (1,)) is None


def test_what_loads_may_still_take_is_not_free() -> None:
    cards = [Device(index=index, kind="cuda", name="card", total_bytes=100) for index in range(2)]
    loads = LoadsInProgress(cards)
    first = Reservation("m", {0: 30, 1: 10}, taken_bytes=20)
    loads.begin(first)
    loads.begin(Reservation("n", {1: 25}))
    readings = {0: DeviceReading(100, 50), 1: DeviceReading(100, 40)}
    assert [each.free_bytes for each in loads.applied(readings).values()] == [35, 10]
    assert [each.free_bytes for each in loads.applied(readings, but=first).values()] == [50, 15]
    assert [each.model_id for each in loads.affecting((0,))] == ["m"]
    loads.end(first)
    assert [each.free_bytes for each in loads.applied(readings).values()] == [50, 15]


def test_cpu_devices_share_what_loads_take_of_the_host() -> None:
    loads = LoadsInProgress([Device(index=index, kind="cpu", name="cpu", total_bytes=100) for index in range(2)])
    loads.begin(Reservation("m", {0: 30}))
    readings = {0: DeviceReading(100, 50), 1: DeviceReading(100, 50)}
    assert [each.free_bytes for each in loads.applied(readings).values()] == [35, 35]
    assert [each.model_id for each in loads.affecting((1,))] == ["m"]
