"""Models whose layers are divided among CPU devices, on a node with the real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
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
from ..node_calls import generate, load, write_source


async def start(tmp_path: Path, workers: WorkerFactory, num_devices: int, *models: ModelEntry) -> Node:
    source = write_source(tmp_path / "model", seed=1, num_hidden_layers=5)
    entries = tuple(msgspec.structs.replace(model, source=source, context_tokens=512) for model in models)
    config = NeuronConfig(
        models=entries, limits=Limits(max_num_seqs=8, sleep_mb=64), drain_s=1.0, cpu_devices=num_devices
    )
    return await Node.start(config, parts(make_workers=lambda: workers, timeouts=None, policy=BackoffPolicy()))


async def test_stages_serve_sleep_wake_and_unload_beside_other_divisions(
    tmp_path: Path, workers: WorkerFactory
) -> None:
    node = await start(
        tmp_path,
        workers,
        3,
        ModelEntry(id="whole", devices=(1,)),
        ModelEntry(id="stages", pipeline_parallel=3),
        ModelEntry(id="shares", tensor_parallel=2, devices=(1, 2)),
        ModelEntry(id="turned", pipeline_parallel=2, devices=(0, 2)),
        ModelEntry(id="four", pipeline_parallel=4),
        ModelEntry(id="both", pipeline_parallel=2, replicas=2),
    )
    with pytest.raises(LoadFailed, match="asks for pipeline_parallel = 4, but may use 3 devices"):
        await load(node, "four")
    with pytest.raises(LoadFailed, match="asks for pipeline_parallel = 2 and replicas = 2, but may use 3 devices"):
        await load(node, "both")
    status = await load(node, "stages")
    assert (status.state, status.devices, status.num_devices) == (ModelState.READY, (0, 1, 2), 3)
    assert sum(status.stage_layers) == 5
    assert sum(status.device_bytes) == status.measured_bytes
    # A worker that loads one model, and leads or follows others, takes part in their steps meanwhile.
    stream = Reader(node.generate("stages", EngineRequest(id="long", prompt=(1, 2, 3), max_tokens=500)))
    others = ("whole", "shares", "turned")
    await asyncio.gather(*(load(node, name) for name in others))
    names = ("stages", *others)
    tokens = await asyncio.gather(*(generate(node, name, f"{name} {turn}") for turn in range(2) for name in names))
    assert len(tokens[0]) == 8
    assert all(each == tokens[0] for each in tokens)
    stream.cancel()
    assert (await node.unload(UnloadRequest(model_id="stages", sleep=True))).state is ModelState.ASLEEP
    assert (await load(node, "stages")).state is ModelState.READY
    assert await generate(node, "stages") == tokens[0]
    for name in names:
        assert (await node.unload(UnloadRequest(model_id=name))).state is ModelState.COLD
    await node.close()


async def test_replicas_of_a_model_in_stages_serve_alike(tmp_path: Path, workers: WorkerFactory) -> None:
    node = await start(tmp_path, workers, 4, ModelEntry(id="both", pipeline_parallel=2, replicas=2))
    status = await load(node, "both")
    assert (status.state, status.devices) == (ModelState.READY, (0, 1, 2, 3))
    assert status.stage_layers[:2] == status.stage_layers[2:]
    tokens = await asyncio.gather(*(generate(node, "both", str(number)) for number in range(4)))
    assert all(each == tokens[0] for each in tokens)
    await node.close()


async def test_rejects_more_devices_than_layers_before_a_worker_starts(tmp_path: Path, workers: WorkerFactory) -> None:
    node = await start(tmp_path, workers, 6, ModelEntry(id="deep", pipeline_parallel=6))
    with pytest.raises(LoadFailed, match="deep has 5 layers, too few for pipeline_parallel = 6"):
        await load(node, "deep")
    assert all(supervisor.state == "none" for supervisor in node.devices.supervisors.values())
    await node.close()
