"""`limits.memory_mb` and `devices.memory_mb`: what they leave for a model, and a node that respects them."""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from faulty_models import running_node, write_model

from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.request import EngineInfo, LoadSpec
from cortex.neuron.node.devices import NodeDevices
from cortex.neuron.node.harness.forecast import Forecast
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.loading.device_allocator import DeviceAllocator
from cortex.neuron.node.memory.ceilings import Ceilings, MemoryCeilings, ModelHolding
from cortex.neuron.worker.discovery import Inventory
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.hosts.device import DeviceHost
from cortex.neuron.worker.model_host import Resident
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.wire.errors import InsufficientCapacity
from cortex.wire.node.orders import UnloadRequest
from cortex.wire.node.protocol import Device, ModelState

from ....waiting import until
from ..node_calls import load

MEBIBYTE = 1 << 20
INFO = EngineInfo("llama", "float32", 512, 100, weight_bytes=10, kv_bytes=5, page_tokens=32, num_pages=7)


def ceilings(
    node_mb: int | None = None,
    devices: Iterable[tuple[int, int]] = (),
    holdings: Iterable[tuple[str, tuple[int, ...], int]] = (),
) -> MemoryCeilings:
    configured = Ceilings(
        None if node_mb is None else node_mb * MEBIBYTE, tuple((index, mb * MEBIBYTE) for index, mb in devices)
    )
    held = [
        ModelHolding(name, indices, (mb * MEBIBYTE // len(indices),) * len(indices)) for name, indices, mb in holdings
    ]
    return MemoryCeilings(configured, lambda: held)


@pytest.mark.parametrize(
    ("node_mb", "devices", "holdings", "num_devices", "left_mb"),
    [
        (None, (), [("a", (0,), 50)], 1, None),
        (100, (), [], 1, 100),
        (100, (), [("a", (1,), 30)], 1, 70),
        (100, (), [("a", (1,), 30)], 2, 35),
        (None, [(0, 60)], [("a", (1,), 30)], 1, 60),
        (None, [(0, 60)], [("a", (0, 1), 40)], 1, 40),
        (100, [(0, 60)], [("a", (1,), 80)], 1, 20),
        (100, [(0, 60)], [("a", (0,), 80)], 1, 0),
        (100, (), [("m", (0,), 80)], 1, 100),
    ],
)
def test_what_is_left_of_both_ceilings(
    node_mb: int | None,
    devices: list[tuple[int, int]],
    holdings: list[tuple[str, tuple[int, ...], int]],
    num_devices: int,
    left_mb: int | None,
) -> None:
    left_bytes = ceilings(node_mb, devices, holdings).left_bytes(0, num_devices, but="m")
    assert left_bytes == (None if left_mb is None else left_mb * MEBIBYTE)


def test_device_is_listed_once() -> None:
    with pytest.raises(Exception, match="listed twice"):
        msgspec.convert({"devices": [{"index": 0, "memory_mb": 1}, {"index": 0, "memory_mb": 2}]}, NeuronConfig)


def config(tmp_path: Path, limits: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    models = [
        {"id": name, "source": str(write_model(tmp_path / name, bytes=40 * MEBIBYTE))} for name in ("first", "second")
    ]
    return {"models": models, "limits": {"sleep_mb": 64} | (limits or {}), **sections}


@pytest.mark.parametrize("section", [{"limits": {"memory_mb": 44}}, {"devices": [{"index": 0, "memory_mb": 44}]}])
async def test_models_over_the_ceiling_are_rejected_until_another_is_unloaded(
    tmp_path: Path, section: dict[str, Any]
) -> None:
    async with running_node(tmp_path, config(tmp_path, **section)) as node:
        await load(node, "first")
        with pytest.raises(InsufficientCapacity, match="take the rest of memory_mb"):
            await load(node, "second")
        await node.unload(UnloadRequest(model_id="first"))
        assert (await load(node, "second")).state is ModelState.READY


async def test_loads_at_once_do_not_exceed_the_ceiling_of_the_node_together(tmp_path: Path) -> None:
    settings = config(tmp_path, {"memory_mb": 12}, cpu_devices=2, harness={"torch": {"dtype": "float32"}})
    async with running_node(tmp_path, settings) as node:  # each is expected to take 9
        results = await asyncio.gather(load(node, "first"), load(node, "second"), return_exceptions=True)
        assert [type(result).__name__ for result in results].count("InsufficientCapacity") == 1


async def test_sleeping_model_on_a_cpu_counts_with_the_weights_that_stay_there(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, {"memory_mb": 44})) as node:
        await load(node, "first")
        assert (await node.unload(UnloadRequest(model_id="first", sleep=True))).state is ModelState.ASLEEP
        with pytest.raises(InsufficientCapacity, match="take the rest of memory_mb"):
            await load(node, "second")
        assert (await load(node, "first")).state is ModelState.READY


async def test_model_does_not_wake_over_the_ceiling() -> None:
    other = ceilings(node_mb=60, holdings=[("awake", (0,), 30), ("m", (0,), 0)])
    card = Device(index=0, kind="cuda", name="card", total_bytes=1 << 40)
    forecast = Forecast(NeuronConfig())
    devices = NodeDevices(
        Inventory((card,)), WorkerFactory(), WorkerTimeouts(), lambda _: {}, forecast.reserve, other.configured
    )
    room = DeviceAllocator(devices, forecast, lambda _: forecast, other, lambda _: {})
    host, model = DeviceHost(devices.supervisors[0], LoadSpec("m")), KnownModel(id="m", source="m")

    def asleep(size_mb: int) -> Resident:
        return Resident(INFO, size_mb * MEBIBYTE, process_bytes=0, host_bytes=MEBIBYTE)

    async with room.for_wake(model, host, asleep(30)):
        pass
    with pytest.raises(InsufficientCapacity, match=r"m needs \d+ MiB on device 0 to wake up, but other models leave"):
        async with room.for_wake(model, host, asleep(40)):
            pass
    await devices.close()


async def test_ceilings_are_reported_and_bound_the_estimate(tmp_path: Path) -> None:
    settings = config(tmp_path, {"memory_mb": 44}, devices=[{"index": 0, "memory_mb": 42}])
    async with running_node(tmp_path, settings) as node:
        health = node.health()
        assert (health.ceiling_bytes, health.devices[0].ceiling_bytes) == (44 * MEBIBYTE, 42 * MEBIBYTE)
        await load(node, "first")
        await until(lambda: node.model("second").estimate_bytes)
        assert (node.model("second").estimate_bytes or 0) <= 42 * MEBIBYTE


async def test_ceiling_of_a_device_that_is_not_there_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with running_node(tmp_path, config(tmp_path, devices=[{"index": 7, "memory_mb": 3}])):
            pass
    assert "[[devices]] limits device 7, but this node has 0" in caplog.text
