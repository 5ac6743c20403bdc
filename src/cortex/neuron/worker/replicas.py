"""One model that is loaded several times on a node, each time on devices of its own, as the daemon sees it.

A request goes to the replica with the least work before its first token, where a cached prefix is work saved. A replica
that is lost fails its own requests, and is loaded again while the others serve. Extra replicas come and go while the
model serves (`add`, `remove`): the devices and sizes of the model do not include them, they are not loaded again when
they are lost, and they end with a sleep. Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from cortex.neuron.engine.request import EngineRequest, EngineStats, LoadSpec, StepOutput
from cortex.neuron.worker.backoff import BackoffPolicy, FaultHistory
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
from cortex.neuron.worker.prefix_memory import PrefixMemory
from cortex.neuron.worker.process import WorkerLost
from cortex.tasks import run_once

log = logging.getLogger(__name__)

REQUEST_TOKENS = 1500
"""A request ahead costs about as much as to compute this many prompt tokens; the gateway counts the same."""

LockDevices = Callable[[tuple[int, ...]], AbstractAsyncContextManager[None]]


@dataclass(eq=False, slots=True)
class Replica:
    """One replica. Without a resident it is lost: being loaded again, or, if it is an extra one, gone."""

    new_host: Callable[[], ModelHost]
    host: ModelHost
    resident: Resident | None = None
    live: set[str] = field(default_factory=set)
    stats: EngineStats = field(default_factory=EngineStats)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    history: FaultHistory = field(default_factory=FaultHistory)
    is_extra: bool = False
    is_lost: bool = False
    """Of an extra one."""
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has no requests."""
    idle_since_s: float = 0.0
    unloading: asyncio.Task[None] | None = None
    """Of an extra one, from its drain on: it gets no new requests."""

    def work(self, prompt: Sequence[int]) -> int:
        """Prompt tokens to compute before the first token of a new request, with the requests ahead converted."""
        return len(prompt) - self.prefixes.num_known_tokens(prompt) + REQUEST_TOKENS * len(self.live)


