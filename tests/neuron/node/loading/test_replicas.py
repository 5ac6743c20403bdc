"""When a replica is added, and when one goes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from faulty_engine import PLAIN
from faulty_models import running_node, write_model

from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.node.loading.replicas import Demand, ReplicaRules
from cortex.neuron.node.node import Node
from cortex.neuron.worker.discovery import DeviceReading, Inventory
from cortex.wire.errors import CortexError, Recovering
from cortex.wire.node.orders import UnloadRequest
from cortex.wire.node.protocol import Device, ModelState

from ....waiting import WAIT_S, until
from ...generations import Reader
from ..node_calls import load, tokens_of, worker_of

FREE_BYTES = 1 << 43
MODEL_BYTES = 64 << 20


def _read(devices: tuple[Device, ...]) -> dict[int, DeviceReading]:
    return {device.index: DeviceReading(2 * FREE_BYTES, FREE_BYTES) for device in devices}


HOST = Device(index=0, kind="cpu", name="large", total_bytes=4 * FREE_BYTES)
LARGE_HOST: dict[str, Any] = {
    "discover": lambda: Inventory((HOST,), readings=_read((HOST,))),
    "read_devices": _read,
}
RULES = ReplicaRules(add_after_s=5.0, remove_after_s=60.0)


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (Demand(1, 2), None),
        (Demand(1, 2, waited_s=4.9), None),
        (Demand(1, 2, waited_s=5.0), "add"),
        (Demand(2, 2, waited_s=500.0), None),
        (Demand(2, 3, waited_s=6.0, since_change_s=4.9), None),
        (Demand(2, 3, waited_s=6.0, since_change_s=5.0), "add"),
        (Demand(1, 2, waited_s=500.0, since_failure_s=29.9), None),
        (Demand(1, 2, waited_s=500.0, since_failure_s=30.0), "add"),
        (Demand(2, 2, idle_s=59.9), None),
        (Demand(2, 2, idle_s=60.0), "remove"),
        (Demand(2, 2, waited_s=0.1, idle_s=60.0), None),
        (Demand(2, 3, waited_s=5.0, idle_s=60.0), "add"),
    ],
)
def test_adds_while_requests_wait_and_removes_what_is_idle(demand: Demand, expected: str | None) -> None:
    assert RULES.decide(demand) == expected


def settings(tmp_path: Path, **limits: Any) -> dict[str, Any]:
    """A slow model that may have two replicas, of one request each, and another one."""
    slow = str(write_model(tmp_path / "m", step_s=0.02, bytes=MODEL_BYTES))
    other = str(write_model(tmp_path / "other", config={"max_position_embeddings": 1 << 20}))
    return {
        "models": [{"id": "m", "source": slow, "max_replicas": 2}, {"id": "other", "source": other}],
        "cpu_devices": 2,
        "limits": {"max_num_seqs": 1, "add_replica_after_s": 0.1, "remove_replica_after_s": 600.0, **limits},
    }


def submit(node: Node, name: str, max_tokens: int = 100_000) -> Reader:
    return Reader(node.generate("m", EngineRequest(id=name, prompt=(PLAIN,), max_tokens=max_tokens)))


async def with_two_requests(node: Node) -> list[Reader]:
    """Both run, because the model has got a second replica."""
    await load(node)
    streams = [submit(node, "first"), submit(node, "second")]
    for stream in streams:
        await anext(stream)
    assert node.model("m").replicas == 2
    return streams


async def error_of(stream: AsyncIterator[Any]) -> CortexError:
    with pytest.raises(CortexError) as raised:
        async for _ in stream:
            pass
    return raised.value


async def cancelled(streams: list[Reader]) -> None:
    for stream in streams:
        stream.cancel()
        await tokens_of(stream)


async def test_a_replica_is_added_when_requests_wait_and_its_memory_counts_as_free(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(tmp_path), **LARGE_HOST) as node:
        before = await load(node)
        assert (before.replicas, len(before.devices)) == (1, 1)
        streams = await with_two_requests(node)
        status = node.model("m")
        assert (status.devices, status.measured_bytes) == (before.devices, before.measured_bytes)
        (extra,) = {0, 1} - set(status.devices)
        assert node.devices.supervisors[extra].has_models
        for device in node.health().devices:  # each has half of the host's memory
            assert device.free_bytes >= FREE_BYTES + MODEL_BYTES // 4
            assert MODEL_BYTES // 4 <= device.extra_replica_bytes < device.free_bytes
        await cancelled(streams)
        assert (await node.unload(UnloadRequest(model_id="m"))).state is ModelState.COLD
        assert not any(supervisor.has_models for supervisor in node.devices.supervisors.values())


async def test_an_idle_extra_replica_goes(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(tmp_path, remove_replica_after_s=0.2)) as node:
        streams = await with_two_requests(node)
        await cancelled(streams)
        await until(lambda: node.model("m").replicas == 1)
        assert await tokens_of(submit(node, "third", max_tokens=3)) == [1, 2, 3]


async def test_an_extra_replica_gives_way_to_a_load_that_needs_its_memory(tmp_path: Path) -> None:
    ceilings = [{"index": index, "memory_mb": 80} for index in (0, 1)]
    async with running_node(tmp_path, {**settings(tmp_path), "drain_s": 0.1, "devices": ceilings}) as node:
        streams = await with_two_requests(node)
        (extra,) = {0, 1} - set(node.model("m").devices)
        assert (await load(node, "other", devices=(extra,))).devices == (extra,)
        assert node.model("m").replicas == 1
        assert isinstance(await error_of(streams[1]), Recovering)
        assert await anext(streams[0])
        await cancelled(streams[:1])


async def test_an_extra_replica_stays_where_a_load_has_room_beside_it(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(tmp_path), **LARGE_HOST) as node:
        streams = await with_two_requests(node)
        (extra,) = {0, 1} - set(node.model("m").devices)
        await load(node, "other", devices=(extra,))
        assert node.model("m").replicas == 2
        for stream in streams:
            assert await anext(stream)
        await cancelled(streams)


async def test_a_load_ends_the_load_of_an_extra_replica(tmp_path: Path) -> None:
    config = settings(tmp_path)
    async with running_node(tmp_path, config) as node:
        await load(node)
        write_model(tmp_path / "m", pieces=100_000, piece_s=0.01)  # a later load never ends by itself
        streams = [submit(node, "first"), submit(node, "second")]
        (extra,) = {0, 1} - set(node.model("m").devices)
        await until(lambda: node.devices.supervisors[extra].has_models)
        assert (await load(node, "other", devices=(extra,))).state is ModelState.READY
        await cancelled(streams)


async def test_a_lost_extra_replica_fails_its_own_requests_and_demand_brings_it_back(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(tmp_path)) as node:
        streams = await with_two_requests(node)
        (extra,) = {0, 1} - set(node.model("m").devices)
        os.kill(worker_of(node, extra), signal.SIGKILL)
        assert isinstance(await error_of(streams[1]), Recovering)
        assert node.model("m").state is ModelState.READY
        assert node.model("m").replicas == 1
        again = submit(node, "again")
        await anext(again)
        assert node.model("m").replicas == 2
        await cancelled([streams[0], again])


async def test_the_extra_replica_serves_while_the_other_one_is_loaded_again(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(tmp_path)) as node:
        streams = await with_two_requests(node)
        (base,) = node.model("m").devices
        os.kill(worker_of(node, base), signal.SIGKILL)
        assert isinstance(await error_of(streams[0]), Recovering)
        assert node.model("m").state is ModelState.READY
        await until(lambda: node.devices.supervisors[base].has_models)
        assert await anext(streams[1])
        await cancelled(streams[1:])


async def test_sleep_ends_extra_replicas(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(tmp_path, sleep_mb=1000)) as node:
        streams = await with_two_requests(node)
        (extra,) = {0, 1} - set(node.model("m").devices)
        asleep = node.unload(UnloadRequest(model_id="m", sleep=True, force=True))
        assert (await asyncio.wait_for(asleep, WAIT_S)).state is ModelState.ASLEEP
        assert not node.devices.supervisors[extra].has_models
        for stream in streams:
            await error_of(stream)
        assert (await load(node)).replicas == 1
