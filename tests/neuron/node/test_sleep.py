"""A node whose models sleep, with real workers and an engine that fails on demand."""

import asyncio
import logging
import os
import signal

import faulty_engine
import pytest
from faulty_models import running_node, write_model

from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.worker.discovery import DeviceReading, Inventory
from cortex.wire.errors import InsufficientCapacity, Overloaded
from cortex.wire.node import Device, LoadRequest, ModelState, UnloadRequest

MEBIBYTE = 1 << 20
WAIT_S = 30.0
"""How long tests wait for what must happen; only reached on failure."""


def config(tmp_path, parked_mb=64, **behaviours):
    """Models of one MiB each unless told otherwise, and room for so many."""
    return {
        "models": [
            {"id": name, "source": str(write_model(tmp_path / name, **{"bytes": MEBIBYTE} | behaviour))}
            for name, behaviour in behaviours.items()
        ],
        "limits": {} if parked_mb is None else {"sleep_mb": parked_mb},
    }


async def load(node, model_id="m", **wishes):
    return await node.load(LoadRequest(model_id=model_id, **wishes), wait=True)


async def park(node, model_id="m", **wishes):
    return await node.unload(UnloadRequest(model_id=model_id, sleep=True, **wishes))


async def answer(node, model_id="m", name="r"):
    generation = node.submit(model_id, EngineRequest(id=name, prompt=(faulty_engine.PLAIN,), max_tokens=5))
    return [token async for batch in generation for output in batch for token in output.tokens]


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def worker_of(node):
    return node._supervisors[0].process_id


async def test_park_wake_unload(tmp_path):
    async with running_node(tmp_path, config(tmp_path, m={})) as node:
        await load(node)
        worker = worker_of(node)
        for cycle in range(3):
            status = await park(node)
            assert (status.state, status.host_bytes) == (ModelState.ASLEEP, MEBIBYTE)
            assert status.measured_bytes >= MEBIBYTE, "what it will take again"
            assert (await park(node)).state is ModelState.ASLEEP
            with pytest.raises(Overloaded, match="asleep; POST /models/load"):
                await answer(node)
            status = await load(node)
            assert (status.state, status.host_bytes) == (ModelState.READY, 0)
            assert await answer(node, name=f"r{cycle}") == [1, 2, 3, 4, 5]
        assert worker_of(node) == worker
        await park(node)
        status = await node.unload(UnloadRequest(model_id="m"))
        assert (status.state, status.host_bytes, status.measured_bytes) == (ModelState.COLD, 0, None)
        assert (await park(node)).state is ModelState.COLD


async def test_many_who_want_a_sleeper_wake_it_once(tmp_path):
    async with running_node(tmp_path, config(tmp_path, m={"wake": "slow"})) as node:
        await load(node)
        await park(node)
        stages = set()
        changes = node.subscribe()
        loads = asyncio.gather(*(load(node) for _ in range(5)))
        async for change in changes:
            if change.model is not None and change.model.progress is not None:
                stages.add(change.model.progress.stage)
            if change.model is not None and change.model.state is ModelState.READY:
                break
        assert {status.state for status in await loads} == {ModelState.READY}
        assert "place" in stages
        assert node._controllers["m"].life.attempt == 3


async def test_running_answers_end_before_it_sleeps(tmp_path):
    async with running_node(tmp_path, config(tmp_path, m={"step_s": 0.01})) as node:
        await load(node)
        running = asyncio.create_task(answer(node))
        await until(lambda: node.model("m").load.running == 1)
        status = await park(node, drain_s=30.0)
        assert status.state is ModelState.ASLEEP
        assert await running == [1, 2, 3, 4, 5]


async def test_a_worker_that_dies_leaves_its_sleepers_cold_and_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with running_node(tmp_path, config(tmp_path, m={}, other={})) as node:
        await load(node)
        await load(node, "other")
        await park(node)
        os.kill(worker_of(node), signal.SIGKILL)
        await until(lambda: node.model("m").state is ModelState.COLD)
        assert "lost while it slept" in node.model("m").reason
        assert any("asleep → cold" in line and "lost while it slept" in line for line in caplog.messages)
        await until(lambda: node.model("other").state is ModelState.READY)
        assert node.model("m").state is ModelState.COLD, "only who served comes back by itself"
        assert (await load(node)).state is ModelState.READY


