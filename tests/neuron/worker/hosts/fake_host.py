"""A `ModelHost` that computes nothing, for tests of what is made of several."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cortex.neuron.engine.request import EngineInfo, EngineRequest
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import ModelSink, Resident
from cortex.neuron.worker.process import WorkerLost

from ..recording_sink import RecordingSink

INFO = EngineInfo("llama", "float32", 512, 100, weight_bytes=10, kv_bytes=5, page_tokens=32, num_pages=7)


class FakeHost:
    """Records what is asked of it, perhaps in one list with others, and fails as it is told to."""

    def __init__(self, index: int, calls: list[str] | None = None) -> None:
        self.index = index
        self.device_indices: tuple[int, ...] = (index,)
        self.replica_devices = ((index,),)
        self.freed_at_s = float(index)
        self.resident: Resident | None = None
        self.info = INFO
        self.calls = calls if calls is not None else []
        self.requests: list[str] = []
        self.sink: ModelSink = RecordingSink()
        self.errors: dict[str, Exception] = {}
        """By method."""
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.loaded = asyncio.Event()

    def again(self) -> FakeHost:
        """For the next load."""
        return self

    @property
    def num_unloads(self) -> int:
        return self.calls.count(f"unload {self.index}")

    def lose(self, reason: str) -> None:
        self.resident = None
        self.sink.on_lost(reason)

    def _called(self, what: str) -> Resident:
        if what in self.errors:
            raise self.errors[what]
        self.calls.append(f"{what} {self.index}")
        if self.resident is None:
            raise WorkerLost("nothing is loaded")
        return self.resident

    async def load(self, sink: ModelSink) -> Resident:
        if "load" in self.errors:
            raise self.errors["load"]
        await asyncio.sleep(0)
        await self.may_load.wait()
        self.sink = sink
        self.resident = Resident(self.info, measured_bytes=20, process_bytes=20)
        self.loaded.set()
        return self.resident

    async def unload(self) -> Reclaimed:
        if self.resident is None:
            return Reclaimed(0, 0)
        self._called("unload")
        self.resident = None
        return Reclaimed(20, 20)

    async def sleep(self) -> Resident:
        self.resident = replace(self._called("sleep"), host_bytes=10)
        return self.resident

    async def wake(self) -> Resident:
        self.resident = replace(self._called("wake"), host_bytes=0)
        return self.resident

    def submit(self, request: EngineRequest) -> None:
        self.requests.append(request.id)

    def cancel(self, request_id: str) -> None:
        self.requests.remove(request_id)

    def kill(self, reason: str) -> None:
        self.calls.append(f"kill {self.index}")

    def stop_reloads(self) -> None: ...
