"""A supervisor with real worker processes, whose engine fails on demand."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import faulty_engine
from lasting_workers import lasting_workers

from cortex.neuron.engine.memory.host import anonymous_bytes
from cortex.neuron.engine.request import EngineRequest, LoadSpec
from cortex.neuron.worker.hosts.device import DeviceHost
from cortex.neuron.worker.model_host import ModelSink
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.neuron.worker.protocol import DeviceAddress
from cortex.neuron.worker.supervisor import WorkerSupervisor

from ...waiting import WAIT_S

CPU = DeviceAddress("cpu", 0)
LONG_TIMEOUTS = WorkerTimeouts(start_s=WAIT_S, step_s=WAIT_S, load_s=WAIT_S, unload_s=WAIT_S)
"""For healthy workers, on a machine that may be slow."""
SHORT_TIMEOUTS = WorkerTimeouts(start_s=WAIT_S, step_s=0.5, load_s=0.5)
"""For workers that hang, from when they do."""


def request(request_id: str, token: int = faulty_engine.PLAIN, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(id=request_id, prompt=(token,), max_tokens=max_tokens)


def model(tmp_path: Path, name: str = "model", **behaviour: Any) -> LoadSpec:
    """How it behaves: see `faulty_engine`."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "faulty.json").write_text(json.dumps(behaviour))
    return LoadSpec(path=str(folder))


@contextlib.asynccontextmanager
async def supervised(timeouts: WorkerTimeouts = LONG_TIMEOUTS) -> AsyncIterator[WorkerSupervisor]:
    supervisor = WorkerSupervisor(CPU, lasting_workers("faulty_engine:load"), timeouts=timeouts)
    try:
        yield supervisor
    finally:
        await supervisor.close()


async def loaded(supervisor: WorkerSupervisor, spec: LoadSpec, sink: ModelSink) -> DeviceHost:
    host = DeviceHost(supervisor, spec)
    await host.load(sink)
    return host


def worker_of(supervisor: WorkerSupervisor) -> int:
    """The id of its worker process, which must exist."""
    assert supervisor.process_id is not None
    return supervisor.process_id


def worker_bytes(supervisor: WorkerSupervisor) -> int:
    return anonymous_bytes(worker_of(supervisor))
