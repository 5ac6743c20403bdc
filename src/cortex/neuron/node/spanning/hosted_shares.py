"""The parts of models that this node holds for other nodes, which lead them.

A share lives as long as its connection: when the lead unloads it or is gone, its memory is freed. Everything here runs
on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec

from cortex.neuron.engine.request import EngineStats, StepOutput
from cortex.neuron.node.loading.library import Library
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.spanning.protocol import (
    Connection,
    KillShare,
    LoadShare,
    ShareFailed,
    ShareLoaded,
    ShareLost,
    ShareMessage,
    ShareUnloaded,
    UnloadShare,
    decode_from_lead,
    encode,
)
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.group import WorkerGroup
from cortex.neuron.worker.model_host import LoadRejected, Resident
from cortex.neuron.worker.process import WorkerLost
from cortex.tasks import run_once
from cortex.wire.errors import CortexError, InsufficientCapacity
from cortex.wire.node import ModelShare

log = logging.getLogger(__name__)

FREE_S = 5.0
"""For a rank whose lead is gone to leave its step; then its worker is killed."""


class HostedShares:
    def __init__(self, library: Library, loader: ModelLoader) -> None:
        self._library = library
        self._loader = loader
        self._shares: dict[_Share, Connection] = {}

    def statuses(self) -> tuple[ModelShare, ...]:
        return tuple(share.status() for share in self._shares)

    async def serve(self, connection: Connection) -> None:
        """Serves one lead until its connection ends. Nothing of its share is left then, also when this is cancelled."""
        share: _Share | None = None
        try:
            async for message in connection:
                match decode_from_lead(message):
                    case LoadShare() as order if share is None:
                        share = _Share(order, connection, self._library, self._loader)
                        self._shares[share] = connection
                    case LoadShare():
                        break
                    case UnloadShare():
                        if share is not None:
                            await share.end()
                        await connection.send(encode(ShareUnloaded()))
                        break
                    case KillShare(reason=reason):
                        if share is not None:
                            share.kill(reason)
        except msgspec.MsgspecError as error:
            log.warning("the lead of a model sent an invalid message: %s", error)
        finally:
            if share is not None:
                ending = run_once(self._forget(share), f"free the part of {share.model_id}")
                await asyncio.shield(ending)
            await connection.close()

    async def close(self) -> None:
        """Ends all shares; their leads see that their connections end."""
        for share, connection in list(self._shares.items()):
            await connection.close()
            await self._forget(share)

    async def _forget(self, share: _Share) -> None:
        await share.end()
        self._shares.pop(share, None)


class _Share:
    """One share, and the sink of its group."""

    def __init__(self, order: LoadShare, connection: Connection, library: Library, loader: ModelLoader) -> None:
        self.model_id = order.request.model_id
        self._order = order
        self._connection = connection
        self._library = library
        self._loader = loader
        self._group: WorkerGroup | None = None
        self._resident: Resident | None = None
        self._is_lost = False
        self._load = run_once(self._run(), f"load a part of {self.model_id}")
        self._ending: asyncio.Task[None] | None = None

    def status(self) -> ModelShare:
        resident = self._resident
        return ModelShare(
            model_id=self.model_id,
            lead=self._order.request.nodes[0] if self._order.request.nodes else "",
            state="loading" if resident is None else "ready",
            devices=self._group.device_indices if self._group is not None else (),
            num_bytes=resident.measured_bytes if resident is not None else 0,
        )

    async def end(self) -> None:
        """Returns when nothing of it is in memory."""
        if self._ending is None:
            self._ending = run_once(self._end(), f"free the part of {self.model_id}")
        await asyncio.shield(self._ending)

    def kill(self, reason: str) -> None:
        if self._group is not None and not self._is_lost:
            self._group.kill(reason)
        else:
            self._load.cancel()

    async def _end(self) -> None:
        self._load.cancel()
        await asyncio.wait({self._load})
        if self._group is None or self._resident is None or self._is_lost:
            return
        unload = asyncio.create_task(self._group.unload(self._resident))
        await asyncio.wait({unload}, timeout=FREE_S)
        if not unload.done():
            self._group.kill(f"the lead of {self.model_id} is gone, and its part here does not end its step")
        reclaimed = await unload
        log.info("%s: freed the part that this node held, %s", self.model_id, reclaimed)

    async def _run(self) -> None:
        request = self._order.request
        if self._library.is_configured(request.model_id):
            request = msgspec.structs.replace(request, source=None)  # its files may be elsewhere than on the lead
        answer: ShareMessage
        try:
            model = replace(self._library.adopt(request), replicas=1, nodes=request.nodes)
            async with self._loader.share_host(model, self._order, self._connection.local_host) as (group, spec):
                self._group = group
                self._resident = await group.load(spec, self)
            answer = ShareLoaded(self._resident.info.notes)
        except CortexError as error:
            kind = FaultKind.OUT_OF_MEMORY if isinstance(error, InsufficientCapacity) else FaultKind.REQUEST
            answer = ShareFailed(kind, error.message)
        except LoadRejected as error:
            answer = ShareFailed(error.kind, str(error), error.cancelled)
        except WorkerLost as error:
            answer = ShareLost(str(error))
        await self._connection.send(encode(answer))

    # ModelSink: only the leader's rank has outputs

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        pass

    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None:
        pass

    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None:
        pass

    def on_stats(self, stats: EngineStats) -> None:
        pass

    def on_lost(self, reason: str) -> None:
        self._is_lost = True
        log.warning("%s: the part that this node held is lost: %s", self.model_id, reason)
        run_once(self._connection.send(encode(ShareLost(reason))), f"report the loss of {self.model_id}")
