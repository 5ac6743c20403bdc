"""The order in which the ranks of a divided model are loaded, put to sleep, woken, unloaded and replaced."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import pytest_asyncio

from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.hosts.sharded import ShardedHost
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelSink, Resident, SleepRejected
from cortex.neuron.worker.process import WorkerLost

from ..recording_sink import RecordingSink
from .fake_host import FakeHost

NO_ROOM = LoadRejected(FaultKind.OUT_OF_MEMORY, "no room")


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest_asyncio.fixture(loop_scope="session")
async def ranks(calls: list[str]) -> list[FakeHost]:
    return [FakeHost(index, calls) for index in (1, 4, 6)]


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest_asyncio.fixture(loop_scope="session")
async def host(ranks: list[FakeHost]) -> ShardedHost:
    return ShardedHost(ranks[0], ranks[1:], contextlib.nullcontext())


async def test_all_are_counted_together_and_the_leader_gets_the_requests(
    host: ShardedHost, ranks: list[FakeHost], sink: RecordingSink
) -> None:
    resident = await host.load(sink)
    assert (host.device_indices, host.freed_at_s) == ((1, 4, 6), 6.0)
    assert (resident.measured_bytes, resident.info.weight_bytes, resident.info.num_pages) == (60, 30, 7)
    assert host.resident == resident
    host.submit(EngineRequest("r", (1,), max_tokens=1))
    assert [rank.requests for rank in ranks] == [["r"], [], []]


async def test_leader_sleeps_first_wakes_last_and_is_unloaded_first(
    host: ShardedHost, calls: list[str], sink: RecordingSink
) -> None:
    await host.load(sink)
    assert (await host.sleep()).host_bytes == 30
    assert (await host.wake()).host_bytes == 0
    assert (await host.unload()) == Reclaimed(60, 60)
    assert calls[:6] == ["sleep 1", "sleep 4", "sleep 6", "wake 4", "wake 6", "wake 1"]
    assert calls[6] == "unload 1"
    assert sorted(calls[7:]) == ["unload 4", "unload 6"]
    assert host.resident is None


async def test_ranks_that_woke_sleep_again_when_another_one_has_no_room(
    host: ShardedHost, ranks: list[FakeHost], calls: list[str], sink: RecordingSink
) -> None:
    await host.load(sink)
    await host.sleep()
    calls.clear()
    ranks[0].errors["wake"] = NO_ROOM
    with pytest.raises(LoadRejected, match="no room"):
        await host.wake()
    assert calls == ["wake 4", "wake 6", "sleep 4", "sleep 6"]


async def test_nothing_is_left_of_a_model_whose_ranks_can_neither_wake_nor_sleep_again(
    host: ShardedHost, ranks: list[FakeHost], calls: list[str], sink: RecordingSink
) -> None:
    await host.load(sink)
    await host.sleep()
    calls.clear()
    ranks[0].errors["wake"] = NO_ROOM
    ranks[1].errors["sleep"] = SleepRejected("no room in host memory")
    with pytest.raises(Damaged, match="no room in host memory"):
        await host.wake()
    assert calls[:2] == ["wake 4", "wake 6"]
    assert sorted(calls[2:]) == ["unload 1", "unload 4", "unload 6"]


async def test_failed_load_reports_its_cause_and_leaves_nothing(
    host: ShardedHost, ranks: list[FakeHost], calls: list[str], sink: RecordingSink
) -> None:
    ranks[0].errors["load"] = LoadRejected(FaultKind.REQUEST, "another rank ended its load", cancelled=True)
    ranks[2].errors["load"] = LoadRejected(FaultKind.OUT_OF_MEMORY, "no room on device 6")
    with pytest.raises(LoadRejected, match="no room on device 6"):
        await host.load(sink)
    assert set(calls) <= {"unload 4"}
    assert sink.lost == []


async def test_load_without_a_rendezvous_leaves_nothing(
    ranks: list[FakeHost], calls: list[str], sink: RecordingSink
) -> None:
    class Full(contextlib.nullcontext[None]):
        def __enter__(self) -> None:
            raise LoadRejected(FaultKind.REQUEST, "no space left")

    host = ShardedHost(ranks[0], ranks[1:], Full())
    with pytest.raises(LoadRejected, match="no space left"):
        await host.load(sink)
    assert calls == []


async def test_cancelled_load_leaves_nothing(
    host: ShardedHost, ranks: list[FakeHost], calls: list[str], sink: RecordingSink
) -> None:
    ranks[2].may_load.clear()
    load = asyncio.create_task(host.load(sink))
    await ranks[1].loaded.wait()
    await asyncio.sleep(0)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert (sorted(calls), sink.lost) == (["unload 1", "unload 4"], [])


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_lost_rank_replaces_the_workers_of_the_others_before_the_model_is_lost(
    host: ShardedHost, ranks: list[FakeHost], calls: list[str], sink: RecordingSink, rank: int
) -> None:
    await host.load(sink)
    ranks[rank].lose("it died")
    others = [other for other in ranks if other is not ranks[rank]]
    assert calls == [f"kill {other.index}" for other in others]
    assert sink.lost == []  # until the next load finds new workers
    for other in others:
        other.lose("killed")
    assert len(sink.lost) == 1


async def test_rank_lost_while_another_one_is_loaded_fails_the_load(
    host: ShardedHost, ranks: list[FakeHost], calls: list[str], sink: RecordingSink
) -> None:
    ranks[2].may_load.clear()
    load = asyncio.create_task(host.load(sink))
    await ranks[1].loaded.wait()
    await asyncio.sleep(0)
    ranks[1].lose("it died")
    with pytest.raises(WorkerLost, match="it died"):
        await load
    assert (calls, sink.lost) == (["kill 1", "kill 6", "unload 1"], [])


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_rank_lost_during_the_sleep_replaces_no_other_worker_and_the_devices_are_free(
    host: ShardedHost, ranks: list[FakeHost], calls: list[str], sink: RecordingSink, rank: int
) -> None:
    await host.load(sink)
    await host.sleep()
    calls.clear()
    ranks[rank].lose("it died")
    await sink.until(lambda: sink.lost)
    assert sorted(calls) == [f"unload {other.index}" for other in ranks if other is not ranks[rank]]


async def test_worker_lost_during_the_load_is_the_cause(
    host: ShardedHost, ranks: list[FakeHost], sink: RecordingSink
) -> None:
    ranks[1].errors["load"] = WorkerLost("killed by SIGKILL")
    with pytest.raises(WorkerLost, match="SIGKILL"):
        await host.load(sink)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_rank_that_dies_while_a_failed_load_is_cleaned_up_does_not_keep_the_others_loaded(
    host: ShardedHost,
    ranks: list[FakeHost],
    calls: list[str],
    sink: RecordingSink,
    is_cancelled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 1 are loaded when rank 2 fails; the unload of rank 0 fails too."""
    release = asyncio.Event()

    async def fail(_: ModelSink) -> Resident:
        await release.wait()
        raise NO_ROOM

    async def die() -> Reclaimed:
        ranks[0].lose("killed")
        raise WorkerLost("killed")

    monkeypatch.setattr(ranks[0], "unload", die)
    monkeypatch.setattr(ranks[2], "load", fail)
    load = asyncio.create_task(host.load(sink))
    await ranks[0].loaded.wait()
    await ranks[1].loaded.wait()
    await asyncio.sleep(0)  # their loads have returned
    release.set()
    if is_cancelled:
        load.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else LoadRejected):
        await load
    assert calls == ["unload 4"]
    assert sink.lost == []


