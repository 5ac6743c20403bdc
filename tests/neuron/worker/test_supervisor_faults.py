"""What a supervisor reports when an engine fails, and when its worker is lost."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import faulty_engine
import pytest

from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import LoadRejected
from cortex.neuron.worker.process import WorkerLost
from cortex.neuron.worker.supervisor import WorkerSupervisor

from ...processes import alive
from ...waiting import wait_until
from .recording_sink import RecordingSink
from .supervised import CPU, LONG_TIMEOUTS, SHORT_TIMEOUTS, loaded, model, request, supervised, worker_of


async def test_request_that_the_engine_rejects_fails_alone(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path), sink)
        host.submit(request("bad", faulty_engine.REFUSED))
        host.submit(request("good"))
        await sink.until(lambda: sink.finish("good"))
        assert sink.failed == {"bad": (FaultKind.REQUEST, "top_k of -7 is out of range")}


async def test_out_of_memory_fails_only_the_newest_prompt(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path), sink)
        host.submit(request("running", max_tokens=500))
        await sink.until(lambda: sink.tokens("running"))
        host.submit(request("huge", faulty_engine.OUT_OF_MEMORY))
        await sink.until(lambda: "huge" in sink.failed)
        assert sink.failed["huge"][0] is FaultKind.OUT_OF_MEMORY
        await sink.until(lambda: sink.finish("running") == "length")
        assert sink.lost == []


async def test_model_keeps_serving_after_a_bug_in_a_step(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path), sink)
        host.submit(request("buggy", faulty_engine.BUG))
        await sink.until(lambda: "buggy" in sink.failed)
        assert sink.failed["buggy"][0] is FaultKind.BUG
        host.submit(request("next"))
        await sink.until(lambda: sink.finish("next") == "length")
        assert sink.lost == []


async def test_worker_that_hangs_while_it_prepares_an_idle_model_is_lost_without_a_request(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        await loaded(supervisor, model(tmp_path, prepare="hang"), sink)
        supervisor.timeouts = SHORT_TIMEOUTS
        await sink.until(lambda: sink.lost)
        assert "no progress in 'step'" in sink.lost[0]


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
    tmp_path: Path, token: int, reason: str
) -> None:
    async with supervised() as supervisor:
        sink, spec = RecordingSink(), model(tmp_path)
        host = await loaded(supervisor, spec, sink)
        first_process = worker_of(supervisor)
        host.submit(request("fatal", token))
        if token == faulty_engine.HANG:
            supervisor.timeouts = SHORT_TIMEOUTS
        await sink.until(lambda: sink.lost)
        assert len(sink.lost) == 1
        assert reason in sink.lost[0]
        assert supervisor.state == "faulted"
        assert not alive(first_process)
        supervisor.timeouts = LONG_TIMEOUTS
        sink = RecordingSink()
        host = await loaded(supervisor, spec, sink)
        host.submit(request("next"))
        await sink.until(lambda: sink.finish("next"))


async def test_worker_that_stops_right_after_a_load_is_lost_within_the_time_of_a_step(tmp_path: Path) -> None:
    """Its last report was of the load, or of its start, which may take longer."""
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path), sink)
        os.kill(worker_of(supervisor), signal.SIGSTOP)
        supervisor.timeouts = replace(LONG_TIMEOUTS, step_s=0.5)
        host.submit(request("stuck"))
        await sink.until(lambda: sink.lost)
        assert "no progress" in sink.lost[0]


async def _stream_until_killed(supervisor: WorkerSupervisor, spec: LoadSpec) -> None:
    sink = RecordingSink()
    host = await loaded(supervisor, spec, sink)
    host.submit(request("stream", max_tokens=100_000))
    await sink.until(lambda: sink.tokens("stream"))
    os.kill(worker_of(supervisor), signal.SIGKILL)
    await sink.until(lambda: sink.lost)


async def test_serves_again_after_each_of_several_kills(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        spec = model(tmp_path)
        for _ in range(5):
            await _stream_until_killed(supervisor, spec)


async def test_failed_load_does_not_affect_loaded_models(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path, "good"), sink)
        with pytest.raises(LoadRejected, match="of no use"):
            await loaded(supervisor, model(tmp_path, "bad", load="refuse"), RecordingSink())
        with pytest.raises(LoadRejected, match="KeyError"):
            await loaded(supervisor, model(tmp_path, "buggy", load="bug"), RecordingSink())
        host.submit(request("next"))
        await sink.until(lambda: sink.finish("next"))


@pytest.mark.parametrize(
    ("behaviour", "reason"), [("fault", "illegal memory"), ("exit", "code 3"), ("hang", "no progress")]
)
async def test_load_that_kills_the_worker_raises_worker_lost(tmp_path: Path, behaviour: str, reason: str) -> None:
    timeouts = SHORT_TIMEOUTS if behaviour == "hang" else LONG_TIMEOUTS
    async with supervised(timeouts) as supervisor:
        with pytest.raises(WorkerLost, match=reason):
            await loaded(supervisor, model(tmp_path, load=behaviour), RecordingSink())


async def test_engine_that_cannot_be_imported_is_named_in_the_error(tmp_path: Path) -> None:
    worker_factory = WorkerFactory("there_is_no_such_module:load")
    supervisor = WorkerSupervisor(CPU, worker_factory)
    with pytest.raises(WorkerLost, match="there_is_no_such_module"):
        await loaded(supervisor, model(tmp_path), RecordingSink())
    await supervisor.close()
    await worker_factory.close()


@pytest.mark.parametrize("token", [faulty_engine.PLAIN, faulty_engine.HANG])
def test_worker_ends_when_its_daemon_is_killed(tmp_path: Path, token: int) -> None:
    script = textwrap.dedent(f"""
        import asyncio, sys
        sys.path[:0] = {sys.path!r}
        from cortex.neuron.worker.protocol import DeviceAddress
        from cortex.neuron.worker.factory import WorkerFactory
        from cortex.neuron.worker.hosts.device import DeviceHost
        from cortex.neuron.worker.supervisor import WorkerSupervisor
        from cortex.neuron.engine.request import EngineRequest, LoadSpec

        class Sink:
            def __getattr__(self, name):
                return lambda *arguments: None

        async def main():
            supervisor = WorkerSupervisor(DeviceAddress("cpu", 0), WorkerFactory("faulty_engine:load"))
            host = DeviceHost(supervisor, LoadSpec(path="nowhere"))
            await host.load(Sink())
            host.submit(EngineRequest(id="x", prompt=({token},), max_tokens=10**6))
            await asyncio.sleep(0.1)
            print(supervisor.process_id, flush=True)
            await asyncio.sleep(3600)

        asyncio.run(main())
    """)
    daemon = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    worker = int(daemon.stdout.readline())
    assert alive(worker)
    daemon.kill()
    daemon.wait()
    wait_until(lambda: not alive(worker))
