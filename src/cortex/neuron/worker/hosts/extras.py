"""The extra replicas of one model, which come and go while it serves.

The devices and sizes of the model do not include them, they are not loaded again when they are lost, and they end with
a sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any

from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.hosts.replica import HostReplica, ReplicaSet
from cortex.neuron.worker.model_host import ModelHost, ModelSink


class ModelExtras:
    """Belongs to the daemon's loop."""

    def __init__(
        self,
        replicas: ReplicaSet,
        sink: Callable[[], ModelSink],
        load: Callable[[HostReplica], Awaitable[None]],
        on_none_left: Callable[[str], None],
    ) -> None:
        """`sink`: that of the model, once it is loaded. `load`: raises LoadRejected or WorkerLost. `on_none_left`:
        called with the reason when the model has no replica any more that serves."""
        self._replicas = replicas
        self._sink = sink
        self._load = load
        self._on_none_left = on_none_left
        self._loads: set[asyncio.Task[Any]] = set()
        self.may_add = True
        """Not while the model is asleep, and not when the node shuts down."""
        self.changed_at_s = -math.inf
        """When one was last added or removed, on the loop's clock."""

    def idle(self) -> list[tuple[float, HostReplica]]:
        """Those without requests, and how long they have had none; those idle for longest first."""
        now_s = asyncio.get_running_loop().time()
        idle = [each for each in self._replicas.extras if not each.live and each.state == "loaded"]
        return sorted(((now_s - each.idle_since_s, each) for each in idle), key=lambda each: -each[0])

    async def add(self, host: ModelHost) -> HostReplica | None:
        """Loads one more replica. Runs as a task, which is cancelled when the model sleeps or is unloaded; it ends when
        nothing of the load is left. None: the model sleeps already. Raises LoadRejected or WorkerLost."""
        task = asyncio.current_task()
        if not self.may_add or task is None:
            return None
        self._loads.add(task)
        try:
            extra = HostReplica(host)
            await self._load(extra)
        finally:
            self._loads.discard(task)
        extra.empty.set()
        extra.idle_since_s = asyncio.get_running_loop().time()
        self._replicas.extras.append(extra)
        self._changed()
        return extra

    async def remove(self, extra: HostReplica, drain_s: float) -> None:
        """Unloads an extra replica; returns when its memory is free. Its requests get `drain_s` to end, then a
        retryable error. Does nothing if it is lost. Cancelling this call does not stop the unload."""
        if extra.state == "lost":
            return
        if extra.unloading is None:
            extra.state = "ending"
            extra.unloading = asyncio.create_task(self._unload(extra, drain_s))
            if not self._replicas.loaded():
                self._on_none_left("its last replica was unloaded")
        await asyncio.shield(extra.unloading)

    async def _unload(self, extra: HostReplica, drain_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await extra.empty.wait()
        self._fail_requests(extra)
        await extra.host.unload()
        self.forget(extra)

    def _fail_requests(self, extra: HostReplica) -> None:
        for request_id in self._replicas.take_requests(extra):
            extra.host.cancel(request_id)
            self._sink().on_request_failed(request_id, FaultKind.DEVICE, "the replica that served it was unloaded")

    def forget(self, extra: HostReplica) -> None:
        """It is lost or unloaded."""
        extra.state = "lost"
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
