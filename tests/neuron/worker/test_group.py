"""The order in which the ranks of a divided model are loaded, put to sleep, woken, unloaded and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import replace

import pytest

from cortex.neuron.engine.request import EngineInfo, EngineRequest, LoadSpec, Meeting, RankSpec
from cortex.neuron.worker.device_claims import DeviceClaims
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.group import RanksOnNode, WorkerGroup
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelSink, Resident, SleepRejected
from cortex.neuron.worker.process import WorkerLost
from cortex.neuron.worker.protocol import DeviceAddress
from cortex.neuron.worker.supervisor import WorkerSupervisor

from .recording_sink import RecordingSink

CLAIM = DeviceClaims().new("m", (1, 4, 6), spans=False)
INFO = EngineInfo("llama", "float32", 512, 100, weight_bytes=10, kv_bytes=5, page_tokens=32, num_pages=7)


class FakeSupervisor(WorkerSupervisor):
    """A device that records what is asked of it, in one list with the others."""

    def __init__(self, index: int, calls: list[str]) -> None:
        super().__init__(DeviceAddress("cpu", index), WorkerFactory())
        self.freed_at_s = float(index)
        self.load_error: Exception | None = None
        self.wake_error: Exception | None = None
        self.sleep_error: Exception | None = None
        self.spec: LoadSpec | None = None
        self.sink: ModelSink = RecordingSink()
        self.loaded = asyncio.Event()
        self._calls = calls

    def _called(self, what: str) -> None:
        self._calls.append(f"{what} {self.device.index}")

    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident:
        self.spec, self.sink = spec, sink
        if self.load_error is not None:
            raise self.load_error
        await asyncio.sleep(0.01)
        self.loaded.set()
        return Resident(self.device.index + 1, INFO, measured_bytes=20, process_bytes=20)

    async def unload(self, resident: Resident) -> Reclaimed:
        self._called("unload")
        return Reclaimed(20, 20)

    async def sleep(self, resident: Resident) -> Resident:
        if self.sleep_error is not None:
            raise self.sleep_error
        self._called("sleep")
        return replace(resident, host_bytes=10)

    async def wake(self, resident: Resident) -> Resident:
        if self.wake_error is not None:
            raise self.wake_error
        self._called("wake")
        return replace(resident, host_bytes=0)

    def submit(self, resident: Resident, request: EngineRequest) -> None:
        self._called(f"submit {resident.handle}")

    def kill_worker(self, reason: str) -> None:
        self._called("kill")


def rank_of(supervisor: FakeSupervisor) -> RankSpec:
    assert supervisor.spec is not None
    assert supervisor.spec.rank is not None
    return supervisor.spec.rank


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def supervisors(calls: list[str]) -> list[FakeSupervisor]:
    return [FakeSupervisor(index, calls) for index in (1, 4, 6)]


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def group(supervisors: list[FakeSupervisor]) -> WorkerGroup:
    return WorkerGroup(supervisors, ["/locks/1", "/locks/4", "/locks/6"], CLAIM)


async def test_ranks_are_in_the_order_of_the_devices_and_counted_together(
    group: WorkerGroup, supervisors: list[FakeSupervisor], calls: list[str], sink: RecordingSink
) -> None:
    resident = await group.load(LoadSpec("m"), sink)
    assert group.device_indices == (1, 4, 6)
    assert group.freed_at_s == 6.0
    ranks = [rank_of(supervisor) for supervisor in supervisors]
    assert [(rank.rank, rank.size, rank.backend) for rank in ranks] == [(0, 3, "tcp"), (1, 3, "tcp"), (2, 3, "tcp")]
    assert len({rank.directory for rank in ranks}) == 1
    assert ranks[0].device_locks == ("/locks/1", "/locks/4", "/locks/6")
    assert (resident.measured_bytes, resident.info.weight_bytes, resident.info.num_pages) == (60, 30, 7)
    group.submit(resident, EngineRequest("r", (1,), max_tokens=1))
    assert calls == ["submit 2 1"]


async def test_leader_sleeps_first_wakes_last_and_is_unloaded_first(
    group: WorkerGroup, calls: list[str], sink: RecordingSink
) -> None:
    resident = await group.load(LoadSpec("m"), sink)
    asleep = await group.sleep(resident)
    assert asleep.host_bytes == 30
    assert (await group.wake(asleep)).host_bytes == 0
    assert (await group.unload(asleep)) == Reclaimed(60, 60)
    assert calls[:6] == ["sleep 1", "sleep 4", "sleep 6", "wake 4", "wake 6", "wake 1"]
    assert calls[6] == "unload 1"
    assert sorted(calls[7:]) == ["unload 4", "unload 6"]


async def test_ranks_that_woke_sleep_again_when_another_one_has_no_room(
    group: WorkerGroup, supervisors: list[FakeSupervisor], calls: list[str], sink: RecordingSink
) -> None:
    asleep = await group.sleep(await group.load(LoadSpec("m"), sink))
    calls.clear()
    supervisors[0].wake_error = LoadRejected(FaultKind.OUT_OF_MEMORY, "no room")
    with pytest.raises(LoadRejected, match="no room"):
        await group.wake(asleep)
    assert calls == ["wake 4", "wake 6", "sleep 4", "sleep 6"]


async def test_nothing_is_left_of_a_model_whose_ranks_can_neither_wake_nor_sleep_again(
    supervisors: list[FakeSupervisor], calls: list[str], sink: RecordingSink
) -> None:
    claims = DeviceClaims()
    group = WorkerGroup(supervisors, [], claims.new("m", (1, 4, 6), spans=True))
    asleep = await group.sleep(await group.load(LoadSpec("m"), sink))
    calls.clear()
    supervisors[0].wake_error = LoadRejected(FaultKind.OUT_OF_MEMORY, "no room")
    supervisors[1].sleep_error = SleepRejected("no room in host memory")
    with pytest.raises(WorkerLost, match="no room in host memory"):
        await group.wake(asleep)
    assert calls == ["wake 4", "wake 6", "unload 1", "unload 4", "unload 6"]
    assert claims.conflicts(spans=True) == {}


async def test_failed_load_reports_its_cause_and_leaves_nothing(
    group: WorkerGroup, supervisors: list[FakeSupervisor], calls: list[str], sink: RecordingSink
) -> None:
    supervisors[0].load_error = LoadRejected(FaultKind.REQUEST, "another rank ended its load", cancelled=True)
    supervisors[2].load_error = LoadRejected(FaultKind.OUT_OF_MEMORY, "no room on device 6")
    with pytest.raises(LoadRejected, match="no room on device 6"):
        await group.load(LoadSpec("m"), sink)
    assert set(calls) <= {"unload 4"}
    assert sink.lost == []


async def test_load_without_a_directory_for_the_ranks_releases_devices_and_other_nodes(
    supervisors: list[FakeSupervisor], calls: list[str], sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: str) -> str:
        raise OSError("no space left")

    class FakeShare(FakeSupervisor):
        async def close(self) -> None:
            self._called("close")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    claims = DeviceClaims()
    share = FakeShare(7, calls)
    span = RanksOnNode((0, 1, 2, 3), 4, Meeting("127.0.0.1", 1, 2, "secret", "127.0.0.1"), (share,))
    group = WorkerGroup(supervisors, (), claims.new("m", (1, 4, 6), spans=True), span)
    with pytest.raises(LoadRejected, match="no space left"):
        await group.load(LoadSpec("m"), sink)
    assert (calls, claims.conflicts(spans=True)) == (["close 7"], {})


async def test_lost_replica_is_not_loaded_again_where_a_model_that_spans_nodes_is(
    supervisors: list[FakeSupervisor], sink: RecordingSink
) -> None:
    claims = DeviceClaims()
    spanning = claims.new("large", (4,), spans=True)
    group = WorkerGroup(supervisors, (), claims.new("m", (1, 4, 6), spans=False))
    spanning.take()
    with pytest.raises(LoadRejected, match="a part of large"):
        await group.load(LoadSpec("m"), sink)
    assert supervisors[0].spec is None
    spanning.release()
    await group.load(LoadSpec("m"), sink)


async def test_cancelled_load_leaves_nothing(group: WorkerGroup, calls: list[str], sink: RecordingSink) -> None:
    load = asyncio.create_task(group.load(LoadSpec("m"), sink))
    await asyncio.sleep(0)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert sink.lost == []


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_lost_rank_replaces_the_workers_of_the_others_before_the_model_is_lost(
    group: WorkerGroup, supervisors: list[FakeSupervisor], calls: list[str], sink: RecordingSink, rank: int
) -> None:
    await group.load(LoadSpec("m"), sink)
    supervisors[rank].sink.on_lost("it died")
    others = [supervisor for supervisor in supervisors if supervisor is not supervisors[rank]]
    assert calls == [f"kill {supervisor.device.index}" for supervisor in others]
    assert sink.lost == []  # until the next load finds new workers
    for supervisor in others:
        supervisor.sink.on_lost("killed")
    assert len(sink.lost) == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_rank_lost_during_the_sleep_replaces_no_other_worker_and_the_devices_are_free(
    supervisors: list[FakeSupervisor], calls: list[str], sink: RecordingSink, rank: int
) -> None:
    claims = DeviceClaims()
    group = WorkerGroup(supervisors, (), claims.new("m", (1, 4, 6), spans=False))
    await group.sleep(await group.load(LoadSpec("m"), sink))
    assert claims.conflicts(spans=True) == {}
    calls.clear()
    supervisors[rank].sink.on_lost("it died")
    async with asyncio.timeout(30):
        while not sink.lost:
            await asyncio.sleep(0)
    others = [supervisor for supervisor in supervisors if supervisor is not supervisors[rank]]
    assert calls == [f"unload {supervisor.device.index}" for supervisor in others]


async def test_model_whose_devices_another_one_has_stays_asleep(
    supervisors: list[FakeSupervisor], calls: list[str], sink: RecordingSink
) -> None:
    claims = DeviceClaims()
    group = WorkerGroup(supervisors, (), claims.new("m", (1, 4, 6), spans=False))
    asleep = await group.sleep(await group.load(LoadSpec("m"), sink))
    spanning = claims.new("large", (4,), spans=True)
    spanning.take()
    calls.clear()
    with pytest.raises(LoadRejected, match="a part of large"):
        await group.wake(asleep)
    assert calls == []
    spanning.release()
    await group.wake(asleep)
    assert claims.conflicts(spans=True).keys() == {1, 4, 6}


async def test_worker_lost_during_the_load_is_the_cause(
    group: WorkerGroup, supervisors: list[FakeSupervisor], sink: RecordingSink
) -> None:
    supervisors[1].load_error = WorkerLost("killed by SIGKILL")
    with pytest.raises(WorkerLost, match="SIGKILL"):
        await group.load(LoadSpec("m"), sink)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_rank_that_dies_while_a_failed_load_is_cleaned_up_does_not_keep_the_others_loaded(
    group: WorkerGroup,
    supervisors: list[FakeSupervisor],
    calls: list[str],
    sink: RecordingSink,
    is_cancelled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 1 are loaded when rank 2 fails; the unload of rank 0 fails too."""
    release = asyncio.Event()

    async def fail(spec: LoadSpec, sink: ModelSink) -> Resident:
        await release.wait()
        raise LoadRejected(FaultKind.OUT_OF_MEMORY, "no room")

    async def die(resident: Resident) -> Reclaimed:
        supervisors[0].sink.on_lost("killed")
        raise WorkerLost("killed")

    monkeypatch.setattr(supervisors[0], "unload", die)
    monkeypatch.setattr(supervisors[2], "load", fail)
    load = asyncio.create_task(group.load(LoadSpec("m"), sink))
    await supervisors[0].loaded.wait()
    await supervisors[1].loaded.wait()
    await asyncio.sleep(0)  # their loads have returned
    release.set()
    if is_cancelled:
        load.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else LoadRejected):
        await load
    assert calls == ["unload 4"]
    assert sink.lost == []


