"""Real worker processes, with an engine that fails on demand."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import faulty_engine
import pytest

from cortex.neuron.engine.memory.host import anonymous_bytes
from cortex.neuron.engine.request import EngineRequest, LoadSpec
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import Damaged, LoadRejected, SleepRejected
from cortex.neuron.worker.process import WorkerLost, WorkerTimeouts
from cortex.neuron.worker.protocol import DeviceAddress
from cortex.neuron.worker.supervisor import WorkerSupervisor

CPU = DeviceAddress("cpu", 0)
WAIT_S = 30.0
"""How long tests wait for an event; reached only on failure."""
SHORT_TIMEOUTS = WorkerTimeouts(step_s=0.8, load_s=0.8, unload_s=0.8, exit_s=2.0)


class Sink:
    """A `ModelSink` that records everything."""

    def __init__(self) -> None:
        self.outputs, self.failed, self.progress, self.lost, self.stats = [], {}, [], [], None
        self.changed = asyncio.Event()

    def on_progress(self, stage, done_bytes, total_bytes) -> None:
        self.progress.append((stage, done_bytes, total_bytes))
        self.changed.set()

    def on_outputs(self, outputs) -> None:
        self.outputs.extend(outputs)
        self.changed.set()

    def on_request_failed(self, request_id, kind, message) -> None:
        self.failed[request_id] = (kind, message)
        self.changed.set()

    def on_stats(self, stats) -> None:
        self.stats = stats
        self.changed.set()

    def on_lost(self, reason) -> None:
        self.lost.append(reason)
        self.changed.set()

    def tokens(self, request_id):
        return [token for output in self.outputs if output.request_id == request_id for token in output.tokens]

    def finish(self, request_id):
        return next((o.finish for o in self.outputs if o.request_id == request_id and o.finish), None)

    async def until(self, condition) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def request(request_id, token=faulty_engine.PLAIN, max_tokens=5):
    return EngineRequest(id=request_id, prompt=(token,), max_tokens=max_tokens)


def model(tmp_path, name="model", **behaviour):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "faulty.json").write_text(json.dumps(behaviour))
    return LoadSpec(path=str(folder))


@contextlib.asynccontextmanager
async def supervised(**kwargs):
    worker_factory = WorkerFactory("faulty_engine:load")
    supervisor = WorkerSupervisor(CPU, worker_factory, **kwargs)
    try:
        yield supervisor
    finally:
        await supervisor.close()
        await worker_factory.close()


def alive(process_id):
    # A zombie is dead: the process that inherited it may take its time to reap it.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return ") Z " not in Path(f"/proc/{process_id}/stat").read_text()
    return False


async def test_process_starts_on_first_load_and_ends_on_close(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        assert (supervisor.state, supervisor.process_id) == ("none", None)
        await supervisor.load(model(tmp_path), Sink())
        process_id = supervisor.process_id
        assert supervisor.state == "running"
        names = [task.read_text().strip() for task in Path(f"/proc/{process_id}/task").glob("*/comm")]
    assert not alive(process_id)
    assert "cpu" in names


async def test_streams_outputs_until_each_request_finishes(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path), sink)
        assert sink.progress[0] == ("read", 0, 4)
        for number in range(10):
            supervisor.submit(resident, request(f"r{number}"))
        await sink.until(lambda: sink.finish("r9"))
        assert all(sink.tokens(f"r{number}") == [1, 2, 3, 4, 5] for number in range(10))
        await sink.until(
            lambda: sink.stats is not None and sink.stats.running == 0 and sink.stats.completion_tokens == 50
        )


async def test_request_that_cannot_be_encoded_fails_alone(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path), sink)
        supervisor.submit(resident, request("before"))
        supervisor.submit(resident, EngineRequest("bad", (1,), 5, principal="\udcff"))
        supervisor.submit(resident, request("after"))
        assert sink.failed["bad"][0] is FaultKind.REQUEST
        await sink.until(lambda: sink.finish("before") and sink.finish("after"))
        with pytest.raises(LoadRejected, match="engine"):
            await supervisor.load(LoadSpec(path="x", context_tokens=2**70), Sink())
        assert await supervisor.memory()
        assert not sink.lost


async def test_cancelling_ends_only_that_request(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path), sink)
        supervisor.submit(resident, request("long", max_tokens=100_000))
        supervisor.submit(resident, request("short", max_tokens=200))
        await sink.until(lambda: sink.tokens("long"))
        supervisor.cancel(resident, "long")
        supervisor.cancel(resident, "unknown")
        await sink.until(lambda: sink.finish("long"))
        assert sink.finish("long") == "cancelled"
        await sink.until(lambda: sink.finish("short"))


async def test_two_models_serve_on_one_device(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        first, second = Sink(), Sink()
        one = await supervisor.load(model(tmp_path, "one"), first)
        two = await supervisor.load(model(tmp_path, "two"), second)
        supervisor.submit(one, request("a", max_tokens=50))
        supervisor.submit(two, request("a", max_tokens=50))
        await first.until(lambda: first.finish("a"))
        await second.until(lambda: second.finish("a"))


async def test_models_keep_serving_during_a_load(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path, "serving"), sink)
        supervisor.submit(resident, request("long", max_tokens=100_000))
        await sink.until(lambda: sink.tokens("long"))
        before = len(sink.tokens("long"))
        await supervisor.load(model(tmp_path, "slow", pieces=40, piece_s=0.01), Sink())
        assert len(sink.tokens("long")) - before >= 20


async def test_request_that_the_engine_rejects_fails_alone(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path), sink)
        supervisor.submit(resident, request("bad", faulty_engine.REFUSED))
        supervisor.submit(resident, request("good"))
        await sink.until(lambda: sink.finish("good"))
        assert sink.failed == {"bad": (FaultKind.REQUEST, "top_k of -7 is out of range")}


async def test_out_of_memory_fails_only_the_newest_prompt(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path), sink)
        supervisor.submit(resident, request("running", max_tokens=500))
        await sink.until(lambda: sink.tokens("running"))
        supervisor.submit(resident, request("huge", faulty_engine.OUT_OF_MEMORY))
        await sink.until(lambda: "huge" in sink.failed)
        assert sink.failed["huge"][0] is FaultKind.OUT_OF_MEMORY
        await sink.until(lambda: sink.finish("running") == "length")
        assert sink.lost == []


async def test_model_keeps_serving_after_a_bug_in_a_step(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path), sink)
        supervisor.submit(resident, request("buggy", faulty_engine.BUG))
        await sink.until(lambda: "buggy" in sink.failed)
        assert sink.failed["buggy"][0] is FaultKind.BUG
        supervisor.submit(resident, request("next"))
        await sink.until(lambda: sink.finish("next") == "length")
        assert sink.lost == []


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (faulty_engine.DEVICE_FAULT, "device-side assert"),
        (faulty_engine.SEGFAULT, "SIGSEGV"),
        (faulty_engine.EXIT, "SIGKILL"),
        (faulty_engine.HANG, "no progress in 'step'"),
    ],
)
async def test_reports_why_a_worker_was_lost_and_replaces_it_on_the_next_load(
    tmp_path: Path, token, reason: str
) -> None:
    async with supervised(timeouts=SHORT_TIMEOUTS) as supervisor:
        sink, spec = Sink(), model(tmp_path)
        resident = await supervisor.load(spec, sink)
        first_process = supervisor.process_id
        supervisor.submit(resident, request("fatal", token))
        await sink.until(lambda: sink.lost)
        assert len(sink.lost) == 1
        assert reason in sink.lost[0]
        assert supervisor.state == "faulted"
        assert not alive(first_process)
        sink = Sink()
        resident = await supervisor.load(spec, sink)
        supervisor.submit(resident, request("next"))
        await sink.until(lambda: sink.finish("next"))


async def test_worker_that_stops_right_after_a_load_is_lost_within_the_time_of_a_step(tmp_path: Path) -> None:
    """Its last report was of the load, or of its start, which may take longer."""
    async with supervised(timeouts=WorkerTimeouts(start_s=600.0, load_s=600.0, step_s=5.0)) as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path), sink)
        os.kill(supervisor.process_id, signal.SIGSTOP)
        supervisor.submit(resident, request("stuck"))
        await sink.until(lambda: sink.lost)
        assert "no progress" in sink.lost[0]


async def _stream_until_killed(supervisor, spec) -> None:
    sink = Sink()
    resident = await supervisor.load(spec, sink)
    supervisor.submit(resident, request("stream", max_tokens=100_000))
    await sink.until(lambda: sink.tokens("stream"))
    os.kill(supervisor.process_id, signal.SIGKILL)
    await sink.until(lambda: sink.lost)


async def test_serves_again_after_each_of_several_kills(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        spec = model(tmp_path)
        for _ in range(5):
            await _stream_until_killed(supervisor, spec)


async def test_failed_load_does_not_affect_loaded_models(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path, "good"), sink)
        with pytest.raises(LoadRejected, match="of no use"):
            await supervisor.load(model(tmp_path, "bad", load="refuse"), Sink())
        with pytest.raises(LoadRejected, match="KeyError"):
            await supervisor.load(model(tmp_path, "buggy", load="bug"), Sink())
        supervisor.submit(resident, request("next"))
        await sink.until(lambda: sink.finish("next"))


@pytest.mark.parametrize(
    ("behaviour", "reason"), [("fault", "illegal memory"), ("exit", "code 3"), ("hang", "no progress")]
)
async def test_load_that_kills_the_worker_raises_worker_lost(tmp_path: Path, behaviour: str, reason: str) -> None:
    async with supervised(timeouts=SHORT_TIMEOUTS) as supervisor:
        with pytest.raises(WorkerLost, match=reason):
            await supervisor.load(model(tmp_path, load=behaviour), Sink())


async def test_engine_that_cannot_be_imported_is_named_in_the_error(tmp_path: Path) -> None:
    worker_factory = WorkerFactory("there_is_no_such_module:load")
    supervisor = WorkerSupervisor(CPU, worker_factory)
    with pytest.raises(WorkerLost, match="there_is_no_such_module"):
        await supervisor.load(model(tmp_path), Sink())
    await supervisor.close()
    await worker_factory.close()


async def test_cancelled_load_leaves_nothing_behind(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        loading = asyncio.create_task(supervisor.load(model(tmp_path, pieces=1000, piece_s=0.01), sink))
        await sink.until(lambda: sink.progress)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(loading, WAIT_S)
        assert not supervisor.has_models


async def test_kills_the_worker_when_a_load_ignores_its_cancellation(tmp_path: Path) -> None:
    async with supervised(timeouts=WorkerTimeouts(unload_s=0.5)) as supervisor:
        sink = Sink()
        loading = asyncio.create_task(supervisor.load(model(tmp_path, load="hang"), sink))
        await sink.until(lambda: sink.progress)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(loading, WAIT_S)
        assert not supervisor.has_models


async def test_memory_is_free_after_each_of_many_unloads(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        specs = [model(tmp_path, name, bytes=96 << 20) for name in ("one", "two")]
        sizes = []
        for cycle in range(20):
            resident = await supervisor.load(specs[cycle % 2], Sink())
            assert resident.measured_bytes >= 96 << 20
            reclaimed = await supervisor.unload(resident)
            assert reclaimed.is_complete, str(reclaimed)
            sizes.append(anonymous_bytes(supervisor.process_id))
        assert sizes[-1] - sizes[2] < 16 << 20


async def test_unload_fails_running_requests(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path), sink)
        supervisor.submit(resident, request("long", max_tokens=100_000))
        await sink.until(lambda: sink.tokens("long"))
        await supervisor.unload(resident)
        assert sink.failed["long"][0] is FaultKind.REQUEST


async def test_sleep_frees_memory_and_wake_serves_again(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path, bytes=8 << 20, scratch_bytes=160 << 20), sink)
        sizes = []
        for cycle in range(5):
            asleep = await supervisor.sleep(resident)
            assert asleep.host_bytes == 8 << 20
            assert asleep.process_bytes < resident.process_bytes - (90 << 20)
            assert await supervisor.recycle() is False, "a sleeping model would be lost"
            sizes.append(anonymous_bytes(supervisor.process_id))
            resident = await supervisor.wake(asleep)
            assert resident.host_bytes == 0
            assert resident.measured_bytes >= 160 << 20
            supervisor.submit(resident, request(f"r{cycle}"))
            await sink.until(lambda name=f"r{cycle}": sink.finish(name))
        assert sizes[-1] - sizes[0] < 16 << 20
        assert sink.progress[-1] == ("place", 0, 4)
        assert (await supervisor.unload(await supervisor.sleep(resident))).is_complete


async def test_sleep_cancels_running_requests(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        resident = await supervisor.load(model(tmp_path), sink)
        supervisor.submit(resident, request("long", max_tokens=100_000))
        await sink.until(lambda: sink.tokens("long"))
        await supervisor.sleep(resident)
        await sink.until(lambda: sink.finish("long") == "cancelled")
        supervisor.submit(resident, request("late"))
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
        resident = await supervisor.load(model(tmp_path, **behaviour), Sink())
        with pytest.raises(SleepRejected, match=reason):
            await supervisor.sleep(resident)
        assert (await supervisor.unload(resident)).is_complete


@pytest.mark.parametrize(
    ("wake", "kind"), [("no room", FaultKind.OUT_OF_MEMORY), ("no memory", FaultKind.OUT_OF_MEMORY)]
)
async def test_model_that_cannot_wake_stays_asleep(tmp_path: Path, wake: str, kind) -> None:
    async with supervised() as supervisor:
        asleep = await supervisor.sleep(await supervisor.load(model(tmp_path, wake=wake), Sink()))
        for _ in range(2):
            with pytest.raises(LoadRejected) as rejected:
                await supervisor.wake(asleep)
            assert rejected.value.kind is kind
        assert supervisor.has_models


async def test_damaged_model_is_closed_and_its_worker_survives(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        asleep = await supervisor.sleep(await supervisor.load(model(tmp_path, wake="damaged"), Sink()))
        process_id = supervisor.process_id
        with pytest.raises(Damaged, match="answers differently"):
            await supervisor.wake(asleep)
        assert not supervisor.has_models
        assert alive(process_id)


@pytest.mark.parametrize("wake", ["fault", "exit"])
async def test_wake_that_kills_the_worker_raises_worker_lost(tmp_path: Path, wake: str) -> None:
    async with supervised() as supervisor:
        asleep = await supervisor.sleep(await supervisor.load(model(tmp_path, wake=wake), Sink()))
        with pytest.raises(WorkerLost):
            await supervisor.wake(asleep)
        with pytest.raises(WorkerLost):
            await supervisor.wake(asleep)


async def test_sleeping_models_are_lost_with_their_worker(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = Sink()
        await supervisor.sleep(await supervisor.load(model(tmp_path), sink))
        os.kill(supervisor.process_id, signal.SIGKILL)
        await sink.until(lambda: sink.lost)


async def test_recycles_only_a_worker_without_models(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        spec = model(tmp_path)
        resident = await supervisor.load(spec, Sink())
        first_process = supervisor.process_id
        assert await supervisor.recycle() is False
        await supervisor.unload(resident)
        assert await supervisor.recycle() is True
        assert not alive(first_process)
        await supervisor.load(spec, Sink())
        assert supervisor.process_id != first_process


async def test_load_during_recycling_waits_for_the_new_worker(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        spec = model(tmp_path)
        await supervisor.unload(await supervisor.load(spec, Sink()))
        first_process = supervisor.process_id
        recycling = asyncio.create_task(supervisor.recycle())
        await asyncio.sleep(0)
        await supervisor.load(spec, Sink())
        assert await recycling is True
        assert supervisor.process_id != first_process


@pytest.mark.parametrize("token", [faulty_engine.PLAIN, faulty_engine.HANG])
def test_worker_ends_when_its_daemon_is_killed(tmp_path: Path, token) -> None:
    script = textwrap.dedent(f"""
        import asyncio, sys
        sys.path[:0] = {sys.path!r}
        from cortex.neuron.worker.protocol import DeviceAddress
        from cortex.neuron.worker.factory import WorkerFactory
        from cortex.neuron.worker.supervisor import WorkerSupervisor
        from cortex.neuron.engine.request import EngineRequest, LoadSpec

        class Sink:
            def __getattr__(self, name):
                return lambda *arguments: None

        async def main():
            supervisor = WorkerSupervisor(DeviceAddress("cpu", 0), WorkerFactory("faulty_engine:load"))
            resident = await supervisor.load(LoadSpec(path="nowhere"), Sink())
            supervisor.submit(resident, EngineRequest(id="x", prompt=({token},), max_tokens=10**6))
            await asyncio.sleep(0.1)
            print(supervisor.process_id, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    daemon = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = int(daemon.stdout.readline())
    assert alive(worker)
    daemon.kill()
    daemon.wait()
    deadline_s = time.monotonic() + 3.0
    while alive(worker) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not alive(worker)
