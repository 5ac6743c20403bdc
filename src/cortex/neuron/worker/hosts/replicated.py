"""Any of several hosts: the replicas of a model on a node, each on devices of its own.

A lost replica fails its own requests and is reloaded while the others serve; a lost extra replica is dropped.
Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.hosts.replica import HostReplica, ReplicaSet, ReplicaSink, SharePrefix
from cortex.neuron.worker.hosts.several import load_all, uncancelled, unload_all, wake_all
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelHost, ModelSink, Resident
from cortex.neuron.worker.process import WorkerLost
from cortex.system.tasks import run_once

log = logging.getLogger(__name__)


class ModelExtraReplicas:
    """The extra replicas of one model, which come and go while it serves.

    The devices and sizes of the model do not include them, they are not reloaded when lost, and they end with a sleep.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        sink: Callable[[], ModelSink],
        load: Callable[[HostReplica], Awaitable[None]],
        on_none_left: Callable[[str], None],
    ) -> None:
        """`sink`: that of the model, once it is loaded. `load`: raises LoadRejected or WorkerLost. `on_none_left`:
        called with the reason when the model has no serving replica left."""
        self._replicas = replicas
        self._sink = sink
        self._load = load
        self._on_none_left = on_none_left
        self._loads: set[asyncio.Task[Any]] = set()
        self.may_add = True
        """False while the model sleeps and when the node shuts down."""
        self.changed_at_s = -math.inf
        """When one was last added or removed, on the loop's clock."""

    def idle(self) -> list[tuple[float, HostReplica]]:
        """Those without requests, and how long they have had none; those idle for longest first."""
        now_s = asyncio.get_running_loop().time()
        idle = [each for each in self._replicas.extras if not each.live and each.state == "loaded"]
        return sorted(((now_s - each.idle_since_s, each) for each in idle), key=lambda each: -each[0])

    async def add(self, host: ModelHost) -> HostReplica | None:
        """Loads one more replica in a task, which is cancelled when the model sleeps or is unloaded and ends when
        nothing of the load is left. None if the model already sleeps. Raises LoadRejected or WorkerLost."""
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
        """Call when it is lost or unloaded."""
        extra.state = "lost"
        if extra in self._replicas.extras:
            self._replicas.extras.remove(extra)
            self._replicas.keep_counters(extra)
            self._changed()

    def _changed(self) -> None:
        """Makes the model recount its slots."""
        self.changed_at_s = asyncio.get_running_loop().time()
        self._sink().on_stats(self._replicas.total_stats())

    def stop_loads(self) -> None:
        self.may_add = False
        for load in self._loads:
            load.cancel()

    async def end(self) -> None:
        """Cancels running loads and unloads the others."""
        self.stop_loads()
        if self._loads:
            await asyncio.wait(self._loads)
        extras = list(self._replicas.extras)
        for extra in extras:
            self._fail_requests(extra)  # which ends a drain
        await asyncio.gather(*(self.remove(extra, 0.0) for extra in extras))


LockDevices = Callable[[tuple[int, ...]], AbstractAsyncContextManager[None]]


