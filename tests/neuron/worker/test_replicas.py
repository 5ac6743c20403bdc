"""Where requests go among the replicas of a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, LoadSpec, StepOutput
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelHost, ModelSink, Resident, SleepRejected
from cortex.neuron.worker.process import WorkerLost
from cortex.neuron.worker.replicas.host import WorkerReplicas
from cortex.neuron.worker.replicas.prefix_memory import BLOCK_TOKENS, PrefixMemory

from .recording_sink import RecordingSink

INFO = EngineInfo("llama", "float32", 512, 100, weight_bytes=10, kv_bytes=5, page_tokens=32, num_pages=7)


class FakeHost:
    """A device that holds a model and computes nothing."""

    freed_at_s = 0.0

    def __init__(self, index: int) -> None:
        self.device_indices = (index,)
        self.replica_devices = ((index,),)
        self.requests: list[str] = []
        self.fails = False
        self.is_damaged = False
        self.stays_asleep = self.stays_awake = False
        self.sink: ModelSink = RecordingSink()
        self.is_loaded = False
        self.unloaded = 0
        self.info = INFO
        self.never_loads = False

    def opened(self) -> ModelHost:
        return self

    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident:
        if self.fails:
            raise LoadRejected(FaultKind.OUT_OF_MEMORY, "no room")
        if self.never_loads:
            await asyncio.Event().wait()
        self.sink, self.is_loaded = sink, True
        return Resident(1, self.info, measured_bytes=20, process_bytes=20)

    async def unload(self, resident: Resident) -> Reclaimed:
        self.unloaded += 1
        return Reclaimed(20, 20)

    async def sleep(self, resident: Resident) -> Resident:
        if self.stays_awake:
            raise SleepRejected("no room in host memory")
        return replace(resident, host_bytes=10)

    async def wake(self, resident: Resident) -> Resident:
        if self.is_damaged:
            raise Damaged("other results than before")
        if self.stays_asleep:
            raise LoadRejected(FaultKind.OUT_OF_MEMORY, "no room")
        return replace(resident, host_bytes=0)

    def submit(self, resident: Resident, request: EngineRequest) -> None:
        self.requests.append(request.id)

    def cancel(self, resident: Resident, request_id: str) -> None:
        self.requests.remove(request_id)

    def stop_reloads(self) -> None: ...


Loaded = tuple[WorkerReplicas, Resident, list[FakeHost], RecordingSink]


def replicas_of(*hosts: FakeHost) -> WorkerReplicas:
    return WorkerReplicas([host.opened for host in hosts], lambda _: contextlib.nullcontext())


@pytest_asyncio.fixture(loop_scope="session")
async def loaded() -> AsyncIterator[Loaded]:
    hosts, sink = [FakeHost(0), FakeHost(1)], RecordingSink()
    replicas = replicas_of(*hosts)
    resident = await replicas.load(LoadSpec("m"), sink)
    yield replicas, resident, hosts, sink
    replicas.stop_reloads()


def request(name: str, tokens: int = 4, first: int = 0) -> EngineRequest:
    return EngineRequest(name, tuple(range(first, first + tokens)), max_tokens=5)


async def test_sizes_are_those_of_all_replicas(loaded: Loaded) -> None:
    replicas, resident, _, _ = loaded
    assert replicas.device_indices == (0, 1)
    assert (resident.measured_bytes, resident.info.num_pages, resident.info.context_tokens) == (40, 14, 512)


async def test_context_is_the_smallest_of_all_replicas_and_none_with_less_comes_back() -> None:
    first, second = FakeHost(0), FakeHost(1)
    second.info = replace(INFO, context_tokens=256)
    replicas = replicas_of(first, second)
    resident = await replicas.load(LoadSpec("m"), RecordingSink())
    assert resident.info.context_tokens == 256
    first.info = replace(INFO, context_tokens=255)
    first.sink.on_lost("killed")
    while not first.unloaded:
        await asyncio.sleep(0)
    replicas.submit(resident, request("a"))
    assert (first.requests, second.requests) == ([], ["a"])
    replicas.stop_reloads()


async def test_request_goes_to_the_replica_with_the_fewest_requests(loaded: Loaded) -> None:
    replicas, resident, (first, second), _ = loaded
    for name in "abcd":
        replicas.submit(resident, request(name))
    assert (first.requests, second.requests) == (["a", "c"], ["b", "d"])
    first.sink.on_outputs((StepOutput("a", finish="stop"), StepOutput("c", finish="stop")))
    replicas.submit(resident, request("e"))
    replicas.submit(resident, request("f"))
    assert first.requests[-2:] == ["e", "f"]
    replicas.cancel(resident, "d")
    assert second.requests == ["b"]


async def test_prompt_goes_where_its_prefix_was_computed_unless_that_replica_is_busy(loaded: Loaded) -> None:
    replicas, resident, (first, second), _ = loaded
    replicas.submit(resident, request("a", 4 * BLOCK_TOKENS))
    first.sink.on_outputs((StepOutput("a", finish="stop"),))
    replicas.submit(resident, request("other", first=9000))
    replicas.submit(resident, request("again", 5 * BLOCK_TOKENS))
    assert (first.requests, second.requests) == (["a", "other"], ["again"])  # 1500 tokens of work ahead weigh more
    first.sink.on_outputs((StepOutput("other", finish="stop"),))
    second.sink.on_outputs((StepOutput("again", finish="stop"),))
    replicas.submit(resident, request("long", 6 * BLOCK_TOKENS))
    assert second.requests[-1] == "long"  # five blocks are known there, four on the first


async def test_lost_replica_fails_its_own_requests_and_comes_back(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    replicas, resident, (first, second), sink = loaded
    replicas.submit(resident, request("a"))
    replicas.submit(resident, request("b"))
    first.sink.on_stats(EngineStats(completion_tokens=5, used_pages=3))
    old = first.sink
    old.on_lost("killed")
    assert [(name, kind) for name, (kind, _) in sink.failed.items()] == [("a", FaultKind.DEVICE)]
    assert sink.lost == []
    assert caplog.messages == ["the replica of m on device 0 is lost: killed"], "which nobody else reports"
    second.sink.on_stats(EngineStats(completion_tokens=2, used_pages=1))
    assert (sink.stats.completion_tokens, sink.stats.used_pages) == (7, 1)
    replicas.submit(resident, request("c"))
    assert second.requests == ["b", "c"]
    while first.sink is old:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    replicas.submit(resident, request("d"))
    assert first.requests[-1] == "d"


async def test_replica_that_is_given_up_does_not_count_until_it_is_tried_again() -> None:
    first, second, sink = FakeHost(0), FakeHost(1), RecordingSink()
    policy = BackoffPolicy(max_streak=1)
    replicas = WorkerReplicas([first.opened, second.opened], lambda _: contextlib.nullcontext(), policy)
    resident = await replicas.load(LoadSpec("m"), sink)
    first.fails, sink.stats = True, EngineStats(waiting=9)
    first.sink.on_lost("killed")
    shown = [replicas.replica_devices]
    while shown[-1] != ((1,),):
        await asyncio.sleep(0)
        shown.append(replicas.replica_devices)
    assert shown[0] == ((0,), (1,)), "it is loaded again first"
    assert sink.stats == EngineStats(), "which has the model count its slots again"
    assert replicas.device_indices == (0, 1)
    assert replicas.taken_devices == (0, 1), "no extra replica takes its place there"
    await replicas.wake(await replicas.sleep(resident))
    assert len(replicas.replica_devices) == 2
    replicas.stop_reloads()


async def test_extra_replica_serves_and_is_not_among_devices_and_sizes(loaded: Loaded) -> None:
    replicas, resident, (first, second), sink = loaded
    third = FakeHost(2)
    extra = await replicas.extras.add(third, LoadSpec("m"))
    assert extra is not None
    assert (replicas.device_indices, replicas.replica_devices) == ((0, 1), ((0,), (1,), (2,)))
    for name in "abc":
        replicas.submit(resident, request(name))
    assert third.requests == ["c"]
    assert replicas.extras.idle() == []
    third.sink.on_stats(EngineStats(completion_tokens=5, num_pages=7))
    assert sink.stats.completion_tokens == 5
    removal = asyncio.create_task(replicas.extras.remove(extra, 60.0))
    await asyncio.sleep(0)
    for name in "de":
        replicas.submit(resident, request(name))
    assert (first.requests, second.requests, third.unloaded) == (["a", "d"], ["b", "e"], 0)
    third.sink.on_outputs((StepOutput("c", finish="stop"),))
    await removal
    assert (third.unloaded, len(replicas.replica_devices), sink.failed) == (1, 2, {})
    assert (sink.stats.completion_tokens, sink.stats.num_pages) == (5, 0)


async def test_requests_that_outlast_the_drain_of_an_extra_replica_fail(loaded: Loaded) -> None:
    replicas, resident, _, sink = loaded
    third = FakeHost(2)
    extra = await replicas.extras.add(third, LoadSpec("m"))
    assert extra is not None
    for name in "abc":
        replicas.submit(resident, request(name))
    await replicas.extras.remove(extra, 0.0)
    assert {name: kind for name, (kind, _) in sink.failed.items()} == {"c": FaultKind.DEVICE}
    assert (third.requests, third.unloaded) == ([], 1)


async def test_extra_replica_with_less_context_is_unloaded_again(loaded: Loaded) -> None:
    replicas, _, _, _ = loaded
    third = FakeHost(2)
    third.info = replace(INFO, context_tokens=INFO.context_tokens - 1)
    with pytest.raises(LoadRejected, match="511 tokens of context, not 512"):
        await replicas.extras.add(third, LoadSpec("m"))
    assert (third.unloaded, len(replicas.replica_devices)) == (1, 2)


async def test_lost_extra_replica_fails_its_own_requests_and_stays_lost(loaded: Loaded) -> None:
    replicas, resident, _, sink = loaded
    third = FakeHost(2)
    await replicas.extras.add(third, LoadSpec("m"))
    for name in "abc":
        replicas.submit(resident, request(name))
    old = third.sink
    old.on_lost("killed")
    assert (list(sink.failed), len(replicas.replica_devices)) == (["c"], 2)
    await asyncio.sleep(0.05)
    assert third.sink is old


async def test_model_is_lost_once_when_its_extra_replica_goes_after_all_others(loaded: Loaded) -> None:
    replicas, _, (first, second), sink = loaded
    third = FakeHost(2)
    extra = await replicas.extras.add(third, LoadSpec("m"))
    assert extra is not None
    first.fails = second.fails = True
    first.sink.on_lost("one")
    second.sink.on_lost("two")
    assert sink.lost == []
    await replicas.extras.remove(extra, 0.0)
    third.sink.on_lost("three")
    assert (sink.lost, third.unloaded) == (["its last replica was unloaded"], 1)


@pytest.mark.parametrize("ending", ["sleep", "unload"])
async def test_extra_replicas_end_with_the_model(loaded: Loaded, ending: str) -> None:
    replicas, resident, _, _ = loaded
    third, fourth = FakeHost(2), FakeHost(3)
    await replicas.extras.add(third, LoadSpec("m"))
    fourth.never_loads = True
    late = asyncio.create_task(replicas.extras.add(fourth, LoadSpec("m")))
    await asyncio.sleep(0)
    await (replicas.sleep(resident) if ending == "sleep" else replicas.unload(resident))
    assert (third.unloaded, await late, len(replicas.replica_devices)) == (1, None, 2)
    assert await replicas.extras.add(fourth, LoadSpec("m")) is None


async def test_replica_lost_in_its_sleep_comes_back_when_the_model_wakes(loaded: Loaded) -> None:
    replicas, resident, (first, second), _ = loaded
    asleep = await replicas.sleep(resident)
    assert asleep.host_bytes == 20
    old = first.sink
    old.on_lost("killed")
    await asyncio.sleep(0.05)
    assert first.sink is old
    await replicas.wake(asleep)
    while first.sink is old:
        await asyncio.sleep(0)
    replicas.stop_reloads()
    replicas.submit(resident, request("a"))
    assert second.requests + first.requests == ["a"]


async def test_loss_of_the_last_replica_is_the_loss_of_the_model(loaded: Loaded) -> None:
    replicas, resident, (first, second), sink = loaded
    first.fails = True
    first.sink.on_lost("one")
    second.sink.on_lost("two")
    assert sink.lost == ["two"]
    replicas.submit(resident, request("a"))
    assert (first.requests, second.requests) == ([], [])


async def test_failed_load_of_one_replica_leaves_none() -> None:
    hosts = [FakeHost(0), FakeHost(1)]
    hosts[1].fails = True
    with pytest.raises(LoadRejected):
        await replicas_of(*hosts).load(LoadSpec("m"), RecordingSink())
    assert (hosts[0].unloaded, hosts[1].unloaded) == (1, 0)


def test_prefix_memory_forgets_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex.neuron.worker.replicas.prefix_memory.MAX_BLOCKS", 2)
    memory = PrefixMemory()
    prompts = [[number] * BLOCK_TOKENS for number in range(3)]
    for prompt in prompts:
        memory.add(prompt)
    assert [memory.num_known_tokens(prompt) for prompt in prompts] == [0, BLOCK_TOKENS, BLOCK_TOKENS]
    assert memory.num_known_tokens(prompts[2] + [7] * BLOCK_TOKENS) == BLOCK_TOKENS


async def test_replica_lost_during_the_load_of_another_fails_the_load() -> None:
    class Slow(FakeHost):
        async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident:
            await asyncio.Event().wait()
            raise AssertionError("nothing sets it")

    hosts, sink = [FakeHost(0), Slow(1), FakeHost(2)], RecordingSink()
    load = asyncio.create_task(replicas_of(*hosts).load(LoadSpec("m"), sink))
    while not hosts[2].is_loaded:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    hosts[0].sink.on_lost("killed")
    with pytest.raises(WorkerLost, match="killed"):
        await load
    assert ([host.unloaded for host in hosts], sink.lost) == ([0, 0, 1], [])


async def test_failed_wake_of_one_replica_unloads_the_others(loaded: Loaded) -> None:
    replicas, resident, hosts, _ = loaded
    asleep = await replicas.sleep(resident)

    hosts[1].is_damaged = True
    with pytest.raises(Damaged):
        await replicas.wake(asleep)
    assert [host.unloaded for host in hosts] == [1, 0]


async def test_nothing_is_left_of_a_model_whose_replicas_can_neither_wake_nor_sleep_again(loaded: Loaded) -> None:
    replicas, resident, hosts, _ = loaded
    asleep = await replicas.sleep(resident)
    hosts[1].stays_asleep = hosts[0].stays_awake = True
    with pytest.raises(WorkerLost, match="no room in host memory"):
        await replicas.wake(asleep)
    assert [host.unloaded for host in hosts] == [1, 1]


async def test_reload_that_sleep_interrupts_is_repeated_after_the_wake(loaded: Loaded) -> None:
    replicas, resident, (first, _), _ = loaded
    old = first.sink
    old.on_lost("killed")
    asleep = await replicas.sleep(resident)
    assert first.sink is old
    await replicas.wake(asleep)
    async with asyncio.timeout(30):
        while first.sink is old:
            await asyncio.sleep(0.01)
