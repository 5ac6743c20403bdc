"""A supervisor with a real worker process: its loads, requests and unloads."""

import asyncio
from dataclasses import replace
from pathlib import Path

import faulty_engine
import pytest

from cortex.neuron.engine.request import EngineRequest, LoadSpec
from cortex.neuron.private_api.openmp import OPENMP
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import LoadRejected
from cortex.neuron.worker.process import WorkerTimeouts

from ...processes import alive
from ...waiting import WAIT_S, until
from .recording_sink import RecordingSink
from .supervised import loaded, model, request, supervised, worker_bytes, worker_of


async def test_process_starts_on_first_load_and_ends_on_close(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        assert (supervisor.state, supervisor.process_id) == ("none", None)
        await loaded(supervisor, model(tmp_path), RecordingSink())
        process_id = worker_of(supervisor)
        assert supervisor.state == "running"
        names = [task.read_text().strip() for task in Path(f"/proc/{process_id}/task").glob("*/comm")]
    assert not alive(process_id)
    assert "cpu" in names


async def test_knows_what_the_libraries_of_its_worker_lack(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        spec = model(tmp_path, rejects_openmp="no libgomp")
        await loaded(supervisor, spec, RecordingSink())
        await until(lambda: supervisor.fallbacks)
        assert supervisor.fallbacks == {OPENMP.name: f"no libgomp; instead: {OPENMP.fallback}"}
        assert await supervisor.recycle() is False
        supervisor.kill_worker("a test")
        await until(lambda: not supervisor.has_models)
        await loaded(supervisor, model(tmp_path, "other"), RecordingSink())
        assert supervisor.fallbacks == {}, "another worker has others"


async def test_streams_outputs_until_each_request_finishes(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path), sink)
        assert sink.progress[0] == ("read", 0, 4)
        for number in range(10):
            host.submit(request(f"r{number}"))
        await sink.until(lambda: sink.finish("r9"))
        assert all(sink.tokens(f"r{number}") == [1, 2, 3, 4, 5] for number in range(10))
        await sink.until(lambda: sink.stats.running == 0 and sink.stats.completion_tokens == 50)


async def test_request_that_cannot_be_encoded_fails_alone(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path), sink)
        host.submit(request("before"))
        host.submit(EngineRequest("bad", (1,), 5, principal="\udcff"))
        host.submit(request("after"))
        assert sink.failed["bad"][0] is FaultKind.REQUEST
        await sink.until(lambda: sink.finish("before") and sink.finish("after"))
        with pytest.raises(LoadRejected, match="engine"):
            await loaded(supervisor, LoadSpec(path="x", context_tokens=2**70), RecordingSink())
        assert await supervisor.memory()
        assert not sink.lost


async def test_cancelling_ends_only_that_request(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path), sink)
        host.submit(request("long", max_tokens=100_000))
        host.submit(request("short", max_tokens=200))
        await sink.until(lambda: sink.tokens("long"))
        host.cancel("long")
        host.cancel("unknown")
        await sink.until(lambda: sink.finish("long"))
        assert sink.finish("long") == "cancelled"
        await sink.until(lambda: sink.finish("short"))


async def test_two_models_serve_on_one_device(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        first, second = RecordingSink(), RecordingSink()
        one = await loaded(supervisor, model(tmp_path, "one"), first)
        two = await loaded(supervisor, model(tmp_path, "two"), second)
        one.submit(request("a", max_tokens=50))
        two.submit(request("a", max_tokens=50))
        await first.until(lambda: first.finish("a"))
        await second.until(lambda: second.finish("a"))


async def test_models_keep_serving_during_a_load(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path, "serving"), sink)
        host.submit(request("long", max_tokens=100_000))
        await sink.until(lambda: sink.tokens("long"))
        before = len(sink.tokens("long"))
        await loaded(supervisor, model(tmp_path, "slow", pieces=40, piece_s=0.01), RecordingSink())
        assert len(sink.tokens("long")) - before >= 20


