"""What extra replicas hold of the devices, and how they give it back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

import pytest

from cortex.neuron.engine.request import EngineInfo, EngineRequest, LoadSpec
from cortex.neuron.node.memory.ceilings import Ceilings
from cortex.neuron.node.replicas.extras import ExtraReplicas
from cortex.neuron.worker.discovery import DeviceReading
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import ModelHost, ModelSink, Resident
from cortex.neuron.worker.replicas.host import WorkerReplicas
from cortex.wire.node.protocol import Device

from ...worker.recording_sink import RecordingSink

INFO = EngineInfo("llama", "float32", 512, 100, weight_bytes=10, kv_bytes=5, page_tokens=32, num_pages=7)


class Host:
    """A device whose loads end when they may."""

    freed_at_s = 0.0

    def __init__(self, index: int, *, may_load: bool = True) -> None:
        self.device_indices = (index,)
        self.replica_devices = ((index,),)
        self.may_load = asyncio.Event()
        if may_load:
            self.may_load.set()
        self.has_model = False

    def opened(self) -> ModelHost:
        return self

    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident:
        await self.may_load.wait()
        self.has_model = True
        return Resident(1, INFO, measured_bytes=20, process_bytes=20)

    async def unload(self, resident: Resident) -> Reclaimed:
        self.has_model = False
        return Reclaimed(20, 20)

    async def sleep(self, resident: Resident) -> Resident:
        return resident

    async def wake(self, resident: Resident) -> Resident:
        return resident

    def submit(self, resident: Resident, request: EngineRequest) -> None: ...
    def cancel(self, resident: Resident, request_id: str) -> None: ...
    def stop_reloads(self) -> None: ...


def extras_on(kind: Literal["cuda", "cpu"], *, node_bytes: int | None = None) -> ExtraReplicas:
    devices = [Device(index=index, kind=kind, name=kind, total_bytes=100) for index in range(4)]
    return ExtraReplicas(devices, Ceilings(node_bytes))


async def replicas_on(index: int) -> WorkerReplicas:
    replicas = WorkerReplicas([Host(index).opened], lambda _: contextlib.nullcontext())
    await replicas.load(LoadSpec("m"), RecordingSink())
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
        assert await extras.add(replicas, Host(index), LoadSpec("m"), 100)
    assert free(extras, 50, 50, 50, 90) == expected


async def test_memory_that_a_load_of_an_extra_replica_has_taken_counts_as_free() -> None:
    extras, replicas, host = extras_on("cuda"), await replicas_on(0), Host(1, may_load=False)
    load = asyncio.create_task(extras.add(replicas, host, LoadSpec("m"), 80))
    await asyncio.sleep(0)
    assert extras.are_loading((1,))
    assert free(extras, 50, 45, 50, 50) == [50, 80, 50, 50]
    await extras.give_back((1,), 0.0, only_loading=True)
    assert not await load
    assert free(extras, 50, 80, 50, 50) == [50, 80, 50, 50]


async def test_gives_back_what_is_on_the_devices() -> None:
    extras, replicas, hosts = extras_on("cuda"), await replicas_on(0), [Host(1), Host(2)]
    for host in hosts:
        await extras.add(replicas, host, LoadSpec("m"), 100)
    await extras.give_back((1,), 0.0, only_loading=True)
    assert [host.has_model for host in hosts] == [True, True]
    await extras.give_back((1,), 0.0)
    assert [host.has_model for host in hosts] == [False, True]
    assert extras.num_bytes((1, 2), {}) == 20


def test_loads_take_memory_from_extra_replicas_of_devices_that_share_it() -> None:
    assert extras_on("cuda").sharing((1,)) == {1}
    assert extras_on("cuda", node_bytes=5).sharing((1,)) == {0, 1, 2, 3}
    assert extras_on("cpu").sharing((1,)) == {0, 1, 2, 3}