class WorkerReplicas:
    """The `ModelHost` of a replicated model; made for its load, and of no use after its unload or loss."""

    def __init__(
        self,
        new_hosts: Sequence[Callable[[], ModelHost]],
        lock_devices: LockDevices,
        policy: BackoffPolicy | None = None,
    ) -> None:
        """`new_hosts`: for each replica, where it is loaded, every time. `lock_devices`: held while one is loaded
        again, so that no other load runs there."""
        self._replicas = [Replica(new_host, new_host()) for new_host in new_hosts]
        self._lock_devices = lock_devices
        self._policy = policy or BackoffPolicy()
        self._owners: dict[str, Replica] = {}
        """Request id → the replica that has it."""
        self._reloads: set[asyncio.Task[Any]] = set()
        """Loads of single replicas."""
        self._may_reload = True
        """Not while the model is asleep, and not when the node shuts down."""
        self._reload_of: Callable[[Replica], Coroutine[Any, Any, None]]
        """Loads a lost replica again, as the model was loaded."""
        self._loss_in_load: asyncio.Future[str] | None = None
        """During a load: why a replica was lost that had been loaded."""
        self._lost_stats: list[EngineStats] = []
        """The counters of lost replicas."""
        self._sink: ModelSink
        self._context_tokens = 0
        """Of the model as reported: the smallest of its replicas."""
        self._is_lost = False
        """The model was reported as lost."""
        self._extras: list[Replica] = []
        """Those that are loaded, or being unloaded."""
        self.changed_at_s = -math.inf
        """When an extra replica was last added or removed, on the loop's clock."""
        self.lost_at_s = -math.inf
        """When a replica was last lost."""

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        return tuple(replica.host.device_indices for replica in (*self._replicas, *self._extras))

    @property
    def device_indices(self) -> tuple[int, ...]:
        return tuple(index for replica in self._replicas for index in replica.host.device_indices)

    @property
    def freed_at_s(self) -> float:
        return max(replica.host.freed_at_s for replica in self._replicas)

    @property
    def is_loading(self) -> bool:
        """Whether the model is, and not only a replica of it while others serve."""
        return self._loss_in_load is not None

    # Models

    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident:
        """Loads all replicas side by side. If one fails, or when this is cancelled, nothing of any is left.

        Raises LoadRejected or WorkerLost.
        """
        self._sink = sink
        self._reload_of = lambda replica: self._reload(replica, spec, sink)
        loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loss_in_load = loss
        loads = [asyncio.create_task(self._load_one(replica, spec, sink)) for replica in self._replicas]
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

    async def _load_one(self, replica: Replica, spec: LoadSpec, sink: ModelSink) -> None:
        replica.resident = await replica.host.load(spec, _ReplicaSink(self, replica, sink))

    async def _end_loads(self, loads: Sequence[asyncio.Task[None]]) -> None:
        for load in loads:
            load.cancel()
        await asyncio.wait(loads)
        await self._unload_present()

    async def _unload_present(self) -> None:
        for replica, part in self._present():
            replica.resident = None
            await replica.host.unload(part)

    async def unload(self, resident: Resident) -> Reclaimed:
        """Frees all replicas. Never fails."""
        del resident
        await self._end_extras()
        freed = await asyncio.gather(*(replica.host.unload(part) for replica, part in self._present()))
        for replica in self._replicas:
            replica.resident = None
        return Reclaimed.total(freed)

    async def sleep(self, resident: Resident) -> Resident:
        """Raises SleepRejected or WorkerLost."""
        del resident
        await self._end_extras()
        for replica, part in self._present():
            replica.resident = await replica.host.sleep(part)
        return self._whole()

    async def wake(self, resident: Resident) -> Resident:
        """Raises LoadRejected (the model is asleep as before), Damaged or WorkerLost."""
        del resident
        woken: list[Replica] = []
        for replica, part in self._present():
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
        self._may_reload = True
        for replica in self._replicas:
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

    def _present(self) -> list[tuple[Replica, Resident]]:
        """Those in memory, without extra ones."""
        return [(replica, replica.resident) for replica in self._replicas if replica.resident is not None]

    def _serving(self) -> list[tuple[Replica, Resident]]:
        extras = [
            (each, each.resident) for each in self._extras if each.resident is not None and each.unloading is None
        ]
        return [*self._present(), *extras]

    def _whole(self) -> Resident:
        """The replicas as one model. Raises WorkerLost when none is left."""
        parts = [part for _, part in self._present()]
        if not parts:
            raise WorkerLost("all replicas of the model were lost")
        whole = together(parts)
        self._context_tokens = min(part.info.context_tokens for part in parts)
        num_pages = sum(part.info.num_pages for part in parts)
        return replace(whole, info=replace(whole.info, context_tokens=self._context_tokens, num_pages=num_pages))

    # Requests

    def submit(self, resident: Resident, request: EngineRequest) -> None:
        """Sends a request to the replica with the least work. There is one, unless the model was reported as lost."""
        del resident
        if serving := self._serving():
            replica, part = min(serving, key=lambda each: each[0].work(request.prompt))
            replica.live.add(request.id)
            replica.empty.clear()
            replica.prefixes.add(request.prompt)
            self._owners[request.id] = replica
            replica.host.submit(part, request)

    def cancel(self, resident: Resident, request_id: str) -> None:
        del resident
        owner = self._owners.get(request_id)
        if owner is not None and owner.resident is not None:
            owner.host.cancel(owner.resident, request_id)

    def request_ended(self, request_id: str) -> None:
        """For the sinks: the request has its last output or its failure."""
        if (owner := self._owners.pop(request_id, None)) is not None:
            owner.live.discard(request_id)
            if not owner.live:
                owner.empty.set()
                owner.idle_since_s = asyncio.get_running_loop().time()

    def produced(self, replica: Replica) -> None:
        """For the sinks: the replica works."""
        replica.history = replica.history.proved()

    def total_stats(self) -> EngineStats:
        """For the sinks: all replicas together. The counters include those of lost ones, because they only grow."""
        parts = [*self._lost_stats, *(each.stats for each in (*self._replicas, *self._extras))]
        names = [each.name for each in fields(EngineStats)]
        return EngineStats(**{name: sum(getattr(part, name) for part in parts) for name in names})

    # Extra replicas

    def idle_extras(self) -> list[tuple[float, Replica]]:
        """The extra replicas without requests, and how long they have had none; those idle for longest first."""
        now_s = asyncio.get_running_loop().time()
        idle = [each for each in self._extras if not each.live and each.unloading is None]
        return sorted(((now_s - each.idle_since_s, each) for each in idle), key=lambda each: -each[0])

    async def add(self, host: ModelHost, spec: LoadSpec) -> Replica | None:
        """Loads one more replica. None: the model sleeps or is unloaded meanwhile. Cancelling this call cancels the
        load, and returns when nothing of it is left. Raises LoadRejected or WorkerLost."""
        if not self._may_reload:
            return None
        load = asyncio.create_task(self._add(host, spec))
        self._reloads.add(load)
        load.add_done_callback(self._reloads.discard)
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
        resident = await self._load_with_context(extra, spec, self._sink)
        if extra.is_lost:  # after its weights were loaded, and before this task went on
            raise WorkerLost("the replica was lost as soon as it was loaded")
        extra.resident = resident
        self._extras.append(extra)
        extra.idle_since_s = asyncio.get_running_loop().time()
        self._extras_changed()
        return extra

    async def _load_with_context(self, replica: Replica, spec: LoadSpec, sink: ModelSink) -> Resident:
        """Loads a replica of a model that serves. Raises LoadRejected (also if it has less context than the model was
        reported to have) or WorkerLost."""
        resident = await replica.host.load(spec, _ReplicaSink(self, replica, sink))
        if (num_tokens := resident.info.context_tokens) < self._context_tokens:
            await replica.host.unload(resident)
            message = f"the replica has room for {num_tokens} tokens of context, not {self._context_tokens}"
            raise LoadRejected(FaultKind.OUT_OF_MEMORY, message)
        return resident

    async def remove(self, extra: Replica, drain_s: float) -> None:
        """Unloads an extra replica; returns when its memory is free. Its requests get `drain_s` to end, then a
        retryable error. Does nothing if it is lost. Cancelling this call does not stop the unload."""
        if extra.unloading is None:
            extra.unloading = asyncio.create_task(self._unload_extra(extra, drain_s))
            if extra in self._extras and not self._serving():
                self._model_lost("its last replica was unloaded")
        await asyncio.shield(extra.unloading)

    async def _unload_extra(self, extra: Replica, drain_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await extra.empty.wait()
        self._fail_requests(extra)
        if extra.resident is not None:
            await extra.host.unload(extra.resident)
            extra.resident = None
        self._forget_extra(extra)

    def _fail_requests(self, extra: Replica) -> None:
        for request_id in self._take_requests(extra):
            if extra.resident is not None:
                extra.host.cancel(extra.resident, request_id)
            self._sink.on_request_failed(request_id, FaultKind.DEVICE, "the replica that served it was unloaded")

    async def _end_extras(self) -> None:
        """Ends what is being loaded, and unloads the extra replicas."""
        await self._end_reloads()
        extras = list(self._extras)
        for extra in extras:
            self._fail_requests(extra)  # which ends a drain
        await asyncio.gather(*(self.remove(extra, 0.0) for extra in extras))

    # Lost replicas

    def replica_lost(self, replica: Replica, reason: str, sink: ModelSink) -> None:
        """For the sinks: fails the replica's requests and loads it again, unless it is an extra one; the last one takes
        the model with it."""
        replica.resident = None
        self.lost_at_s = asyncio.get_running_loop().time()
        if self._loss_in_load is not None:
            if not self._loss_in_load.done():
                self._loss_in_load.set_result(reason)
            return
        if replica.is_extra and replica not in self._extras:  # it was just loaded, or has just been unloaded
            replica.is_lost = True
            return
        lost = self._take_requests(replica)
        if replica.is_extra:
            self._forget_extra(replica)
        else:
            self._keep_counters(replica)
            replica.prefixes = PrefixMemory()
        if not self._serving():
            self._model_lost(reason)
            return
        for request_id in lost:
            sink.on_request_failed(request_id, FaultKind.DEVICE, f"the replica that served it was lost: {reason}")
        if self._may_reload and not replica.is_extra:
            self._start_reload(replica)  # else when the model wakes

    def _take_requests(self, replica: Replica) -> set[str]:
        """The requests of a replica that ends; from now on it has none."""
        taken, replica.live = replica.live, set()
        replica.empty.set()
        for request_id in taken:
            self._owners.pop(request_id, None)
        return taken

    def _keep_counters(self, replica: Replica) -> None:
        self._lost_stats.append(replace(replica.stats, running=0, waiting=0, used_pages=0, cached_pages=0, num_pages=0))
        replica.stats = EngineStats()

    def _forget_extra(self, extra: Replica) -> None:
        if extra in self._extras:
            self._extras.remove(extra)
            self._keep_counters(extra)
            self._extras_changed()

    def _extras_changed(self) -> None:
        """Has the model count its slots again."""
        self.changed_at_s = asyncio.get_running_loop().time()
        self._sink.on_stats(self.total_stats())

    def _model_lost(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.stop_reloads()
            self._sink.on_lost(reason)

    def _start_reload(self, replica: Replica) -> None:
        task = run_once(self._reload_of(replica), f"load a lost replica on {replica.host.device_indices}")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self, replica: Replica, spec: LoadSpec, sink: ModelSink) -> None:
        """Loads a replica again, with a back-off; after too many faults it stays lost."""
        while True:
            replica.history = replica.history.faulted(asyncio.get_running_loop().time(), self._policy)
            delay_s = replica.history.delay_s(self._policy)
            if delay_s is None:
                log.error("a replica on devices %s is given up: it was lost too often", replica.host.device_indices)
                return
            await asyncio.sleep(delay_s)
            try:
                async with self._lock_devices(replica.host.device_indices):
                    replica.host = replica.new_host()
                    replica.resident = await self._load_with_context(replica, spec, sink)
                return
            except (LoadRejected, WorkerLost) as error:
                log.warning("a lost replica cannot be loaded again yet: %s", error)

    def stop_reloads(self) -> None:
        self._may_reload = False
        for task in self._reloads:
            task.cancel()

    async def _end_reloads(self) -> None:
        self.stop_reloads()
        if self._reloads:
            await asyncio.wait(self._reloads)


class _ReplicaSink:
    """The `ModelSink` of one replica: passes its events on, and keeps the routing up to date."""

    def __init__(self, replicas: WorkerReplicas, replica: Replica, model: ModelSink) -> None:
        self._replicas = replicas
        self._replica = replica
        self._model = model

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._replicas.is_loading:
            self._model.on_progress(stage, done_bytes, total_bytes)

    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None:
        self._replicas.produced(self._replica)
        for output in outputs:
            if output.finish is not None:
                self._replicas.request_ended(output.request_id)
        self._model.on_outputs(outputs)

    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None:
        self._replicas.request_ended(request_id)
        self._model.on_request_failed(request_id, kind, message)

    def on_stats(self, stats: EngineStats) -> None:
        self._replica.stats = stats
        self._model.on_stats(self._replicas.total_stats())

    def on_lost(self, reason: str) -> None:
        self._replicas.replica_lost(self._replica, reason, self._model)

    def on_ending(self, reason: str, then: Callable[[], None]) -> None:
        pass  # only parts on other nodes are announced to end, and replicas have none