class ReplicatedHost:
    """A `ModelHost`: each request goes to one of its replicas, and the loss of the last is the loss of the model."""

    def __init__(
        self,
        model_id: str,
        new_hosts: Sequence[Callable[[], ModelHost]],
        lock_devices: LockDevices,
        policy: BackoffPolicy | None = None,
        share: SharePrefix | None = None,
    ) -> None:
        """`new_hosts`: make the host of each replica, for every load. `lock_devices`: held while one is loaded again,
        so that no other load runs there. `share`: None: each replica computes its own prefixes."""
        self.resident: Resident | None = None
        self._model_id = model_id
        self._replicas = ReplicaSet((HostReplica(new_host(), new_host) for new_host in new_hosts), share)
        self.extras = ModelExtraReplicas(self._replicas, lambda: self._sink, self._load_one, self._model_lost)
        self._lock_devices = lock_devices
        self._policy = policy or BackoffPolicy()
        self._reloads: set[asyncio.Task[None]] = set()
        """Loads of lost replicas."""
        self._may_reload = True
        """False while the model sleeps and when the node shuts down."""
        self._loss_in_load: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """During the load of the model: why a loaded replica was lost."""
        self._sink: ModelSink
        """Set when the load begins."""
        self._is_lost = False
        """The model was reported as lost."""
        self.lost_at_s = -math.inf
        """When a replica was last lost, on the loop's clock."""

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        return tuple(replica.host.device_indices for replica in self._replicas if replica.state != "given up")

    @property
    def taken_devices(self) -> tuple[int, ...]:
        """Devices for no further replica: they have one, or lost one too often."""
        return tuple(index for replica in self._replicas for index in replica.host.device_indices)

    @property
    def device_indices(self) -> tuple[int, ...]:
        return tuple(index for replica in self._replicas.fixed for index in replica.host.device_indices)

    @property
    def freed_at_s(self) -> float:
        return max(replica.host.freed_at_s for replica in self._replicas.fixed)

    async def load(self, sink: ModelSink) -> Resident:
        self._sink = sink
        fixed = self._replicas.fixed
        try:
            parts = [(each.host, self._sink_of(each, reports_progress=True)) for each in fixed]
            await load_all(parts, self._loss_in_load, give_up=lambda: None)
        except BaseException:
            await uncancelled(unload_all(each.host for each in fixed))
            raise
        for replica in fixed:
            replica.state = "loaded"
        return self._changed()

    def _sink_of(self, replica: HostReplica, *, reports_progress: bool = False) -> ReplicaSink:
        return ReplicaSink(self._replicas, replica, self._sink, self._replica_lost, reports_progress=reports_progress)

    async def unload(self) -> Reclaimed:
        await self._end_single_loads()
        return await self._unload_fixed()

    async def _unload_fixed(self) -> Reclaimed:
        freed = await unload_all(each.host for each in self._replicas.fixed)
        for replica in self._replicas.fixed:
            replica.state = "lost"
        self.resident = None
        return freed

    async def sleep(self) -> Resident:
        await self._end_single_loads()
        for replica in self._replicas.loaded():
            await replica.host.sleep()
        return self._changed()

    async def wake(self) -> Resident:
        try:
            await wake_all([replica.host for replica in self._replicas.loaded()])
        except (Damaged, WorkerLost):
            await self._unload_fixed()
            raise
        self._may_reload = self.extras.may_add = True
        for replica in self._replicas.fixed:
            if replica.state != "loaded":
                self._start_reload(replica)
        return self._changed()

    def _changed(self) -> Resident:
        """The fixed replicas as one model. Raises WorkerLost when none is left."""
        parts = [each.host.resident for each in self._replicas.loaded() if not each.is_extra]
        present = [part for part in parts if part is not None]
        if not present:
            raise WorkerLost("all replicas of the model were lost")
        whole = Resident.together(present)
        context_tokens = min(part.info.context_tokens for part in present)
        num_pages = sum(part.info.num_pages for part in present)
        info = replace(
            whole.info, context_tokens=context_tokens, num_pages=num_pages, work=present[0].info.work
        )  # a step runs on one of them
        self.resident = replace(whole, info=info)
        return self.resident

    def submit(self, request: EngineRequest) -> None:
        self._replicas.route(request)

    def cancel(self, request_id: str) -> None:
        self._replicas.cancel(request_id)

    def kill(self, reason: str) -> None:
        for replica in self._replicas:
            replica.host.kill(reason)

    # Lost replicas

    def _replica_lost(self, replica: HostReplica, reason: str) -> None:
        """Fails the replica's requests and reloads it, unless it is an extra one. The loss of the last one is the loss
        of the model."""
        self.lost_at_s = asyncio.get_running_loop().time()
        if replica.state == "loading":
            if not self._loss_in_load.done():
                self._loss_in_load.set_result(reason)
            return
        log.warning("%s is lost: %s", self._described(replica), reason)
        lost = self._replicas.take_requests(replica)
        if replica.is_extra:
            self.extras.forget(replica)
        else:
            replica.state = "lost"
            self._replicas.keep_counters(replica)
        if not self._replicas.loaded():
            self._model_lost(reason)
            return
        for request_id in lost:
            message = f"the replica that served it was lost: {reason}"
            self._sink.on_request_failed(request_id, FaultKind.DEVICE, message)
        if self._may_reload and not replica.is_extra:
            self._start_reload(replica)  # else when the model wakes

    def _described(self, replica: HostReplica) -> str:
        return f"the replica of {self._model_id} on device {'+'.join(map(str, replica.host.device_indices))}"

    def _model_lost(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.stop_reloads()
            self._sink.on_lost(reason)

    def _start_reload(self, replica: HostReplica) -> None:
        replica.state = "lost"
        task = run_once(self._reload(replica), f"load a lost replica on {replica.host.device_indices}")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self, replica: HostReplica) -> None:
        """Reloads a replica, with a back-off; after too many faults it stays lost."""
        assert replica.new_host is not None
        while True:
            replica.history = replica.history.faulted(asyncio.get_running_loop().time(), self._policy)
            delay_s = replica.history.delay_s(self._policy)
            if delay_s is None:
                log.error("%s is given up: it was lost too often; load the model again", self._described(replica))
                replica.state = "given up"
                self._sink.on_stats(self._replicas.total_stats())  # has the model count its slots again
                return
            await asyncio.sleep(delay_s)
            try:
                async with self._lock_devices(replica.host.device_indices):
                    replica.host = replica.new_host()
                    await self._load_one(replica)
                return
            except (LoadRejected, WorkerLost) as error:
                log.warning("%s cannot be loaded again yet: %s", self._described(replica), error)

    async def _load_one(self, replica: HostReplica) -> None:
        """Loads a replica of a model that serves. Raises LoadRejected (also if it has less context than the model was
        reported to have) or WorkerLost."""
        assert self.resident is not None
        replica.state = "loading"
        try:
            resident = await replica.host.load(self._sink_of(replica))
            num_tokens, expected = resident.info.context_tokens, self.resident.info.context_tokens
            if num_tokens < expected:
                await replica.host.unload()
                message = f"the replica has room for {num_tokens} tokens of context, not {expected}"
                raise LoadRejected(FaultKind.OUT_OF_MEMORY, message)
        except BaseException:
            replica.state = "lost"
            raise
        replica.state = "loaded"

    def stop_reloads(self) -> None:
        self._may_reload = False
        self.extras.stop_loads()
        for task in self._reloads:
            task.cancel()

    async def _end_single_loads(self) -> None:
        """Cancels loads of single replicas and unloads the extra ones."""
        self.stop_reloads()
        if self._reloads:
            await asyncio.wait(self._reloads)
        await self.extras.end()
