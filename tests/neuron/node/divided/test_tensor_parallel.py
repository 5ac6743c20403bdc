"""Models that are divided among two CPU devices, on a node with the real engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from faulty_models import parts

from cortex.neuron.config import Limits, ModelEntry, NeuronConfig
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.node.node import Node
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.factory import WorkerFactory
from cortex.wire.errors import LoadFailed
from cortex.wire.node.orders import UnloadRequest
from cortex.wire.node.protocol import ModelState

from ...generations import Reader
from ..node_calls import converse, generate, load, tokens_of, write_source

ROUNDS = int(os.environ.get("CORTEX_GROUP_ROUNDS", "3"))
"""How often loads are repeated."""


@pytest_asyncio.fixture(loop_scope="session")
async def node(tmp_path: Path, workers: WorkerFactory) -> AsyncIterator[Node]:
    """Three devices, and models on every two of them."""
    source = write_source(tmp_path / "model", seed=1)
    models = (
        ModelEntry(id="whole", source=source, context_tokens=512, devices=(1,)),
        ModelEntry(id="divided", source=source, context_tokens=512, tensor_parallel=2, devices=(0, 1)),
        ModelEntry(id="second", source=source, context_tokens=512, tensor_parallel=2, devices=(1, 2)),
        ModelEntry(id="third", source=source, context_tokens=512, tensor_parallel=2, devices=(0, 2)),
        ModelEntry(id="divided twin", source=source, context_tokens=512, tensor_parallel=2, devices=(0, 1)),
        ModelEntry(id="second twin", source=source, context_tokens=512, tensor_parallel=2, devices=(1, 2)),
        ModelEntry(id="four", source=source, context_tokens=512, tensor_parallel=4),
        ModelEntry(id="deterministic", source=source, context_tokens=512, tensor_parallel=2, deterministic=True),
        ModelEntry(id="in stages", source=source, context_tokens=512, pipeline_parallel=2, deterministic=True),
    )
    config = NeuronConfig(models=models, limits=Limits(max_num_seqs=8, sleep_mb=512), drain_s=1.0, cpu_devices=3)
    node = await Node.start(config, parts(make_workers=lambda: workers, timeouts=None, policy=BackoffPolicy()))
    yield node
    await node.close()


async def test_divided_models_serve_sleep_wake_and_unload_on_overlapping_devices(node: Node) -> None:
    assert node.discovery.max_devices_per_model == 3
    with pytest.raises(LoadFailed, match="may use 3 devices"):
        await load(node, "four")
    with pytest.raises(LoadFailed, match="deterministic = true and tensor_parallel = 2"):
        await load(node, "deterministic")
    with pytest.raises(LoadFailed, match="deterministic = true and pipeline_parallel = 2"):
        await load(node, "in stages")
    status = await load(node, "divided")
    assert (status.state, status.devices, status.num_devices) == (ModelState.READY, (0, 1), 2)
    # A worker that loads one model, and leads or follows others, takes part in their steps meanwhile.
    stream = Reader(node.generate("divided", EngineRequest(id="long", prompt=(1, 2, 3), max_tokens=500)))
    others = ("whole", "second", "third")
    await asyncio.gather(*(load(node, name) for name in others))
    names = ("divided", *others)
    tokens = await asyncio.gather(*(generate(node, name, f"{name} {turn}") for turn in range(2) for name in names))
    assert len(tokens[0]) == 8
    assert all(each == tokens[0] for each in tokens)
    stream.cancel()
    conversation, cached = await converse(node, "divided", "first")
    assert cached == 0
    assert (await node.unload(UnloadRequest(model_id="divided", sleep=True))).state is ModelState.ASLEEP
    assert (await load(node, "divided")).state is ModelState.READY
    assert await generate(node, "divided") == tokens[0]
    assert await converse(node, "divided", "again") == (conversation, 192)
    for name in names:
        assert (await node.unload(UnloadRequest(model_id=name))).state is ModelState.COLD
    kept = node.model("divided").kv_host
    assert kept is not None
    assert kept.num_tokens >= 192, "with what the cancelled stream had computed"
    await load(node, "divided")
    assert await converse(node, "divided", "after the unload") == (conversation, 192)


async def test_models_are_loaded_beside_busy_ones_that_share_devices_without_deadlock(node: Node) -> None:
    """Worker 1 leads two busy models while it connects as the second rank of a third one, and follows two on its own
    devices that are loaded and used at once."""
    await asyncio.gather(load(node, "second"), load(node, "second twin"))
    streams = [
        node.generate(name, EngineRequest(id=name, prompt=(1, 2, 3), max_tokens=500))
        for name in ("second", "second twin")
    ]
    readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
    for number in range(ROUNDS):
        await asyncio.gather(load(node, "divided"), load(node, "divided twin"))
        await asyncio.gather(
            *(generate(node, name, f"{name} {number}") for name in ("divided", "divided twin")),
            load(node, "third"),
        )
        for name in ("divided", "third", "divided twin"):
            await node.unload(UnloadRequest(model_id=name))
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*readers)
