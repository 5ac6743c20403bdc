"""Where requests go among the replicas of a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from cortex.neuron.engine.request import EngineRequest, EngineStats, StepOutput
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.hosts.replica import HostReplica
from cortex.neuron.worker.hosts.replicated import ReplicatedHost
from cortex.neuron.worker.model_host import Damaged, LoadRejected, SleepRejected
from cortex.neuron.worker.process import WorkerLost

from ....waiting import WAIT_S, until
from ..recording_sink import RecordingSink
from .fake_host import INFO, FakeHost

NO_ROOM = LoadRejected(FaultKind.OUT_OF_MEMORY, "no room")
Loaded = tuple[ReplicatedHost, list[FakeHost], RecordingSink]


def replicated(*hosts: FakeHost, policy: BackoffPolicy | None = None) -> ReplicatedHost:
    return ReplicatedHost("m", [host.again for host in hosts], lambda _: contextlib.nullcontext(), policy)


@pytest_asyncio.fixture(loop_scope="session")
async def loaded() -> AsyncIterator[Loaded]:
    hosts, sink = [FakeHost(0), FakeHost(1)], RecordingSink()
    replicas = replicated(*hosts)
    await replicas.load(sink)
    yield replicas, hosts, sink
    replicas.stop_reloads()


def request(name: str, tokens: int = 4, first: int = 0) -> EngineRequest:
    return EngineRequest(name, tuple(range(first, first + tokens)), max_tokens=5)


async def test_sizes_are_those_of_all_replicas(loaded: Loaded) -> None:
    replicas, _, _ = loaded
    resident = replicas.resident
    assert resident is not None
    assert replicas.device_indices == (0, 1)
    assert (resident.measured_bytes, resident.info.num_pages, resident.info.context_tokens) == (40, 14, 512)


async def test_context_is_the_smallest_of_all_replicas_and_none_with_less_comes_back() -> None:
    first, second = FakeHost(0), FakeHost(1)
    second.info = replace(INFO, context_tokens=256)
    replicas = replicated(first, second)
    resident = await replicas.load(RecordingSink())
    assert resident.info.context_tokens == 256
    first.info = replace(INFO, context_tokens=255)
    first.lose("killed")
    await until(lambda: first.num_unloads)
    replicas.submit(request("a"))
    assert (first.requests, second.requests) == ([], ["a"])
    replicas.stop_reloads()


async def test_request_goes_to_the_replica_with_the_fewest_requests(loaded: Loaded) -> None:
    replicas, (first, second), _ = loaded
    for name in "abcd":
        replicas.submit(request(name))
    assert (first.requests, second.requests) == (["a", "c"], ["b", "d"])
    first.sink.on_outputs((StepOutput("a", finish="stop"), StepOutput("c", finish="stop")))
    replicas.submit(request("e"))
    replicas.submit(request("f"))
    assert first.requests[-2:] == ["e", "f"]
    replicas.cancel("d")
    assert second.requests == ["b"]


async def test_prompt_goes_where_its_prefix_was_computed_unless_that_replica_is_busy(loaded: Loaded) -> None:
    replicas, (first, second), _ = loaded
    replicas.submit(request("a", 4000))
    replicas.submit(request("b", 4000, first=9000))
    first.sink.on_outputs((StepOutput("a", finish="stop"),))
    second.sink.on_outputs((StepOutput("b", finish="stop"),))
    replicas.submit(request("c", first=9000))
    replicas.submit(request("again", 5000, first=9000))
    assert (first.requests, second.requests) == (["a", "c"], ["b", "again"])
    replicas.submit(request("third", 6000, first=9000))
    assert second.requests[-1] == "third", "although it has more requests"
    for number in range(40):
        replicas.submit(request(f"long {number}", 5000, first=9000))
    assert len(first.requests) > 10, "work ahead costs more than a prefix saves"


async def test_prompt_of_another_tenant_is_not_drawn_to_a_prefix(loaded: Loaded) -> None:
    replicas, (first, second), _ = loaded
    replicas.submit(request("a", 4000))
    replicas.submit(replace(request("b", 4000), tenant=b"of one tenant..."))
    assert (first.requests, second.requests) == (["a"], ["b"])
    replicas.submit(replace(request("c", 5000), tenant=b"of one tenant..."))
    assert second.requests[-1] == "c"
    replicas.submit(replace(request("d", 5000), tenant=b"of another one.."))
    assert first.requests[-1] == "d", "it has less to do"


class Sharing:
    """Lets one replica read what another one has computed, when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.is_done = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, request: EngineRequest, source: HostReplica, target: HostReplica) -> None:
        self.asked.append((request.id, source.host.device_indices, target.host.device_indices))
        await self.is_done.wait()
        if self.error is not None:
            raise self.error


