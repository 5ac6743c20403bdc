"""Models that sleep and wake in a real worker process."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import Damaged, LoadRejected, SleepRejected
from cortex.neuron.worker.process import WorkerLost, WorkerTimeouts

from ...processes import alive
from .recording_sink import RecordingSink
from .supervised import loaded, model, request, supervised, worker_bytes, worker_of


async def test_sleep_frees_memory_and_wake_serves_again(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path, bytes=8 << 20, scratch_bytes=160 << 20), sink)
        resident, sizes = host.resident, []
        for cycle in range(5):
            assert resident is not None
            asleep = await host.sleep()
            assert asleep.host_bytes == 8 << 20
            assert asleep.process_bytes < resident.process_bytes - (90 << 20)
            assert await supervisor.recycle() is False, "a sleeping model would be lost"
            sizes.append(worker_bytes(supervisor))
            resident = await host.wake()
            assert resident.host_bytes == 0
            assert resident.measured_bytes > 150 << 20
            host.submit(request(f"r{cycle}"))
            await sink.until(partial(sink.finish, f"r{cycle}"))
        assert sizes[-1] - sizes[0] < 64 << 20
        assert sink.progress[-1] == ("place", 0, 4)
        await host.sleep()
        assert (await host.unload()).is_complete


async def test_sleep_cancels_running_requests(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path), sink)
        host.submit(request("long", max_tokens=100_000))
        await sink.until(lambda: sink.tokens("long"))
        await host.sleep()
        await sink.until(lambda: sink.finish("long") == "cancelled")
        host.submit(request("late"))
        await sink.until(lambda: "late" in sink.failed)
        assert "asleep" in sink.failed["late"][1]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [({"sleep": "refuse"}, "no memory for the weights"), ({"sleep": "keep", "scratch_bytes": 160 << 20}, "came back")],
)
async def test_sleep_is_rejected_when_the_engine_fails_or_no_memory_is_freed(
    tmp_path: Path, behaviour: dict[str, Any], reason: str
) -> None:
    async with supervised(timeouts=WorkerTimeouts(reclaim_s=0.2)) as supervisor:
        host = await loaded(supervisor, model(tmp_path, **behaviour), RecordingSink())
        with pytest.raises(SleepRejected, match=reason):
            await host.sleep()
        assert (await host.unload()).is_complete


@pytest.mark.parametrize(
    ("wake", "kind"), [("no room", FaultKind.OUT_OF_MEMORY), ("no memory", FaultKind.OUT_OF_MEMORY)]
)
async def test_model_that_cannot_wake_stays_asleep(tmp_path: Path, wake: str, kind: FaultKind) -> None:
    async with supervised() as supervisor:
        host = await loaded(supervisor, model(tmp_path, wake=wake), RecordingSink())
        await host.sleep()
        for _ in range(2):
            with pytest.raises(LoadRejected) as rejected:
                await host.wake()
            assert rejected.value.kind is kind
        assert supervisor.has_models


async def test_damaged_model_is_closed_and_its_worker_survives(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        host = await loaded(supervisor, model(tmp_path, wake="damaged"), RecordingSink())
        await host.sleep()
        process_id = worker_of(supervisor)
        with pytest.raises(Damaged, match="answers differently"):
            await host.wake()
        assert not supervisor.has_models
        assert alive(process_id)


@pytest.mark.parametrize("wake", ["fault", "exit"])
async def test_wake_that_kills_the_worker_raises_worker_lost(tmp_path: Path, wake: str) -> None:
    async with supervised() as supervisor:
        host = await loaded(supervisor, model(tmp_path, wake=wake), RecordingSink())
        await host.sleep()
        with pytest.raises(WorkerLost):
            await host.wake()
        with pytest.raises(WorkerLost):
            await host.wake()


async def test_sleeping_models_are_lost_with_their_worker(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        await (await loaded(supervisor, model(tmp_path), sink)).sleep()
        os.kill(worker_of(supervisor), signal.SIGKILL)
        await sink.until(lambda: sink.lost)
