"""The part of a model that this node holds for another node, which leads it. Runs on the daemon's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from cortex.formats.units import gib
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.node.devices import NodeDevices
from cortex.neuron.node.harness.engine import EngineHarness
from cortex.neuron.node.loading.device_allocator import DeviceAllocator, RoomElsewhere, wake_settled
from cortex.neuron.node.loading.device_choice import ChosenDevices
from cortex.neuron.node.loading.library import KnownModel, Library
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.loading.preflight import ModelFacts
from cortex.neuron.node.memory.sleep_budget import SleepBudget
from cortex.neuron.node.spanning.protocol import (
    Connection,
    PrepareShare,
    ShareFailed,
    ShareLoaded,
    ShareLost,
    ShareMessage,
    SharePrepared,
    ShareSlept,
    ShareWoken,
    encode,
)
from cortex.neuron.worker.device_claims import DeviceClaim
from cortex.neuron.worker.faults import FaultKind, explain
from cortex.neuron.worker.hosts.rendezvous import Rendezvous
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelHost, RelaySink, Resident, SleepRejected
from cortex.neuron.worker.process import WorkerLost
from cortex.system.tasks import run_once
from cortex.wire.errors import CortexError, InsufficientCapacity, LoadFailed, ModelUnsupported
from cortex.wire.node.protocol import ModelShare

log = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_S = 60.0
"""How long a share may wait for other loads on its devices."""
FREE_S = 15.0
"""How long a rank whose lead is gone may take to leave its step; then its worker is killed."""


@dataclass(frozen=True, slots=True)
class ShareResources:
    """What this node has for shares."""

    library: Library
    loader: ModelLoader
    room: DeviceAllocator
    devices: NodeDevices
    harness: EngineHarness
    sleep_budget: SleepBudget


class HostedShare(RelaySink):
    """One share, and the sink of its host: only the leader's rank has outputs."""

    def __init__(
        self, order: PrepareShare, connection: Connection, resources: ShareResources, stale: list[HostedShare]
    ) -> None:
        """`stale`: shares that end first."""
        super().__init__(None)
        self.model_id = order.request.model_id
        self.lead = lead_of(order)
        self._stale = stale
        self._order = order
        self._connection = connection
        self._resources = resources
        self._loader = resources.loader
        self._host: ModelHost | None = None
        """Set when its load begins."""
        self._stage_layers: tuple[int, ...] = ()
        self._model: tuple[KnownModel, ModelFacts] | None = None
        """Once its files are known."""
        self.ended = asyncio.Event()
        """Nothing of it is left."""
        self._given: asyncio.Future[LoadSpec] = asyncio.get_running_loop().create_future()
        """What the lead has it load, once all peers are ready."""
        self._work = run_once(self._run(), f"load a part of {self.model_id}")
        """Its load, or the latest order to sleep or wake."""
        self._ending: asyncio.Task[None] | None = None
        self._is_urgent = asyncio.Event()
        """Its ranks may wait for a lead that is gone."""

    @property
    def is_ending(self) -> bool:
        return self._ending is not None

    def status(self) -> ModelShare:
        resident, devices = self._resident, self._host.device_indices if self._host is not None else ()
        return ModelShare(
            model_id=self.model_id,
            lead=self.lead,
            state="loading" if resident is None else "asleep" if resident.host_bytes else "ready",
            devices=devices,
            num_bytes=_held_bytes(resident) if resident is not None else 0,
            device_bytes=resident.device_bytes(len(devices)) if resident is not None else (),
            awake_bytes=resident.measured_bytes if resident is not None else 0,
            stage_layers=self._stage_layers,
            host_bytes=self.host_bytes,
        )

    @property
    def _resident(self) -> Resident | None:
        return self._host.resident if self._host is not None else None

    @property
    def is_loaded(self) -> bool:
        return self._resident is not None

    @property
    def host_bytes(self) -> int:
        return self._resident.host_bytes if self._resident is not None else 0

    def load(self, spec: LoadSpec) -> None:
        if not self._given.done():
            self._given.set_result(spec)

    def sleep(self) -> None:
        self._work = run_once(self._reply_to(self._fall_asleep(), self._work), f"put {self.model_id} to sleep")

    def wake(self) -> None:
        self._work = run_once(self._reply_to(self._wake(), self._work), f"wake {self.model_id}")

    async def end(self) -> None:
        """The lead is gone, or nobody waits for it any more. Returns when nothing of the share is in memory."""
        self._is_urgent.set()
        await self.unload()

    async def unload(self) -> None:
        """The lead has ended its steps. Returns when nothing is in memory; a load of another model is awaited."""
        if self._ending is None:
            self._ending = run_once(self._end(), f"free the part of {self.model_id}")
        await asyncio.shield(self._ending)

    def kill(self, reason: str) -> None:
        if self._host is not None:
            self._host.kill(reason)
        else:
            self._work.cancel()

    async def _end(self) -> None:
        self._work.cancel()
        await asyncio.wait({self._work})
        if self._host is None or not self.is_loaded:
            return
        unload = asyncio.create_task(self._host.unload())
        patience = asyncio.create_task(self._patience())
        await asyncio.wait({unload, patience}, return_when=asyncio.FIRST_COMPLETED)
        patience.cancel()
        if not unload.done():
            self._host.kill(f"the lead of {self.model_id} is gone, and its part here does not end its step")
        reclaimed = await unload
        log.info("%s: freed the part that this node held, %s", self.model_id, reclaimed)

    async def _patience(self) -> None:
        await self._is_urgent.wait()
        await asyncio.sleep(FREE_S)

    async def _run(self) -> None:
        request = self._order.request
        if self._resources.library.is_configured(request.model_id):
            request = msgspec.structs.replace(request, source=None)  # its files may be elsewhere than on the lead
        reply: ShareMessage
        try:
            for share in self._stale:
                await (share.unload() if share.is_ending else share.end())
            model = msgspec.structs.replace(
                self._resources.library.adopt(request),
                replicas=1,
                nodes=request.nodes,
                tensor_parallel=request.tensor_parallel,
                pipeline_parallel=request.pipeline_parallel,
            )
            path = await self._loader.find_local(model) or await self._loader.download(model, lambda *_: None)
            facts = await self._resources.harness.inspect(model, path)
            self._model = model, facts
            async with contextlib.AsyncExitStack() as room:
                chosen = await self._room_for(model, facts, room)
                claim = self._resources.devices.claims.new(model.id, chosen.indices, spans=True)
                claim.take()
                room.callback(self._release_unless_loaded, claim)
                await self._connection.send(encode(SharePrepared(chosen.free_bytes, chosen.limits)))
                given = await self._given
                self._host = self._new_host(model, facts, chosen, given, claim)
                resident = await self._host.load(self)
            reply = ShareLoaded(resident.info.notes)
        except Exception as error:  # noqa: BLE001 - reported
            reply = self._reported(error)
        await self._connection.send(encode(reply))

    async def _reply_to(self, work: Coroutine[Any, Any, ShareMessage], before: asyncio.Task[None]) -> None:
        reply: ShareMessage
        try:
            await asyncio.wait({before})
            reply = await work
        except Exception as error:  # noqa: BLE001 - reported
            reply = self._reported(error)
        finally:
            work.close()
            self._resources.sleep_budget.settle()
        await self._connection.send(encode(reply))

    def _reported(self, error: Exception) -> ShareMessage:
        """The reply to an order that failed: the lead waits for one, whatever the error is."""
        match error:
            case InsufficientCapacity():
                elsewhere = isinstance(error, RoomElsewhere)
                return ShareFailed(FaultKind.OUT_OF_MEMORY, error.message, has_room_elsewhere=elsewhere)
            case ModelUnsupported():
                return ShareFailed(FaultKind.UNSUPPORTED, error.message)
            case CortexError():
                return ShareFailed(FaultKind.REQUEST, error.message)
            case LoadRejected():
                return ShareFailed(error.kind, str(error), error.cancelled)
            case SleepRejected():
                return ShareFailed(FaultKind.REQUEST, str(error))
            case WorkerLost() | Damaged():
                return ShareLost(str(error))
        log.error("%s: the part for %s failed", self.model_id, self.lead, exc_info=error)
        return ShareFailed(FaultKind.REQUEST, explain(error))

    async def _fall_asleep(self) -> ShareMessage:
        """Raises SleepRejected or WorkerLost."""
        host, resident = self._loaded()
        need_bytes = resident.info.weight_bytes
        async with self._resources.sleep_budget.reserve(need_bytes) as has_room:
            if not has_room:
                raise SleepRejected(f"no room in host memory to sleep, {gib(need_bytes)} needed")
            await host.sleep()
        return ShareSlept()

    async def _wake(self) -> ShareMessage:
        """Raises InsufficientCapacity, LoadRejected, Damaged or WorkerLost."""
        host, resident = self._loaded()
        assert self._model is not None
        try:
            async with contextlib.AsyncExitStack() as room:
                await self._entered(self._resources.room.for_wake(self._model[0], host, resident), room)
                await wake_settled(host)
        except (InsufficientCapacity, LoadRejected) as error:
            if await self._resources.room.has_room_elsewhere(error, *self._model, host, resident):
                raise RoomElsewhere(str(error)) from error
            raise
        return ShareWoken()

    def _loaded(self) -> tuple[ModelHost, Resident]:
        """Raises WorkerLost."""
        if self._host is None or self._host.resident is None:
            raise WorkerLost(f"the part of {self.model_id} is gone")
        return self._host, self._host.resident

    async def _entered(self, room: contextlib.AbstractAsyncContextManager[T], stack: contextlib.AsyncExitStack) -> T:
        """Raises InsufficientCapacity."""
        try:
            # Bounded: a load that holds the room may itself wait for a node that waits for this share.
            async with asyncio.timeout(ROOM_S):
                return await stack.enter_async_context(room)
        except TimeoutError:
            raise InsufficientCapacity(f"another model is being loaded here for {ROOM_S:.0f} s; try again") from None

    async def _room_for(self, model: KnownModel, facts: ModelFacts, room: contextlib.AsyncExitStack) -> ChosenDevices:
        """The devices of the share, reserved until `room` ends. Raises LoadFailed or InsufficientCapacity."""
        if facts.digest != self._order.digest:
            raise LoadFailed(f"the files of {model.id} here are not those of the lead; the nodes need the same ones")
        return (await self._entered(self._resources.room.for_load(model, facts), room)).chosen

    def _release_unless_loaded(self, claim: DeviceClaim) -> None:
        if not self.is_loaded:
            claim.release()

    def _new_host(
        self, model: KnownModel, facts: ModelFacts, chosen: ChosenDevices, given: LoadSpec, claim: DeviceClaim
    ) -> ModelHost:
        """Returns a host for what the lead loads, with the files and memory limits of this node. Raises LoadFailed."""
        rank, kind = given.rank, chosen.devices[0].kind
        if rank is None or rank.rendezvous is None or (rank.backend == "nccl") != (kind == "cuda"):
            raise LoadFailed(f"{self.model_id} needs devices of one kind on all nodes, and has {kind} ones here")
        own_stages = given.stages[rank.rank : rank.rank + len(chosen.devices)]
        self._stage_layers = tuple(stage.num_layers for stage in own_stages)
        own = self._resources.harness.spec(model, facts, chosen)
        spec = replace(
            given,
            path=own.path,
            memory_bytes=own.memory_bytes,
            min_free_bytes=own.min_free_bytes,
            num_host_shares=own.num_host_shares,
            model_id="",  # the lead reports the model
            kv_host_bytes=own.kv_host_bytes,
        )
        address = replace(rank.rendezvous, own_host=self._connection.local_host)
        rendezvous = Rendezvous(rank.size, rank.backend, address=address)
        return self._resources.devices.sharded_host(chosen.indices, spec, claim, rendezvous, first_rank=rank.rank)

    def on_lost(self, reason: str) -> None:
        log.warning("%s: the part that this node held is lost: %s", self.model_id, reason)
        run_once(self._connection.send(encode(ShareLost(reason))), f"report the loss of {self.model_id}")


def _held_bytes(resident: Resident) -> int:
    """What it holds of its devices now."""
    return resident.process_bytes if resident.host_bytes else resident.measured_bytes


def lead_of(order: PrepareShare) -> str:
    return order.request.nodes[0] if order.request.nodes else ""
