"""The `ModelHost` of a model that is loaded several times on a node, each time on devices of its own.

A replica that is lost fails its own requests, and is loaded again while the others serve; of an extra one nothing is
left. Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from cortex.neuron.engine.request import EngineRequest, LoadSpec
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import (
    Damaged,
    LoadRejected,
    ModelHost,
    ModelSink,
    Resident,
    SleepRejected,
    together,
)
from cortex.neuron.worker.process import WorkerLost
from cortex.neuron.worker.replicas.extras import ModelExtras
from cortex.neuron.worker.replicas.prefix_memory import PrefixMemory
from cortex.neuron.worker.replicas.replica_set import Replica, ReplicaSet, ReplicaSink
from cortex.tasks import run_once

log = logging.getLogger(__name__)

LockDevices = Callable[[tuple[int, ...]], AbstractAsyncContextManager[None]]


class WorkerReplicas:
    """Made for the load of a model, and of no use after its unload or loss."""

    def __init__(
        self,
        new_hosts: Sequence[Callable[[], ModelHost]],
        lock_devices: LockDevices,
        policy: BackoffPolicy | None = None,
    ) -> None:
        """`new_hosts`: for each replica, where it is loaded, every time. `lock_devices`: held while one is loaded
        again, so that no other load runs there."""
        self._replicas = ReplicaSet(Replica(new_host, new_host()) for new_host in new_hosts)
        self.extras = ModelExtras(self._replicas, lambda: self._sink, self._load_with_context, self._model_lost)
        self._lock_devices = lock_devices
        self._policy = policy or BackoffPolicy()
        self._reloads: set[asyncio.Task[None]] = set()
        """Loads of lost replicas."""
        self._may_reload = True
        """Not while the model is asleep, and not when the node shuts down."""
        self._loss_in_load: asyncio.Future[str] | None = None
        """During a load: why a replica was lost that had been loaded."""
        self._spec: LoadSpec
        self._sink: ModelSink
        """Both of the load of the model."""
        self._context_tokens = 0
        """Of the model as reported: the smallest of its replicas."""
        self._is_lost = False
        """The model was reported as lost."""
        self.lost_at_s = -math.inf
        """When a replica was last lost, on the loop's clock."""

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        return tuple(replica.host.device_indices for replica in self._replicas if not replica.is_given_up)

    @property
    def taken_devices(self) -> tuple[int, ...]:
        """Where no further replica belongs: they have one, or one was lost there too often."""
        return tuple(index for replica in self._replicas for index in replica.host.device_indices)

    @property
    def device_indices(self) -> tuple[int, ...]:
        return tuple(index for replica in self._replicas.fixed for index in replica.host.device_indices)

    @property
    def freed_at_s(self) -> float:
        return max(replica.host.freed_at_s for replica in self._replicas.fixed)

    # Models

    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident:
        """Loads all replicas side by side. If one fails, or when this is cancelled, nothing of any is left.

        Raises LoadRejected or WorkerLost.
        """
        self._spec, self._sink = spec, sink
        loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loss_in_load = loss
        loads = [asyncio.create_task(self._load_one(replica)) for replica in self._replicas.fixed]
        pending: set[asyncio.Future[Any]] = set(loads)
        try:
            while pending:
                done, pending = await asyncio.wait({*pending, loss}, return_when=asyncio.FIRST_COMPLETED)
                pending.discard(loss)
                if loss.done():
                    raise WorkerLost(f"a replica was lost while the others were loaded: {loss.result()}")
                for load in done:
                    load.result()
        except BaseException:
            await self._end_loads(loads)
            raise
        finally:
            self._loss_in_load = None
        return self._whole()

    async def _load_one(self, replica: Replica) -> None:
        sink = ReplicaSink(self._replicas, replica, self._sink, self._replica_lost, reports_progress=True)
        replica.resident = await replica.host.load(self._spec, sink)

    async def _end_loads(self, loads: Sequence[asyncio.Task[None]]) -> None:
        for load in loads:
            load.cancel()
        await asyncio.wait(loads)
        await self._unload_present()

    async def _unload_present(self) -> None:
        for replica, part in self._replicas.present():
            replica.resident = None
            await replica.host.unload(part)

    async def unload(self, resident: Resident) -> Reclaimed:
        """Frees all replicas. Never fails."""
        del resident
        await self._end_single_loads()
        freed = await asyncio.gather(*(replica.host.unload(part) for replica, part in self._replicas.present()))
        for replica in self._replicas.fixed:
            replica.resident = None
        return Reclaimed.total(freed)

    async def sleep(self, resident: Resident) -> Resident:
        """Raises SleepRejected or WorkerLost."""
        del resident
        await self._end_single_loads()
        for replica, part in self._replicas.present():
            replica.resident = await replica.host.sleep(part)
        return self._whole()

    async def wake(self, resident: Resident) -> Resident:
        """Raises LoadRejected (the model is asleep as before), Damaged or WorkerLost."""
        del resident
        woken: list[Replica] = []
        for replica, part in self._replicas.present():
            try:
                replica.resident = await replica.host.wake(part)
            except LoadRejected:
                await self._back_to_sleep(woken)
                raise
            except (Damaged, WorkerLost):
                replica.resident = None  # nothing of it is left
                await self._unload_present()
                raise
            woken.append(replica)
        self._may_reload = self.extras.may_add = True
        for replica in self._replicas.fixed:
            if replica.resident is None:
                self._start_reload(replica)
        return self._whole()

    async def _back_to_sleep(self, woken: Sequence[Replica]) -> None:
        """Raises WorkerLost if nothing of the model is left."""
        for replica in woken:
            assert replica.resident is not None
            try:
                replica.resident = await replica.host.sleep(replica.resident)
            except SleepRejected as error:
                await self._unload_present()
                message = f"the model was unloaded: a replica that woke cannot be put to sleep again: {error}"
                raise WorkerLost(message) from error

    def _whole(self) -> Resident:
        """The replicas as one model. Raises WorkerLost when none is left."""
        parts = [part for _, part in self._replicas.present()]
        if not parts:
            raise WorkerLost("all replicas of the model were lost")
        whole = together(parts)
        self._context_tokens = min(part.info.context_tokens for part in parts)
        num_pages = sum(part.info.num_pages for part in parts)
        return replace(whole, info=replace(whole.info, context_tokens=self._context_tokens, num_pages=num_pages))

    # Requests

    def submit(self, resident: Resident, request: EngineRequest) -> None:
        del resident
        self._replicas.submit(request)

    def cancel(self, resident: Resident, request_id: str) -> None:
        del resident
        self._replicas.cancel(request_id)

    # Lost replicas

    def _replica_lost(self, replica: Replica, reason: str) -> None:
        """Fails the replica's requests and loads it again, unless it is an extra one; the last one takes the model with
        it."""
        replica.resident = None
        self.lost_at_s = asyncio.get_running_loop().time()
        if self._loss_in_load is not None:
            if not self._loss_in_load.done():
                self._loss_in_load.set_result(reason)
            return
        if replica.is_extra and replica not in self._replicas.extras:  # it was just loaded, or has just been unloaded
            replica.is_lost = True
            return
        log.warning("%s is lost: %s", self._described(replica), reason)
        lost = self._replicas.take_requests(replica)
        if replica.is_extra:
            self.extras.forget(replica)
        else:
            self._replicas.keep_counters(replica)
            replica.prefixes = PrefixMemory()
        if not self._replicas.serving():
            self._model_lost(reason)
            return
        for request_id in lost:
            message = f"the replica that served it was lost: {reason}"
            self._sink.on_request_failed(request_id, FaultKind.DEVICE, message)
        if self._may_reload and not replica.is_extra:
            self._start_reload(replica)  # else when the model wakes

    def _described(self, replica: Replica) -> str:
        return f"the replica of {self._spec.path} on device {'+'.join(map(str, replica.host.device_indices))}"

    def _model_lost(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.stop_reloads()
            self._sink.on_lost(reason)

    def _start_reload(self, replica: Replica) -> None:
        replica.is_given_up = False
        task = run_once(self._reload(replica), f"load a lost replica on {replica.host.device_indices}")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self, replica: Replica) -> None:
        """Loads a replica again, with a back-off; after too many faults it stays lost."""
        while True:
            replica.history = replica.history.faulted(asyncio.get_running_loop().time(), self._policy)
            delay_s = replica.history.delay_s(self._policy)
            if delay_s is None:
                log.error("%s is given up: it was lost too often; load the model again", self._described(replica))
                replica.is_given_up = True
                self._sink.on_stats(self._replicas.total_stats())  # has the model count its slots again
                return
            await asyncio.sleep(delay_s)
            try:
                async with self._lock_devices(replica.host.device_indices):
                    replica.host = replica.new_host()
                    replica.resident = await self._load_with_context(replica, self._spec)
                return
            except (LoadRejected, WorkerLost) as error:
                log.warning("%s cannot be loaded again yet: %s", self._described(replica), error)

    async def _load_with_context(self, replica: Replica, spec: LoadSpec) -> Resident:
        """Loads a replica of a model that serves. Raises LoadRejected (also if it has less context than the model was
        reported to have) or WorkerLost."""
        sink = ReplicaSink(self._replicas, replica, self._sink, self._replica_lost)
        resident = await replica.host.load(spec, sink)
        if (num_tokens := resident.info.context_tokens) < self._context_tokens:
            await replica.host.unload(resident)
            message = f"the replica has room for {num_tokens} tokens of context, not {self._context_tokens}"
            raise LoadRejected(FaultKind.OUT_OF_MEMORY, message)
        return resident

    def stop_reloads(self) -> None:
        self._may_reload = False
        self.extras.stop_loads()
        for task in self._reloads:
            task.cancel()

    async def _end_single_loads(self) -> None:
        """Ends what is being loaded while the model serves, and unloads the extra replicas."""
        self.stop_reloads()
        if self._reloads:
            await asyncio.wait(self._reloads)
        await self.extras.end()
