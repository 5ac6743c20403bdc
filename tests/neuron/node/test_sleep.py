"""A node whose models sleep, with real workers and an engine that fails on demand."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from faulty_models import running_node, write_model

from cortex.neuron.node.node import Node
from cortex.neuron.worker.discovery import DeviceReading, Inventory
from cortex.wire.errors import InsufficientCapacity, ModelInUse, Overloaded
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import Device, ModelState, ModelStatus

from ...waiting import NEVER_S, until
from ..generations import Reader
from .node_calls import has_worker, held, load, request, tokens_of, worker_of

MEBIBYTE = 1 << 20


def config(tmp_path: Path, sleep_mb: int | None = 64, **behaviours: dict[str, Any]) -> dict[str, Any]:
    """Models of one MiB each unless `behaviours` says otherwise, and host memory for `sleep_mb` of them."""
    return {
        "models": [
            {"id": name, "source": str(write_model(tmp_path / name, **{"bytes": MEBIBYTE} | behaviour))}
            for name, behaviour in behaviours.items()
        ],
        "limits": {} if sleep_mb is None else {"sleep_mb": sleep_mb},
    }


async def put_to_sleep(node: Node, model_id: str = "m", drain_s: float | None = None) -> ModelStatus:
    return await node.unload(UnloadRequest(model_id=model_id, sleep=True, drain_s=drain_s))


async def generate(node: Node, model_id: str = "m", name: str = "r") -> list[int]:
    return await tokens_of(node.generate(model_id, request(name)))


async def test_sleeps_wakes_and_unloads(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, m={})) as node:
        await load(node)
        worker = worker_of(node)
        for cycle in range(3):
            status = await put_to_sleep(node)
            assert (status.state, status.host_bytes) == (ModelState.ASLEEP, MEBIBYTE)
            assert status.measured_bytes is not None
            assert status.measured_bytes >= MEBIBYTE, "its device memory when it wakes"
            assert (await put_to_sleep(node)).state is ModelState.ASLEEP
            with pytest.raises(Overloaded, match="asleep; load it with POST /models/load"):
                await generate(node)
            status = await load(node)
            assert (status.state, status.host_bytes) == (ModelState.READY, 0)
            assert await generate(node, name=f"r{cycle}") == [1, 2, 3, 4, 5]
        assert worker_of(node) == worker
        await put_to_sleep(node)
        status = await node.unload(UnloadRequest(model_id="m"))
        assert (status.state, status.host_bytes, status.measured_bytes) == (ModelState.COLD, 0, None)
        assert (await put_to_sleep(node)).state is ModelState.COLD


async def test_wakes_a_model_once_for_many_callers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_node(tmp_path, config(tmp_path, m={"wake": "slow"})) as node:
        await load(node)
        await put_to_sleep(node)
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
        assert [line for line in caplog.messages if "asleep → loading" in line] == ["m: asleep → loading"]


async def test_running_requests_finish_before_sleep(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, m={})) as node:
        await load(node)
        with held(worker_of(node)):
            running = asyncio.create_task(generate(node))
            await until(lambda: node.model("m").load.running == 1)
            falling_asleep = asyncio.create_task(put_to_sleep(node, drain_s=NEVER_S))
            await until(lambda: node.model("m").state is ModelState.UNLOADING)
        assert (await falling_asleep).state is ModelState.ASLEEP
        assert await running == [1, 2, 3, 4, 5]


async def test_sleeping_model_is_cold_after_its_worker_died(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_node(tmp_path, config(tmp_path, m={}, other={})) as node:
        await load(node)
        await load(node, "other")
        await put_to_sleep(node)
        os.kill(worker_of(node), signal.SIGKILL)
        await until(lambda: node.model("m").state is ModelState.COLD)
        assert "lost while it slept" in (node.model("m").reason or "")
        (line,) = [record for record in caplog.records if "asleep → cold" in record.message]
        assert (line.levelno, "lost while it slept" in line.message) == (logging.WARNING, True)
        await until(lambda: node.model("other").state is ModelState.READY)
        assert node.model("m").state is ModelState.COLD, "only models that served recover by themselves"
        assert (await load(node)).state is ModelState.READY


async def test_unloads_the_longest_idle_sleeping_model_over_the_budget(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, sleep_mb=2, a={}, b={}, c={})) as node:
        for name in ("a", "b", "c"):
            await load(node, name)
        await generate(node, "a", "1")
        for name in ("b", "a", "c"):
            assert (await put_to_sleep(node, name)).state is ModelState.ASLEEP
        states = {name: node.model(name).state for name in ("a", "b", "c")}
        assert states == {"a": ModelState.ASLEEP, "b": ModelState.COLD, "c": ModelState.ASLEEP}


@pytest.mark.parametrize(
    ("sleep_mb", "behaviour"),
    [(None, {}), (0, {}), (2, {"bytes": 3 * MEBIBYTE}), (64, {"sleep": "refuse"}), (64, {"sleep": "fault"})],
    ids=["none on a CPU", "none", "too large", "rejected", "faulted"],
)
async def test_unloads_a_model_that_cannot_sleep(
    tmp_path: Path, sleep_mb: int | None, behaviour: dict[str, Any]
) -> None:
    async with running_node(tmp_path, config(tmp_path, sleep_mb, m=behaviour)) as node:
        await load(node)
        assert (await put_to_sleep(node)).state is ModelState.COLD
        assert not node.devices.supervisors[0].has_models
        assert (await load(node)).state is ModelState.READY


async def test_unloads_no_sleeping_model_for_one_that_would_not_fit_anyway(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, sleep_mb=2, a={}, b={"bytes": 3 * MEBIBYTE})) as node:
        await load(node, "a")
        await load(node, "b")
        await put_to_sleep(node, "a")
        assert (await put_to_sleep(node, "b")).state is ModelState.COLD
        assert node.model("a").state is ModelState.ASLEEP


@pytest.mark.parametrize("wake", ["no room", "no memory"])
async def test_stays_asleep_when_a_wake_finds_no_room(tmp_path: Path, wake: str) -> None:
    async with running_node(tmp_path, config(tmp_path, m={"wake": wake})) as node:
        await load(node)
        await put_to_sleep(node)
        node.devices.supervisors[0].freed_at_s = -1e9  # so that the load does not wait for memory that was just freed
        for _ in range(2):
            with pytest.raises(InsufficientCapacity):
                await load(node)
            assert (node.model("m").state, node.model("m").host_bytes) == (ModelState.ASLEEP, MEBIBYTE)


@pytest.mark.parametrize("wake", ["damaged", "fault", "exit"])
async def test_loads_again_when_a_wake_loses_the_model(tmp_path: Path, wake: str) -> None:
    async with running_node(tmp_path, config(tmp_path, m={"wake": wake})) as node:
        await load(node)
        await put_to_sleep(node)
        assert (await load(node)).state is ModelState.READY
        assert await generate(node) == [1, 2, 3, 4, 5]


async def test_unload_while_falling_asleep_leaves_nothing(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, m={})) as node:
        await load(node)
        with held(worker_of(node)):
            running = asyncio.create_task(generate(node))
            await until(lambda: node.model("m").load.running == 1)
            falling_asleep = asyncio.create_task(put_to_sleep(node, drain_s=NEVER_S))
            await until(lambda: node.model("m").state is ModelState.UNLOADING)
            unloading = asyncio.create_task(node.unload(UnloadRequest(model_id="m")))
            await asyncio.sleep(0)
        assert (await unloading).state is ModelState.COLD
        assert (await falling_asleep).state is ModelState.COLD
        assert await running == [1, 2, 3, 4, 5]
        assert not node.devices.supervisors[0].has_models


async def test_load_on_another_device_unloads_the_sleeping_model(tmp_path: Path) -> None:
    devices = tuple(Device(index=index, kind="cpu", name="cpu", total_bytes=1 << 40) for index in (0, 1))
    readings = {device.index: DeviceReading(1 << 40, 1 << 39) for device in devices}
    two_devices = {"discover": lambda: Inventory(devices, readings=readings), "read_devices": lambda _: readings}
    async with running_node(tmp_path, config(tmp_path, m={}), **two_devices) as node:
        await load(node, devices=(0,))
        await put_to_sleep(node)
        assert (await load(node, devices=(0, 1))).devices == (0,), "it wakes where it is, if that device is allowed"
        await put_to_sleep(node)
        status = await load(node, devices=(1,))
        assert (status.state, status.devices) == (ModelState.READY, (1,))
        assert not node.devices.supervisors[0].has_models


async def test_closes_with_a_sleeping_model(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, m={})) as node:
        await load(node)
        await put_to_sleep(node)
        await node.close()
        assert not has_worker(node)


async def test_sleeping_model_is_loaded_in_one_of_two_quantisations_that_are_ordered_at_once(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, m={})) as node:
        await load(node)
        await put_to_sleep(node)
        orders = [LoadRequest(model_id="m", quant=quant) for quant in ("q4", "q8")]
        ended = await asyncio.gather(*(node.load(order, wait=False) for order in orders), return_exceptions=True)
        assert [type(each) for each in ended if isinstance(each, BaseException)] == [ModelInUse]


@pytest.mark.parametrize("to_sleep", [True, False])
async def test_load_ordered_during_an_unload_keeps_its_quantisation(tmp_path: Path, to_sleep: bool) -> None:
    async with running_node(tmp_path, config(tmp_path, m={"step_s": 0.02})) as node:
        await load(node)
        generation = Reader(node.generate("m", request(max_tokens=100_000)))
        await anext(generation)
        unload = asyncio.create_task(node.unload(UnloadRequest(model_id="m", sleep=to_sleep, drain_s=NEVER_S)))
        await until(lambda: node.model("m").state is ModelState.UNLOADING)
        orders = [LoadRequest(model_id="m", quant=quant) for quant in ("q4", "q8", "q4_k", None)]
        ended = await asyncio.gather(*(node.load(order, wait=False) for order in orders), return_exceptions=True)
        assert [isinstance(each, ModelInUse) for each in ended] == [False, True, False, False]
        assert "m is about to be loaded as q4, not as q8" in str(ended[1])
        assert node.model("m").state is ModelState.LOADING, "once its requests have ended"
        generation.cancel()
        await unload
        await until(lambda: node.model("m").state is ModelState.READY)
        assert node.model("m").requested_quant == "q4"