@pytest_asyncio.fixture(loop_scope="session")
async def moving() -> AsyncIterator[tuple[Loaded, Sharing]]:
    """A conversation that was computed on the first replica continues on the second, as the first one is full."""
    hosts, sink, sharing = [FakeHost(0), FakeHost(1)], RecordingSink(), Sharing()
    new_hosts = [host.again for host in hosts]
    replicas = ReplicatedHost("m", new_hosts, lambda _: contextlib.nullcontext(), share=sharing)
    await replicas.load(sink)
    replicas.submit(request("a", 4000))
    hosts[0].sink.on_stats(EngineStats(running=1, used_pages=7, num_pages=7))
    replicas.submit(request("moved", 5000))
    await until(lambda: sharing.asked)
    yield (replicas, hosts, sink), sharing
    replicas.stop_reloads()


@pytest.mark.parametrize("error", [None, RuntimeError("of the disk")])
async def test_request_that_moves_to_another_replica_gets_its_prefix_first(
    moving: tuple[Loaded, Sharing], error: Exception | None
) -> None:
    (replicas, (first, second), _), sharing = moving
    assert sharing.asked == [("moved", (0,), (1,))]
    assert (first.requests, second.requests) == (["a"], [])
    sharing.error = error
    sharing.is_done.set()
    await until(lambda: second.requests == ["moved"])
    replicas.cancel("moved")
    assert second.requests == []


async def test_request_is_cancelled_while_it_waits_for_its_prefix(moving: tuple[Loaded, Sharing]) -> None:
    (replicas, (_, second), _), sharing = moving
    cancelled: list[str] = []
    second.cancel = cancelled.append  # type: ignore[assignment, method-assign]
    replicas.cancel("moved")
    assert (second.requests, cancelled) == (["moved"], ["moved"]), "its replica reports the end"
    sharing.is_done.set()
    await asyncio.sleep(0)
    assert second.requests == ["moved"], "it is not sent twice"


async def test_request_fails_if_its_replica_is_lost_while_it_waits_for_its_prefix(
    moving: tuple[Loaded, Sharing],
) -> None:
    (_, (_, second), sink), sharing = moving
    second.lose("killed")
    assert list(sink.failed) == ["moved"]
    sharing.is_done.set()
    await asyncio.sleep(0)
    assert second.requests == []