async def test_cleanup_of_a_failed_load_survives_its_cancellation(
    host: ShardedHost, ranks: list[FakeHost], sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks[2].errors["load"] = NO_ROOM
    freeing, may_free, freed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def unload() -> Reclaimed:
        freeing.set()
        await may_free.wait()
        freed.set()
        return Reclaimed(20, 20)

    monkeypatch.setattr(ranks[0], "unload", unload)
    load = asyncio.create_task(host.load(sink))
    await freeing.wait()
    load.cancel()
    await asyncio.sleep(0)
    may_free.set()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert freed.is_set()


async def test_follower_lost_during_the_unload_kills_no_other_worker(
    host: ShardedHost, ranks: list[FakeHost], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await host.load(RecordingSink())

    async def unload() -> Reclaimed:
        ranks[1].lose("killed")
        return Reclaimed(20, 20)

    monkeypatch.setattr(ranks[1], "unload", unload)
    await host.unload()
    assert sorted(calls) == ["unload 1", "unload 6"]


async def test_damaged_rank_takes_the_others_out_of_memory(
    host: ShardedHost, ranks: list[FakeHost], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await host.load(RecordingSink())

    async def wake() -> Resident:
        ranks[0].resident = None
        raise Damaged("other results than before")

    monkeypatch.setattr(ranks[0], "wake", wake)
    with pytest.raises(Damaged):
        await host.wake()
    assert calls == ["wake 4", "wake 6", "unload 4", "unload 6"]


async def test_model_that_is_gone_kills_no_worker(host: ShardedHost, calls: list[str], sink: RecordingSink) -> None:
    await host.load(sink)
    host.kill("stuck")
    assert calls == ["kill 1", "kill 4", "kill 6"]
    await host.unload()
    calls.clear()
    host.kill("stuck")
    assert calls == []
