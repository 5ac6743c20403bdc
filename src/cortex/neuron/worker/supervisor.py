"""The daemon's side of one device's worker: spawned on first use, and replaced when lost.

A lost worker takes its models with it: each is notified once, and its owner decides whether to load it again.
Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

from cortex.ipc.channel import Unsendable
from cortex.neuron.engine.request import EngineStats, KeptPages, LoadSpec
from cortex.neuron.engine.roofline.step_work import DeviceLimits
from cortex.neuron.worker import protocol
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import LoadRejected
from cortex.neuron.worker.process import WorkerLost, WorkerProcess, WorkerTimeouts
from cortex.neuron.worker.protocol import Command, DeviceAddress, Event, MemoryReading, Reply
from cortex.wire.words import os_error_in_words

log = logging.getLogger(__name__)

Notice = TypeVar("Notice")
WorkerState = Literal["none", "starting", "running", "faulted"]


class WorkerModel(Protocol):
    """A model in the worker. Called on the loop."""

    @property
    def has_requests(self) -> bool: ...
    def on_stats(self, stats: EngineStats) -> None: ...
    def on_event(self, event: protocol.ModelEvent) -> None: ...
    def on_lost(self, reason: str) -> None: ...


class WorkerSupervisor:
    def __init__(
        self, device: DeviceAddress, worker_factory: WorkerFactory, *, timeouts: WorkerTimeouts | None = None
    ) -> None:
        self.device = device
        self.timeouts = timeouts or WorkerTimeouts()
        """The watchdog reads them at each look."""
        self.state: WorkerState = "none"
        self.freed_at_s = -math.inf
        """When memory was last freed here, on the loop's clock; readings of the device may lag behind."""
        self.kv_host_bytes = 0
        """Host memory of pages that are not on the device."""
        self.kept: dict[str, KeptPages] = {}
        """Pages by model id."""
        self.fallbacks: dict[str, str] = {}
        """Library interfaces that the worker cannot use, and why. Kept until the worker is replaced."""
        self._worker_factory = worker_factory
        self._worker: WorkerProcess | None = None
        self._spawning = asyncio.Lock()
        self._models: dict[int, WorkerModel] = {}
        """By handle, from the start of their load to their end."""
        self._numbers = itertools.count(1)
        """Handles and query ids, never reused."""

    @property
    def process_id(self) -> int | None:
        return self._worker.process_id if self._worker is not None else None

    @property
    def has_models(self) -> bool:
        return bool(self._models)

    def has_others(self, handle: int) -> bool:
        """Whether the worker has other models than this one."""
        return bool(self._models.keys() - {handle})

    # Commands

    async def start_load(self, model: WorkerModel, spec: LoadSpec) -> tuple[int, asyncio.Future[Reply]]:
        """Makes the worker load a model. Returns the handle and the future reply, which may raise WorkerLost. Raises
        LoadRejected or WorkerLost."""
        worker = await self._ensure_worker()
        handle = next(self._numbers)
        try:
            reply = worker.call(handle, protocol.Load(handle, spec))
        except Unsendable as error:
            raise LoadRejected(FaultKind.REQUEST, f"the load cannot be sent to the engine: {error}") from error
        self._models[handle] = model
        return handle, reply

    async def call(self, command: protocol.Unload | protocol.Sleep | protocol.Wake) -> Reply:
        """Raises WorkerLost, also when the model was lost before."""
        if self._worker is None or command.handle not in self._models:
            raise WorkerLost("the worker that held the model has ended")
        return await self._worker.call(command.handle, command)

    async def memory(self) -> MemoryReading:
        """The worker's view of the device's memory, measured between two steps. Raises WorkerLost."""
        if self._worker is None:
            raise WorkerLost("the device has no worker")
        query = next(self._numbers)
        reply = await self._worker.call(query, protocol.QueryMemory(query))
        assert isinstance(reply, protocol.Memory)
        return reply.memory

    async def limits(self) -> DeviceLimits | None:
        """The device's rates; None if it has no memory left for a measurement. Its models wait for about a second.
        Raises WorkerLost."""
        if self._worker is None:
            raise WorkerLost("the device has no worker")
        query = next(self._numbers)
        reply = await self._worker.call(query, protocol.MeasureLimits(query))
        assert isinstance(reply, protocol.LimitsMeasured)
        if not reply.bytes_per_s or not reply.flops:
            return None
        return DeviceLimits(reply.bytes_per_s, reply.flops, reply.host_bytes_per_s, reply.bus_bytes_per_s)

    async def save_blocks(self, model: bytes, digests: tuple[bytes, ...]) -> bool:
        """Whether those of these KV blocks that the worker has are on disk; otherwise ask again. Raises WorkerLost."""
        if self._worker is None:
            return True
        query = next(self._numbers)
        reply = await self._worker.call(query, protocol.SaveBlocks(query, model, digests))
        assert isinstance(reply, protocol.BlocksSaved)
        return reply.is_complete

    async def count_pages(self, model: bytes, digests: tuple[bytes, ...]) -> int:
        """How many leading pages of a prompt the worker need not compute. Raises WorkerLost."""
        if self._worker is None:
            return 0
        query = next(self._numbers)
        reply = await self._worker.call(query, protocol.CountPages(query, model, digests))
        assert isinstance(reply, protocol.PagesCounted)
        return reply.num_pages

    async def forget_blocks(self, model_id: str | None, tenants: tuple[bytes, ...]) -> None:
        """Deletes KV blocks. On WorkerLost those in memory are gone too."""
        if self._worker is not None:
            query = next(self._numbers)
            await self._worker.call(query, protocol.ForgetBlocks(query, model_id, tenants))

    def send(self, command: Command) -> None:
        """Does nothing without a worker. Raises Unsendable."""
        if self._worker is not None:
            self._worker.send(command)

    def limit_kv_host(self, num_bytes: int) -> None:
        """Limits the worker's host memory for pages."""
        self.send(protocol.LimitHostPages(num_bytes))

    # The worker

    def kill_worker(self, reason: str) -> None:
        """Kills the worker, with all models in it; they are notified when it has ended."""
        if self._worker is not None:
            self._worker.kill(reason)

    async def recycle(self) -> bool:
        """Replaces a worker without models, which frees all its memory. False when it has models."""
        async with self._spawning:  # a load that starts now waits for the new worker
            if self._models:
                return False
            await self.close()
            return True

    async def close(self) -> None:
        """Ends the worker and everything in it; returns when the process has exited."""
        if self._worker is not None:
            timeouts = self.timeouts
            save_s = timeouts.save_s if timeouts.saves_kv else 0.0
            await self._worker.stop(timeouts.exit_s + save_s, save_s)

    async def _ensure_worker(self) -> WorkerProcess:
        async with self._spawning:
            if self._worker is None:
                self.state = "starting"
                worker = WorkerProcess(
                    self.device,
                    timeouts=lambda: self.timeouts,
                    on_event=self._on_event,
                    on_lost=self._on_worker_lost,
                    has_live_requests=lambda: any(model.has_requests for model in self._models.values()),
                )
                try:
                    await worker.spawn(self._worker_factory)
                except OSError as error:
                    self.state = "faulted"
                    raise WorkerLost(f"the worker cannot be started: {os_error_in_words(error)}") from error
                self._worker = worker
            return self._worker

    def _on_event(self, event: Event) -> None:
        match event:
            case protocol.Hello():
                self.state, self.fallbacks = "running", {}
            case protocol.Report():
                for handle, stats in event.stats.items():
                    if (model := self._models.get(handle)) is not None:
                        self._notify(model.on_stats, stats)
            case protocol.HostPagesKept():
                self.kv_host_bytes, self.kept = event.num_bytes, event.models
            case protocol.FallbacksUsed():
                self.fallbacks = event.reasons
            case protocol.Memory() | protocol.LimitsMeasured() | protocol.Faulted():
                pass
            case protocol.BlocksSaved() | protocol.PagesCounted() | protocol.BlocksForgotten():
                pass
            case _:
                self._on_model_event(event)

    def _on_model_event(self, event: protocol.ModelEvent) -> None:
        model = self._models.get(event.handle)
        match event:
            case protocol.Unloaded() | protocol.Slept():
                self.freed_at_s = asyncio.get_running_loop().time()
        match event:
            case (
                protocol.ModelLoadFailed()
                | protocol.WakeFailed(damaged=True)
                | protocol.ModelBroken()
                | protocol.Unloaded()
            ):
                self._models.pop(event.handle, None)
        if model is not None:
            self._notify(model.on_event, event)

    def _on_worker_lost(self, reason: str) -> None:
        """Pending calls raise WorkerLost on their own."""
        self._worker = None
        self.kv_host_bytes, self.kept = 0, {}
        self.freed_at_s = asyncio.get_running_loop().time()
        models, self._models = self._models, {}
        self.state = "faulted" if models else "none"
        for model in models.values():
            self._notify(model.on_lost, reason)

    def _notify(self, handler: Callable[[Notice], None], notice: Notice) -> None:
        """Calls a handler of one model. An exception is logged and stops here, because it would close the channel that
        all models of the device share."""
        try:
            handler(notice)
        except Exception:
            name = self.device.thread_name
            log.exception("%s: the handler of one model failed; the other models continue", name)
