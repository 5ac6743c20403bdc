"""What becomes of requests on a node: limits, the queue, cancellation, and errors of one request."""

import asyncio
from pathlib import Path

import faulty_engine
import pytest
from faulty_models import models, running_node

from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.wire.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidValue,
    Overloaded,
    PromptTooLongForMemory,
    ShuttingDown,
)
from cortex.wire.node.orders import LoadRequest
from cortex.wire.node.protocol import ModelState

from ...processes import alive
from ...waiting import WAIT_S, until
from ..generations import Reader
from .node_calls import has_worker, held, load, request, tokens_of, worker_of


async def test_error_of_one_request_does_not_affect_others(tmp_path: Path) -> None:
    async with running_node(
        tmp_path,
        models(tmp_path, m={}),
    ) as node:
        await load(node)
        other = Reader(node.generate("m", request("other", max_tokens=300)))
        first = await anext(other)
        with pytest.raises(InvalidValue, match="top_k"):
            await tokens_of(node.generate("m", request("rejected", faulty_engine.REFUSED)))
        with pytest.raises(Overloaded, match="out of memory"):
            await tokens_of(node.generate("m", request("huge", faulty_engine.OUT_OF_MEMORY)))
        assert sum(len(output.tokens) for output in first) + len(await tokens_of(other)) == 300
        with pytest.raises(PromptTooLongForMemory, match=r"prompt is too long.* maximum context length is less than"):
            await tokens_of(node.generate("m", request("alone", faulty_engine.OUT_OF_MEMORY)))
        with pytest.raises(GenerationFailed, match="must match"):
            await tokens_of(node.generate("m", request("buggy", faulty_engine.BUG)))
        assert node.model("m").state is ModelState.READY


async def test_rejects_a_prompt_over_the_limit_with_both_counts(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}), "limits": {"max_prompt_tokens": 100}}
    async with running_node(tmp_path, config) as node:
        await load(node)
        for num_tokens in (101, 5000):
            with pytest.raises(
                ContextLengthExceeded, match=f"prompt is too long: {num_tokens} tokens > 100 maximum"
            ) as (rejected):
                node.generate("m", EngineRequest(id="x", prompt=(1,) * num_tokens, max_tokens=1))
            assert "This model's maximum context length is 100 tokens" in rejected.value.message
            assert "limits.max_prompt_tokens" in rejected.value.message
        assert (node.model("m").max_input_tokens, node.model("m").max_prompt_tokens) == (100, 100)


async def test_rejects_a_prompt_over_the_loaded_context_in_the_words_that_clients_match(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        with pytest.raises(ContextLengthExceeded, match="prompt is too long: 5000 tokens > 4095 maximum") as rejected:
            node.generate("m", EngineRequest(id="x", prompt=(1,) * 5000, max_tokens=1))
        assert "This model's maximum context length is 4096 tokens" in rejected.value.message


async def test_cancelled_request_frees_its_slot_in_every_phase(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}), "limits": {"max_num_seqs": 1, "max_queue": 4}}
    async with running_node(tmp_path, config) as node:
        await load(node)
        running = Reader(node.generate("m", request("running", max_tokens=10**6)))
        queued = Reader(node.generate("m", request("queued")))
        await anext(running)
        assert (node.model("m").load.running, node.model("m").load.waiting) == (1, 1)
        queued.cancel()
        queued.cancel()
        assert [output.finish async for batch in queued for output in batch] == ["cancelled"]
        assert node.model("m").load.waiting == 0
        running.cancel()
        await until(lambda: node.model("m").load.running == 0)
        assert node.model("m").idle_s >= 0
        assert await tokens_of(node.generate("m", request("next"))) == [1, 2, 3, 4, 5]


async def test_full_queue_rejects_with_retry_after(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}), "limits": {"max_num_seqs": 1, "max_queue": 1}}
    async with running_node(tmp_path, config) as node:
        await load(node)
        first = Reader(node.generate("m", request("first", max_tokens=10**6)))
        second = Reader(node.generate("m", request("second")))
        with pytest.raises(Overloaded) as rejected:
            node.generate("m", request("third"))
        assert rejected.value.retry_after_s is not None
        assert rejected.value.retry_after_s >= 1
        first.cancel()
        assert await tokens_of(second) == [1, 2, 3, 4, 5]


async def test_keeps_requests_in_the_queue_while_the_cache_is_full(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={"num_pages": 1})) as node:
        await load(node)
        first = Reader(node.generate("m", request("first", max_tokens=10**6)))
        await anext(first)
        await until(lambda: node.model("m").load.kv_used_fraction == 1.0)
        second = Reader(node.generate("m", request("second")))
        assert (node.model("m").load.running, node.model("m").load.waiting) == (1, 1)
        first.cancel()
        assert await tokens_of(second) == [1, 2, 3, 4, 5]


async def test_reads_do_not_wait_for_busy_engines_or_loads(tmp_path: Path) -> None:
    config = models(tmp_path, m={"step_s": 0.002}, slow={"pieces": 100, "piece_s": 0.01})
    async with running_node(tmp_path, config) as node:
        await load(node)
        streams = [
            asyncio.create_task(tokens_of(node.generate("m", request(f"s{n}", max_tokens=500)))) for n in range(64)
        ]
        await node.load(LoadRequest(model_id="slow"), wait=False)
        reads = []

        def read_until_done() -> bool:
            reads.append((node.health(), node.models()))
            return all(stream.done() for stream in streams)

        await until(read_until_done)
        assert len(reads) > 2, "a read that waited for the engine would take as long as the streams"
        assert {len(stream.result()) for stream in streams} == {500}


async def test_close_ends_queued_requests_at_once_and_drains_running_ones(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}), "limits": {"max_num_seqs": 1}, "drain_s": WAIT_S}
    async with running_node(tmp_path, config) as node:
        await load(node)
        worker = worker_of(node)
        with held(worker):
            running = asyncio.create_task(tokens_of(node.generate("m", request("running", max_tokens=200))))
            queued = asyncio.create_task(tokens_of(node.generate("m", request("queued"))))
            await until(lambda: node.model("m").load.waiting == 1)
            closing = asyncio.create_task(node.close())
            with pytest.raises(ShuttingDown):
                await asyncio.wait_for(queued, WAIT_S)
            assert not running.done()
            with pytest.raises(ShuttingDown):
                node.generate("m", request("late"))
            with pytest.raises(ShuttingDown):
                await load(node)
            assert node.health().status == "draining"
        assert len(await running) == 200
        await closing
        assert not alive(worker)


async def test_close_is_bounded_and_leaves_no_process(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}, slow={"load": "hang"}), "drain_s": 0.2}
    async with running_node(tmp_path, config, timeouts=WorkerTimeouts(unload_s=1.0)) as node:
        await load(node)
        worker = worker_of(node)
        endless = asyncio.create_task(tokens_of(node.generate("m", request(max_tokens=10**6))))
        loading = asyncio.create_task(load(node, "slow"))
        await until(lambda: (p := node.model("slow").progress) is not None and p.stage == "read")
        await asyncio.wait_for(node.close(), WAIT_S)
        for task in (endless, loading):
            with pytest.raises(ShuttingDown):
                await task
        assert not alive(worker)
        assert not has_worker(node)