async def test_lost_replica_fails_its_own_requests_and_comes_back(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    replicas, (first, second), sink = loaded
    replicas.submit(request("a"))
    replicas.submit(request("b"))
    first.sink.on_stats(EngineStats(completion_tokens=5, used_pages=3))
    old = first.sink
    first.lose("killed")
    assert [(name, kind) for name, (kind, _) in sink.failed.items()] == [("a", FaultKind.DEVICE)]
    assert sink.lost == []
    assert caplog.messages == ["the replica of m on device 0 is lost: killed"], "which nobody else reports"
    second.sink.on_stats(EngineStats(completion_tokens=2, used_pages=1))
    assert (sink.stats.completion_tokens, sink.stats.used_pages) == (7, 1)
    replicas.submit(request("c"))
    assert second.requests == ["b", "c"]
    await until(lambda: first.sink is not old)
    await asyncio.sleep(0)
    replicas.submit(request("d"))
    assert first.requests[-1] == "d"


async def test_replica_that_is_given_up_does_not_count_until_it_is_tried_again() -> None:
    first, second, sink = FakeHost(0), FakeHost(1), RecordingSink()
    replicas = replicated(first, second, policy=BackoffPolicy(max_streak=1))
    await replicas.load(sink)
    first.errors["load"], sink.stats = NO_ROOM, EngineStats(waiting=9)
    first.lose("killed")
    shown = [replicas.replica_devices]
    async with asyncio.timeout(WAIT_S):
        while shown[-1] != ((1,),):
            await asyncio.sleep(0)
            shown.append(replicas.replica_devices)
    assert shown[0] == ((0,), (1,)), "it is loaded again first"
    assert sink.stats == EngineStats(), "which has the model count its slots again"
    assert replicas.device_indices == (0, 1)
    assert replicas.taken_devices == (0, 1), "no extra replica takes its place there"
    await replicas.sleep()
    await replicas.wake()
    assert len(replicas.replica_devices) == 2
    replicas.stop_reloads()


async def test_extra_replica_serves_and_is_not_among_devices_and_sizes(loaded: Loaded) -> None:
    replicas, (first, second), sink = loaded
    third = FakeHost(2)
    extra = await replicas.extras.add(third)
    assert extra is not None
    assert (replicas.device_indices, replicas.replica_devices) == ((0, 1), ((0,), (1,), (2,)))
    for name in "abc":
        replicas.submit(request(name))
    assert third.requests == ["c"]
    assert replicas.extras.idle() == []
    third.sink.on_stats(EngineStats(completion_tokens=5, num_pages=7))
    assert sink.stats.completion_tokens == 5
    removal = asyncio.create_task(replicas.extras.remove(extra, WAIT_S))
    await asyncio.sleep(0)
    for name in "de":
        replicas.submit(request(name))
    assert (first.requests, second.requests, third.num_unloads) == (["a", "d"], ["b", "e"], 0)
    third.sink.on_outputs((StepOutput("c", finish="stop"),))
    await removal
    assert (third.num_unloads, len(replicas.replica_devices), sink.failed) == (1, 2, {})
    assert (sink.stats.completion_tokens, sink.stats.num_pages) == (5, 0)


async def test_requests_that_outlast_the_drain_of_an_extra_replica_fail(loaded: Loaded) -> None:
    replicas, _, sink = loaded
    third = FakeHost(2)
    extra = await replicas.extras.add(third)
    assert extra is not None
    for name in "abc":
        replicas.submit(request(name))
    await replicas.extras.remove(extra, 0.0)
    assert {name: kind for name, (kind, _) in sink.failed.items()} == {"c": FaultKind.DEVICE}
    assert (third.requests, third.num_unloads) == ([], 1)


async def test_extra_replica_with_less_context_is_unloaded_again(loaded: Loaded) -> None:
    replicas, _, _ = loaded
    third = FakeHost(2)
    third.info = replace(INFO, context_tokens=INFO.context_tokens - 1)
    with pytest.raises(LoadRejected, match="511 tokens of context, not 512"):
        await replicas.extras.add(third)
    assert (third.num_unloads, len(replicas.replica_devices)) == (1, 2)


async def test_lost_extra_replica_fails_its_own_requests_and_stays_lost(loaded: Loaded) -> None:
    replicas, (first, _), sink = loaded
    third = FakeHost(2)
    await replicas.extras.add(third)
    for name in "abc":
        replicas.submit(request(name))
    old, old_first = third.sink, first.sink
    third.lose("killed")
    assert (list(sink.failed), len(replicas.replica_devices)) == (["c"], 2)
    first.lose("killed")
    await until(lambda: first.sink is not old_first)
    assert third.sink is old


async def test_model_is_lost_once_when_its_extra_replica_goes_after_all_others(loaded: Loaded) -> None:
    replicas, (first, second), sink = loaded
    third = FakeHost(2)
    extra = await replicas.extras.add(third)
    assert extra is not None
    first.errors["load"] = second.errors["load"] = NO_ROOM
    first.lose("one")
    second.lose("two")
    assert sink.lost == []
    await replicas.extras.remove(extra, 0.0)
    third.lose("three")
    assert (sink.lost, third.num_unloads) == (["its last replica was unloaded"], 1)


@pytest.mark.parametrize("ending", ["sleep", "unload"])
async def test_extra_replicas_end_with_the_model(loaded: Loaded, ending: str) -> None:
    replicas, _, _ = loaded
    third, fourth = FakeHost(2), FakeHost(3)
    await replicas.extras.add(third)
    fourth.may_load.clear()
    late = asyncio.create_task(replicas.extras.add(fourth))
    await asyncio.sleep(0)
    await (replicas.sleep() if ending == "sleep" else replicas.unload())
    assert (third.num_unloads, late.cancelled(), len(replicas.replica_devices)) == (1, True, 2)
    assert await replicas.extras.add(fourth) is None


async def test_replica_lost_in_its_sleep_comes_back_when_the_model_wakes(loaded: Loaded) -> None:
    replicas, (first, second), _ = loaded
    assert (await replicas.sleep()).host_bytes == 20
    old = first.sink
    first.lose("killed")
    for _ in range(10):  # more turns of the loop than a reload takes
        await asyncio.sleep(0)
    assert first.sink is old
    await replicas.wake()
    await until(lambda: first.sink is not old)
    replicas.stop_reloads()
    replicas.submit(request("a"))
    assert second.requests + first.requests == ["a"]


async def test_loss_of_the_last_replica_is_the_loss_of_the_model(loaded: Loaded) -> None:
    replicas, (first, second), sink = loaded
    first.errors["load"] = NO_ROOM
    first.lose("one")
    second.lose("two")
    assert sink.lost == ["two"]
    replicas.submit(request("a"))
    assert (first.requests, second.requests) == ([], [])


async def test_failed_load_of_one_replica_leaves_none() -> None:
    hosts = [FakeHost(0), FakeHost(1)]
    hosts[1].errors["load"] = NO_ROOM
    with pytest.raises(LoadRejected):
        await replicated(*hosts).load(RecordingSink())
    assert (hosts[0].num_unloads, hosts[1].num_unloads) == (1, 0)


async def test_replica_lost_during_the_load_of_another_fails_the_load() -> None:
    hosts, sink = [FakeHost(0), FakeHost(1), FakeHost(2)], RecordingSink()
    hosts[1].may_load.clear()
    load = asyncio.create_task(replicated(*hosts).load(sink))
    await hosts[2].loaded.wait()
    await asyncio.sleep(0)
    hosts[0].lose("killed")
    with pytest.raises(WorkerLost, match="killed"):
        await load
    assert ([host.num_unloads for host in hosts], sink.lost) == ([0, 0, 1], [])


async def test_failed_wake_of_one_replica_unloads_the_others(loaded: Loaded) -> None:
    replicas, hosts, _ = loaded
    await replicas.sleep()

    hosts[1].errors["wake"] = Damaged("other results than before")
    hosts[1].resident = None
    with pytest.raises(Damaged):
        await replicas.wake()
    assert [host.num_unloads for host in hosts] == [1, 0]


async def test_nothing_is_left_of_a_model_whose_replicas_can_neither_wake_nor_sleep_again(loaded: Loaded) -> None:
    replicas, hosts, _ = loaded
    await replicas.sleep()
    hosts[1].errors["wake"] = NO_ROOM
    hosts[0].errors["sleep"] = SleepRejected("no room in host memory")
    with pytest.raises(Damaged, match="no room in host memory"):
        await replicas.wake()
    assert [host.num_unloads for host in hosts] == [1, 1]


async def test_reload_that_sleep_interrupts_is_repeated_after_the_wake(loaded: Loaded) -> None:
    replicas, (first, _), _ = loaded
    old = first.sink
    first.lose("killed")
    await replicas.sleep()
    assert first.sink is old
    await replicas.wake()
    await until(lambda: first.sink is not old)
