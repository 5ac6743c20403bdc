"""Workers of divided models that are killed, stopped or fail in a step, on a node with the real engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from functools import partial
from pathlib import Path

import faulty_ranks
import pytest
from faulty_models import parts

from cortex.neuron.config import Limits, ModelEntry, NeuronConfig
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.node.node import Node
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.wire.errors import Recovering
from cortex.wire.node.protocol import ModelState

from ...generations import Reader
from ..node_calls import generate, load, worker_of, write_source

FAULTS: list[tuple[int, signal.Signals | str]] = [
    (0, signal.SIGKILL),
    (1, signal.SIGKILL),
    (1, signal.SIGSTOP),
    (0, signal.SIGSTOP),
    *((rank, error) for error in faulty_ranks.ERRORS for rank in (1, 0)),
]
"""The place of a worker in its group, and what happens to it."""
NAMES = ("shares", "stages", "unaffected")
ROUNDS = int(os.environ.get("CORTEX_GROUP_ROUNDS", "0"))


async def recover_from_faults(node: Node, model_id: str, source: str, devices: tuple[int, ...], offset: int) -> None:
    """From all as often as `ROUNDS` says, or from every second one: the other division has the others."""
    faults = itertools.islice(itertools.cycle(FAULTS), max(len(FAULTS), ROUNDS)) if ROUNDS else FAULTS[offset::2]
    await load(node, model_id)
    first = await generate(node, model_id)
    for number, (place, fault) in enumerate(faults):
        stream = Reader(node.generate(model_id, EngineRequest(id=f"long {number}", prompt=(1, 2, 3), max_tokens=3000)))
        await anext(stream)
        group = [worker_of(node, device) for device in devices]
        if isinstance(fault, signal.Signals):
            os.kill(group[place], fault)
        else:
            faulty_ranks.fail_next_step(source, place, fault)
        supervisors = [node.devices.supervisors[device] for device in devices]
        for supervisor in supervisors if fault is signal.SIGSTOP else []:
            supervisor.timeouts = WorkerTimeouts(step_s=0.5)
        with pytest.raises(Recovering):
            async for _ in stream:
                pass
        for supervisor in supervisors:
            supervisor.timeouts = WorkerTimeouts()
        assert (await load(node, model_id)).state is ModelState.READY
        assert await generate(node, model_id, f"again {number}") == first
        assert not set(group) & {worker_of(node, device) for device in devices}


async def respond_all_along(node: Node, model_id: str) -> None:
    first = await generate(node, model_id)
    for number in itertools.count():
        await asyncio.sleep(0.5)
        assert await generate(node, model_id, f"another {number}") == first


async def test_divided_models_recover_alone_from_faults_of_any_of_their_workers(tmp_path: Path) -> None:
    """A killed worker and one whose step fails are noticed at once, a stopped one by the watchdog. Both divisions have
    their faults at the same time, and another model is not disturbed."""
    sources = {name: write_source(tmp_path / name, seed=1, num_hidden_layers=5) for name in NAMES}
    models = (
        ModelEntry(id="shares", source=sources["shares"], context_tokens=4096, tensor_parallel=2, devices=(0, 1)),
        ModelEntry(id="stages", source=sources["stages"], context_tokens=4096, pipeline_parallel=2, devices=(2, 3)),
        ModelEntry(id="unaffected", source=sources["unaffected"], context_tokens=4096, devices=(4,)),
    )
    config = NeuronConfig(models=models, limits=Limits(max_num_seqs=8), drain_s=1.0, cpu_devices=5)
    node = await Node.start(
        config,
        parts(make_workers=partial(WorkerFactory, "faulty_ranks:load"), timeouts=None, policy=BackoffPolicy()),
    )
    try:
        await load(node, "unaffected")
        bystander = worker_of(node, 4)
        unaffected = asyncio.create_task(respond_all_along(node, "unaffected"))
        await asyncio.gather(
            recover_from_faults(node, "shares", sources["shares"], (0, 1), offset=0),
            recover_from_faults(node, "stages", sources["stages"], (2, 3), offset=1),
        )
        assert worker_of(node, 4) == bystander
        assert not unaffected.done(), "it responds until the end"
        unaffected.cancel()
    finally:
        await node.close()
