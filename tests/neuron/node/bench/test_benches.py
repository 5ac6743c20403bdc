"""Measurements on a node with the real engine, and of models that cannot be measured."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from faulty_models import parts

from cortex.neuron.config import Limits, ModelEntry, NeuronConfig
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.node.bench.workload import Workload
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.models import Models
from cortex.neuron.node.node import Node
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.factory import WorkerFactory
from cortex.wire.errors import InsufficientCapacity, ModelInUse, ModelNotFound, Overloaded
from cortex.wire.node.bench import BenchRequest, BenchStatus
from cortex.wire.node.orders import UnloadRequest
from cortex.wire.node.protocol import ModelState

from ....waiting import WAIT_S, until
from ...generations import Reader
from ..node_calls import generate, load, tokens_of, write_source

SMALL = Workload(
    decode_tokens=24, prompt_tokens=200, prompt_repeats=1, warm_up_s=WAIT_S, streams_s=WAIT_S, prompt_s=WAIT_S
)
"""A slow machine measures the same."""
ONLY_PROMPTS = replace(SMALL, streams=())


@asynccontextmanager
async def node_with(
    tmp_path: Path, workers: WorkerFactory, workload: Workload = SMALL, **limits: Any
) -> AsyncIterator[Node]:
    model = ModelEntry(id="a", source=write_source(tmp_path / "a", seed=1), context_tokens=512)
    config = NeuronConfig(models=(model,), limits=Limits(max_num_seqs=8, **limits), drain_s=5.0)
    changes = {"make_workers": lambda: workers, "timeouts": None, "policy": BackoffPolicy()}
    node = await Node.start(config, parts(**changes, workload=workload, bench_folder=tmp_path / "bench"))
    try:
        yield node
    finally:
        await node.close()


async def measured(node: Node, **options: bool) -> BenchStatus:
    node.benches.start(BenchRequest(model_id="a", **options))
    await until(lambda: node.benches.status("a").state != "running")
    return node.benches.status("a")


async def test_measurement_leaves_nothing_in_the_prefix_cache(tmp_path: Path, workers: WorkerFactory) -> None:
    async with node_with(tmp_path, workers) as node:
        await load(node, "a")
        await generate(node, "a")
        await until(lambda: node.engine_stats()["a"].completion_tokens > 0)
        before = node.engine_stats()["a"]
        assert (await measured(node, reload=False)).state == "done"
        await until(lambda: node.engine_stats()["a"].prompt_tokens > 200 and not node.engine_stats()["a"].used_pages)
        assert node.engine_stats()["a"].cached_pages == before.cached_pages


async def test_measures_a_model_and_keeps_the_result(tmp_path: Path, workers: WorkerFactory) -> None:
    async with node_with(tmp_path, workers, sleep_mb=256) as node:
        with pytest.raises(Overloaded, match="not loaded"):
            node.benches.start(BenchRequest(model_id="a"))
        with pytest.raises(ModelNotFound):
            node.benches.status("a")
        await load(node, "a")
        before = await generate(node, "a")
        status = await measured(node)
        assert (status.state, status.reason) == ("done", None)
        result = status.result
        assert result is not None
        assert [each.streams for each in result.streams] == [1, 8]
        assert all(each.tokens_per_s > 0 and each.share is not None and each.share > 0 for each in result.streams)
        assert 0 < result.prompt_tokens <= 511
        assert result.prompt_tokens_per_s > 0
        assert result.prompt_share is not None
        assert result.wake_s is not None
        assert result.load_s is not None
        assert result.bytes_per_s
        assert result.flops
        assert result.notes == ("64 streams: they do not fit into its slots and its KV cache together",)
        assert node.model("a").state is ModelState.READY
        assert node.model("a").bench == result
        assert await generate(node, "a") == before
    async with node_with(tmp_path, workers) as node:
        await until(lambda: node.model("a").digest is not None)
        assert node.model("a").bench == result, "it is kept on disk"
    for file in (tmp_path / "bench").iterdir():
        file.write_bytes(b"{")
    async with node_with(tmp_path, workers) as node:
        assert node.model("a").bench is None


async def test_requests_of_others_are_not_disturbed_unnoticed(tmp_path: Path, workers: WorkerFactory) -> None:
    async with node_with(tmp_path, workers) as node:
        await load(node, "a")
        stream = Reader(node.generate("a", EngineRequest(id="long", prompt=(1, 2, 3), max_tokens=500)))
        await anext(stream)
        with pytest.raises(ModelInUse, match="a has 1 request"):
            node.benches.start(BenchRequest(model_id="a"))
        node.benches.start(BenchRequest(model_id="a", force=True))
        with pytest.raises(ModelInUse, match="a is being measured"):
            node.benches.start(BenchRequest(model_id="b"))
        assert (await node.benches.cancel("a")).state == "cancelled"
        assert len(await tokens_of(stream)) > 400, "the request goes on"


async def test_cancelled_measurement_leaves_the_model_ready(tmp_path: Path, workers: WorkerFactory) -> None:
    async with node_with(tmp_path, workers, ONLY_PROMPTS) as node:
        await load(node, "a")
        node.benches.start(BenchRequest(model_id="a"))
        await until(lambda: node.model("a").state is not ModelState.READY)
        assert (await node.benches.cancel("a")).state == "cancelled"
        assert node.model("a").bench is None
        await until(lambda: node.model("a").state is ModelState.READY)


async def test_model_that_is_unloaded_while_it_is_measured_stays_unloaded(
    tmp_path: Path, workers: WorkerFactory
) -> None:
    async with node_with(tmp_path, workers, ONLY_PROMPTS) as node:
        await load(node, "a")
        node.benches.start(BenchRequest(model_id="a"))
        await until(lambda: node.model("a").state is not ModelState.READY)
        assert (await node.unload(UnloadRequest(model_id="a"))).state is ModelState.COLD
        status = node.benches.status("a")
        assert (status.state, status.reason) == ("cancelled", "a was unloaded while it was measured")


async def test_failed_reload_keeps_what_was_measured_and_is_tried_again(
    tmp_path: Path, workers: WorkerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_with(tmp_path, workers, ONLY_PROMPTS) as node:
        await load(node, "a")
        load_really = ModelLoader.load

        async def fail_once(*_: object) -> NoReturn:
            monkeypatch.setattr(ModelLoader, "load", load_really)
            raise InsufficientCapacity("another model has taken its room")

        monkeypatch.setattr(ModelLoader, "load", fail_once)
        status = await measured(node)
        assert (status.state, status.reason) == ("done", None)
        assert status.result is not None
        assert status.result.prompt_tokens_per_s > 0
        assert status.result.load_s is None
        assert "another model has taken its room" in status.result.notes[-1]
        await until(lambda: node.model("a").state is ModelState.READY)


async def test_measurement_of_a_model_that_is_gone_has_failed(
    tmp_path: Path, workers: WorkerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(*_: object) -> NoReturn:
        raise ModelNotFound("a is not listed any more")

    monkeypatch.setattr(Models, "keep_bench", keep)
    async with node_with(tmp_path, workers, ONLY_PROMPTS) as node:
        await load(node, "a")
        assert node.benches.start(BenchRequest(model_id="a", reload=False)).state == "running"
        await until(lambda: node.benches.status("a").state == "failed")
        assert node.benches.status("a").reason == "a is not listed any more"
        node.benches.start(BenchRequest(model_id="a", reload=False))  # another one may follow