async def test_cleanup_of_a_failed_load_survives_its_cancellation(
    group: WorkerGroup, supervisors: list[FakeSupervisor], sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisors[2].load_error = LoadRejected(FaultKind.OUT_OF_MEMORY, "no room")
    freeing, may_free, freed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def ignore_cancellation(spec: LoadSpec, sink: ModelSink) -> Resident:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        return Resident(1, INFO, measured_bytes=20, process_bytes=20)

    async def unload(resident: Resident) -> Reclaimed:
        freeing.set()
        await may_free.wait()
        freed.set()
        return Reclaimed(20, 20)

    monkeypatch.setattr(supervisors[0], "load", ignore_cancellation)
    monkeypatch.setattr(supervisors[0], "unload", unload)
    load = asyncio.create_task(group.load(LoadSpec("m"), sink))
    await freeing.wait()
    load.cancel()
    await asyncio.sleep(0)
    may_free.set()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert freed.is_set()


async def test_follower_lost_during_the_unload_kills_no_other_worker(
    supervisors: list[FakeSupervisor], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = WorkerGroup(supervisors, (), CLAIM)
    resident = await group.load(LoadSpec("m"), RecordingSink())

    async def unload(resident: Resident) -> Reclaimed:
        supervisors[1].sink.on_lost("killed")
        return Reclaimed(20, 20)

    monkeypatch.setattr(supervisors[1], "unload", unload)
    await group.unload(resident)
    assert sorted(calls) == ["unload 1", "unload 6"]


async def test_damaged_rank_takes_the_others_out_of_memory(supervisors: list[FakeSupervisor], calls: list[str]) -> None:
    group = WorkerGroup(supervisors, (), CLAIM)
    resident = await group.load(LoadSpec("m"), RecordingSink())
    supervisors[0].wake_error = Damaged("other results than before")
    with pytest.raises(Damaged):
        await group.wake(resident)
    assert calls == ["wake 4", "wake 6", "unload 4", "unload 6"]