async def test_over_the_budget_the_coldest_leaves(tmp_path):
    async with running_node(tmp_path, config(tmp_path, parked_mb=2, a={}, b={}, c={})) as node:
        for name in ("a", "b", "c"):
            await load(node, name)
        await answer(node, "a", "1")
        for name in ("b", "a", "c"):
            assert (await park(node, name)).state is ModelState.ASLEEP
        states = {name: node.model(name).state for name in ("a", "b", "c")}
        assert states == {"a": ModelState.ASLEEP, "b": ModelState.COLD, "c": ModelState.ASLEEP}


@pytest.mark.parametrize(
    ("parked_mb", "behaviour"),
    [(None, {}), (0, {}), (2, {"bytes": 3 * MEBIBYTE}), (64, {"sleep": "refuse"}), (64, {"sleep": "fault"})],
    ids=["none on a CPU", "none", "too large", "refused", "faulted"],
)
async def test_a_model_that_cannot_be_parked_is_unloaded(tmp_path, parked_mb, behaviour):
    async with running_node(tmp_path, config(tmp_path, parked_mb, m=behaviour)) as node:
        await load(node)
        assert (await park(node)).state is ModelState.COLD
        assert not node._supervisors[0].has_models
        assert (await load(node)).state is ModelState.READY


async def test_who_would_not_fit_anyway_drives_nobody_out(tmp_path):
    async with running_node(tmp_path, config(tmp_path, parked_mb=2, a={}, b={"bytes": 3 * MEBIBYTE})) as node:
        await load(node, "a")
        await load(node, "b")
        await park(node, "a")
        assert (await park(node, "b")).state is ModelState.COLD
        assert node.model("a").state is ModelState.ASLEEP


@pytest.mark.parametrize("wake", ["no room", "no memory"])
async def test_a_sleeper_that_finds_no_room_sleeps_on(tmp_path, wake):
    async with running_node(tmp_path, config(tmp_path, m={"wake": wake})) as node:
        await load(node)
        await park(node)
        node._supervisors[0].freed_at_s = -1e9  # nothing was freed just now, so there is nothing to wait for
        for _ in range(2):
            with pytest.raises(InsufficientCapacity):
                await load(node)
            assert (node.model("m").state, node.model("m").host_bytes) == (ModelState.ASLEEP, MEBIBYTE)


@pytest.mark.parametrize("wake", ["damaged", "fault", "exit"])
async def test_a_sleeper_that_does_not_survive_is_loaded_anew(tmp_path, wake):
    async with running_node(tmp_path, config(tmp_path, m={"wake": wake})) as node:
        await load(node)
        await park(node)
        assert (await load(node)).state is ModelState.READY
        assert await answer(node) == [1, 2, 3, 4, 5]


async def test_unloading_while_it_goes_to_sleep_leaves_nothing(tmp_path):
    async with running_node(tmp_path, config(tmp_path, m={"step_s": 0.01})) as node:
        await load(node)
        running = asyncio.create_task(answer(node))
        await until(lambda: node.model("m").load.running == 1)
        parking = asyncio.create_task(park(node, drain_s=30.0))
        await until(lambda: node.model("m").state is ModelState.UNLOADING)
        assert (await node.unload(UnloadRequest(model_id="m"))).state is ModelState.COLD
        assert (await parking).state is ModelState.COLD
        assert await running == [1, 2, 3, 4, 5]
        assert not node._supervisors[0].has_models


async def test_asked_for_on_another_device_it_is_loaded_there(tmp_path):
    devices = tuple(Device(index=index, kind="cpu", name="cpu", total_bytes=1 << 40) for index in (0, 1))
    readings = {device.index: DeviceReading(1 << 40, 1 << 39) for device in devices}
    two_devices = {"discover": lambda: Inventory(devices, readings=readings), "read_devices": lambda _: readings}
    async with running_node(tmp_path, config(tmp_path, m={}), **two_devices) as node:
        await load(node, devices=(0,))
        await park(node)
        assert (await load(node, devices=(0, 1))).devices == (0,), "it wakes where it is, if that will do"
        await park(node)
        status = await load(node, devices=(1,))
        assert (status.state, status.devices) == (ModelState.READY, (1,))
        assert not node._supervisors[0].has_models


async def test_a_node_with_sleepers_shuts_down(tmp_path):
    async with running_node(tmp_path, config(tmp_path, m={})) as node:
        await load(node)
        await park(node)
        await node.close()
        assert worker_of(node) is None