async def test_cancelled_load_leaves_nothing_behind(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        loading = asyncio.create_task(loaded(supervisor, model(tmp_path, pieces=1000, piece_s=0.01), sink))
        await sink.until(lambda: sink.progress)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(loading, WAIT_S)
        assert not supervisor.has_models


async def test_kills_the_worker_when_a_load_ignores_its_cancellation(tmp_path: Path) -> None:
    async with supervised(timeouts=WorkerTimeouts(unload_s=0.5)) as supervisor:
        sink = RecordingSink()
        loading = asyncio.create_task(loaded(supervisor, model(tmp_path, load="hang"), sink))
        await sink.until(lambda: sink.progress)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(loading, WAIT_S)
        assert not supervisor.has_models


async def test_memory_is_free_after_each_of_many_unloads(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        specs = [model(tmp_path, name, bytes=96 << 20) for name in ("one", "two")]
        sizes = []
        for cycle in range(10):
            host = await loaded(supervisor, specs[cycle % 2], RecordingSink())
            assert host.resident is not None
            assert host.resident.measured_bytes > 90 << 20
            reclaimed = await host.unload()
            assert reclaimed.is_complete, str(reclaimed)
            sizes.append(worker_bytes(supervisor))
        assert sizes[-1] - sizes[2] < 64 << 20


async def test_unload_fails_running_requests(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RecordingSink()
        host = await loaded(supervisor, model(tmp_path), sink)
        host.submit(request("long", max_tokens=100_000))
        await sink.until(lambda: sink.tokens("long"))
        await host.unload()
        assert sink.failed["long"][0] is FaultKind.REQUEST


async def test_worker_that_keeps_memory_of_a_cpu_is_replaced_at_once(tmp_path: Path) -> None:
    async with supervised(timeouts=WorkerTimeouts(reclaim_s=3600)) as supervisor, asyncio.timeout(WAIT_S):
        host = await loaded(supervisor, model(tmp_path), RecordingSink())
        process = worker_of(supervisor)
        assert host.resident is not None
        host.resident = replace(host.resident, process_bytes=1 << 40)
        reclaimed = await host.unload()
        assert not alive(process)
        assert reclaimed.is_complete, "with the worker all its memory is free"


async def test_memory_that_a_load_used_only_for_a_while_is_not_counted_as_the_models(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        host = await loaded(supervisor, model(tmp_path, bytes=32 << 20, staging_bytes=256 << 20), RecordingSink())
        assert host.resident is not None
        assert host.resident.measured_bytes < 128 << 20


async def test_recycles_only_a_worker_without_models(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        spec = model(tmp_path)
        host = await loaded(supervisor, spec, RecordingSink())
        first_process = worker_of(supervisor)
        assert await supervisor.recycle() is False
        await host.unload()
        assert await supervisor.recycle() is True
        assert not alive(first_process)
        await loaded(supervisor, spec, RecordingSink())
        assert supervisor.process_id != first_process


async def test_load_during_recycling_waits_for_the_new_worker(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        spec = model(tmp_path)
        await (await loaded(supervisor, spec, RecordingSink())).unload()
        first_process = worker_of(supervisor)
        recycling = asyncio.create_task(supervisor.recycle())
        await asyncio.sleep(0)
        await loaded(supervisor, spec, RecordingSink())
        assert await recycling is True
        assert supervisor.process_id != first_process


class RaisingSink(RecordingSink):
    """Has a bug in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.num_raised = 0
        setattr(self, method, self._raise)

    def _raise(self, *_: object) -> None:
        self.num_raised += 1
        self._changed.set()
        raise KeyError("a bug")


@pytest.mark.parametrize("method", ["on_outputs", "on_stats", "on_progress", "on_request_failed"])
async def test_sink_that_raises_does_not_affect_other_models_of_the_device(tmp_path: Path, method: str) -> None:
    async with supervised() as supervisor:
        raising, other = RaisingSink(method), RecordingSink()
        one = await loaded(supervisor, model(tmp_path, "one"), raising)
        two = await loaded(supervisor, model(tmp_path, "two"), other)
        process_id = worker_of(supervisor)
        one.submit(request("a"))
        one.submit(request("rejected", faulty_engine.REFUSED))
        two.submit(request("a", max_tokens=50))
        await other.until(lambda: other.finish("a"))
        await raising.until(lambda: raising.num_raised)
        assert await supervisor.memory()
        assert worker_of(supervisor) == process_id
        assert not raising.lost
        assert not other.lost


async def test_requests_whose_outputs_a_sink_cannot_take_fail(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        sink = RaisingSink("on_outputs")
        host = await loaded(supervisor, model(tmp_path), sink)
        host.submit(request("a", max_tokens=100_000))
        await sink.until(lambda: "a" in sink.failed)
        assert sink.failed["a"][0] is FaultKind.BUG
        await sink.until(lambda: sink.stats.completion_tokens and sink.stats.running == 0)


async def test_every_model_learns_that_its_worker_is_lost(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        raising, other = RaisingSink("on_lost"), RecordingSink()
        await loaded(supervisor, model(tmp_path, "one"), raising)
        await loaded(supervisor, model(tmp_path, "two"), other)
        supervisor.kill_worker("a test")
        await other.until(lambda: other.lost)
        assert raising.num_raised == 1
