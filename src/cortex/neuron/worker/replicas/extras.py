"""The extra replicas of one model, which come and go while it serves.

The devices and sizes of the model do not include them, they are not loaded again when they are lost, and they end with
a sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable

from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import ModelHost, ModelSink, Resident
from cortex.neuron.worker.process import WorkerLost
from cortex.neuron.worker.replicas.replica_set import Replica, ReplicaSet


class ModelExtras:
    """Belongs to the daemon's loop."""

    def __init__(
        self,
        replicas: ReplicaSet,
        sink: Callable[[], ModelSink],
        load: Callable[[Replica, LoadSpec], Awaitable[Resident]],
        on_none_left: Callable[[str], None],
    ) -> None:
        """`sink`: that of the model, once it is loaded. `load`: raises LoadRejected or WorkerLost. `on_none_left`:
        called with the reason when the model has no replica any more that serves."""
        self._replicas = replicas
        self._sink = sink
        self._load = load
        self._on_none_left = on_none_left
        self._loads: set[asyncio.Task[Replica]] = set()
        self.may_add = True
        """Not while the model is asleep, and not when the node shuts down."""
        self.changed_at_s = -math.inf
        """When one was last added or removed, on the loop's clock."""

    def idle(self) -> list[tuple[float, Replica]]:
        """Those without requests, and how long they have had none; those idle for longest first."""
        now_s = asyncio.get_running_loop().time()
        idle = [each for each in self._replicas.extras if not each.live and each.unloading is None]
        return sorted(((now_s - each.idle_since_s, each) for each in idle), key=lambda each: -each[0])

    async def add(self, host: ModelHost, spec: LoadSpec) -> Replica | None:
        """Loads one more replica. None: the model sleeps or is unloaded meanwhile. Cancelling this call cancels the
        load, and returns when nothing of it is left. Raises LoadRejected or WorkerLost."""
        if not self.may_add:
            return None
        load = asyncio.create_task(self._add(host, spec))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        try:
            await asyncio.wait({load})
        except asyncio.CancelledError:
            load.cancel()
            await asyncio.wait({load})
            if not load.cancelled() and load.exception() is None:
                await self.remove(load.result(), 0.0)
            raise
        return None if load.cancelled() else load.result()

    async def _add(self, host: ModelHost, spec: LoadSpec) -> Replica:
        extra = Replica(lambda: host, host, is_extra=True)
        extra.empty.set()
        resident = await self._load(extra, spec)
        if extra.is_lost:  # after its weights were loaded, and before this task went on
            raise WorkerLost("the replica was lost as soon as it was loaded")
        extra.resident = resident
        self._replicas.extras.append(extra)
        extra.idle_since_s = asyncio.get_running_loop().time()
        self._changed()
        return extra

    async def remove(self, extra: Replica, drain_s: float) -> None:
        """Unloads an extra replica; returns when its memory is free. Its requests get `drain_s` to end, then a
        retryable error. Does nothing if it is lost. Cancelling this call does not stop the unload."""
        if extra.unloading is None:
            extra.unloading = asyncio.create_task(self._unload(extra, drain_s))
            if extra in self._replicas.extras and not self._replicas.serving():
                self._on_none_left("its last replica was unloaded")
        await asyncio.shield(extra.unloading)

    async def _unload(self, extra: Replica, drain_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await extra.empty.wait()
        self._fail_requests(extra)
        if extra.resident is not None:
            await extra.host.unload(extra.resident)
            extra.resident = None
        self.forget(extra)

    def _fail_requests(self, extra: Replica) -> None:
        for request_id in self._replicas.take_requests(extra):
            if extra.resident is not None:
                extra.host.cancel(extra.resident, request_id)
            self._sink().on_request_failed(request_id, FaultKind.DEVICE, "the replica that served it was unloaded")

    def forget(self, extra: Replica) -> None:
        """It is lost or unloaded."""
        if extra in self._replicas.extras:
            self._replicas.extras.remove(extra)
            self._replicas.keep_counters(extra)
            self._changed()

    def _changed(self) -> None:
        """Has the model count its slots again."""
        self.changed_at_s = asyncio.get_running_loop().time()
        self._sink().on_stats(self._replicas.total_stats())

    def stop_loads(self) -> None:
        self.may_add = False
        for load in self._loads:
            load.cancel()

    async def end(self) -> None:
        """Ends what is being loaded, and unloads the others."""
        self.stop_loads()
        if self._loads:
            await asyncio.wait(self._loads)
        extras = list(self._replicas.extras)
        for extra in extras:
            self._fail_requests(extra)  # which ends a drain
        await asyncio.gather(*(self.remove(extra, 0.0) for extra in extras))
