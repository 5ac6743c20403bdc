"""What extra replicas hold of the devices, and how they give it back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

import pytest

from cortex.neuron.node.devices import ExtraReplicas
from cortex.neuron.node.memory.ceilings import Ceilings
from cortex.neuron.worker.discovery import DeviceReading
from cortex.neuron.worker.hosts.replicated import ReplicatedHost
from cortex.wire.node.protocol import Device

from ..worker.hosts.fake_host import FakeHost
from ..worker.recording_sink import RecordingSink


def extras_on(kind: Literal["cuda", "cpu"], *, node_bytes: int | None = None) -> ExtraReplicas:
    devices = [Device(index=index, kind=kind, name=kind, total_bytes=100) for index in range(4)]
    return ExtraReplicas(devices, Ceilings(node_bytes))


async def replicas_on(index: int) -> ReplicatedHost:
    replicas = ReplicatedHost("m", [FakeHost(index).again], lambda _: contextlib.nullcontext())
    await replicas.load(RecordingSink())
    return replicas


def free(extras: ExtraReplicas, *free_bytes: int) -> list[int]:
    readings = {index: DeviceReading(100, num_bytes) for index, num_bytes in enumerate(free_bytes)}
    return [reading.free_bytes for reading in extras.without(readings).values()]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("cuda", [50, 70, 50, 100]), ("cpu", [60, 60, 60, 100])],
)
async def test_memory_of_extra_replicas_counts_as_free(kind: Literal["cuda", "cpu"], expected: list[int]) -> None:
    extras, replicas = extras_on(kind), await replicas_on(0)
    for index in (1, 3):
        assert await extras.add(replicas, FakeHost(index), 100)
    assert free(extras, 50, 50, 50, 90) == expected


async def test_memory_that_a_load_of_an_extra_replica_has_taken_counts_as_free() -> None:
    extras, replicas, host = extras_on("cuda"), await replicas_on(0), FakeHost(1)
    host.may_load.clear()
    load = asyncio.create_task(extras.add(replicas, host, 80))
    await asyncio.sleep(0)
    assert extras.are_loading((1,))
    assert free(extras, 50, 45, 50, 50) == [50, 80, 50, 50]
    await extras.give_back((1,), 0.0, only_loading=True)
    assert not await load
    assert free(extras, 50, 80, 50, 50) == [50, 80, 50, 50]


async def test_gives_back_what_is_on_the_devices() -> None:
    extras, replicas, hosts = extras_on("cuda"), await replicas_on(0), [FakeHost(1), FakeHost(2)]
    for host in hosts:
        await extras.add(replicas, host, 100)
    await extras.give_back((1,), 0.0, only_loading=True)
    assert [host.resident is not None for host in hosts] == [True, True]
    await extras.give_back((1,), 0.0)
    assert [host.resident is not None for host in hosts] == [False, True]
    assert extras.num_bytes((1, 2), {}) == 20


def test_loads_take_memory_from_extra_replicas_of_devices_that_share_it() -> None:
    assert extras_on("cuda").sharing((1,)) == {1}
    assert extras_on("cuda", node_bytes=5).sharing((1,)) == {0, 1, 2, 3}
    assert extras_on("cpu").sharing((1,)) == {0, 1, 2, 3}
