"""The part of a model on another node, as the lead sees it: a `ModelPart`.

Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import logging
import math

import msgspec

from cortex.neuron.engine.request import EngineInfo, LoadSpec
from cortex.neuron.node.spanning.protocol import (
    Connection,
    KillShare,
    LoadShare,
    PrepareShare,
    ShareEnding,
    ShareFailed,
    ShareLoaded,
    ShareLost,
    SharePrepared,
    ShareSlept,
    ShareUnloaded,
    ShareWoken,
    SleepShare,
    UnloadShare,
    WakeShare,
    decode_from_peer,
    encode,
)
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import LoadRejected, ModelSink, Resident, SleepRejected
from cortex.neuron.worker.process import WorkerLost
from cortex.system.tasks import run_once
from cortex.wire.node.orders import LoadRequest

log = logging.getLogger(__name__)

UNLOAD_S = 60.0
"""How long a peer may take to free its part. Where its worker is busy with another load, it does so after that."""
KILL_S = 30.0
"""How long a peer may take to end its workers. Then the share counts as lost, and the connection is closed."""


class RemoteShare:
    """Made for one load over a new connection, and of no use after its unload or loss."""

    def __init__(self, node: str, connection: Connection) -> None:
        self.freed_at_s = -math.inf
        self.device_indices: tuple[int, ...] = ()
        """Those of the other node are not ours."""
        self.resident: Resident | None = None
        self.spec: LoadSpec
        """What it loads, with the first of its ranks. Known once all peers are ready."""
        self.local_host = connection.local_host
        self._node = node
        self._connection = connection
        self._prepared: asyncio.Future[SharePrepared] = asyncio.get_running_loop().create_future()
        self._loaded: asyncio.Future[Resident] = asyncio.get_running_loop().create_future()
        self._reply: asyncio.Future[None] | None = None
        """To the latest order to sleep or wake."""
        self._ended = asyncio.Event()
        self._is_ending = False
        self._sink: ModelSink | None = None
        self._reader = run_once(self._read(), f"read from {node}")

    async def prepare(self, request: LoadRequest, digest: str) -> SharePrepared:
        """Has the peer find files and devices. Raises LoadRejected or WorkerLost."""
        await self._connection.send(encode(PrepareShare(request, digest)))
        return await asyncio.shield(self._prepared)

    async def load(self, sink: ModelSink) -> Resident:
        self._sink = sink
        await self._connection.send(encode(LoadShare(self.spec)))
        try:
            self.resident = await asyncio.shield(self._loaded)
        except asyncio.CancelledError:
            await self._end()
            raise
        except LoadRejected:
            await self.close()
            raise
        return self.resident

    async def unload(self) -> Reclaimed:
        """Returns when the peer has freed its part, or is gone."""
        await self._end()
        return Reclaimed(0, 0)

    async def sleep(self) -> Resident:
        try:
            return await self._ask(SleepShare())
        except LoadRejected as error:
            raise SleepRejected(str(error)) from error

    async def wake(self) -> Resident:
        return await self._ask(WakeShare())

    async def _ask(self, order: SleepShare | WakeShare) -> Resident:
        if self._ended.is_set() or self.resident is None:
            raise WorkerLost(f"the part on node {self._node} is gone")
        self._reply = asyncio.get_running_loop().create_future()
        await self._connection.send(encode(order))
        await asyncio.shield(self._reply)
        return self.resident

    def kill(self, reason: str) -> None:
        """Has the peer end the workers of its ranks; the sink is notified when it has, or does not respond."""
        run_once(self._kill(reason), f"end the part on {self._node}")

    async def close(self) -> None:
        """Ends the connection; the peer frees what it has. Idempotent."""
        self._is_ending = True
        await self._connection.close()

    async def _kill(self, reason: str) -> None:
        await self._connection.send(encode(KillShare(reason)))
        await self._wait_for_end(KILL_S)
        await self._connection.close()

    async def _end(self) -> None:
        self._is_ending = True
        await self._connection.send(encode(UnloadShare()))
        if not await self._wait_for_end(UNLOAD_S):
            log.warning("node %s has not reported within %.0f s that it freed its part", self._node, UNLOAD_S)
        await self._connection.close()

    async def _wait_for_end(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def _read(self) -> None:
        reason = f"the connection to node {self._node} ended"
        try:
            async for message in self._connection:
                match decode_from_peer(message):
                    case SharePrepared() as prepared:
                        if not self._prepared.done():
                            self._prepared.set_result(prepared)
                    case ShareLoaded(notes=notes):
                        if not self._loaded.done():
                            self._loaded.set_result(_resident(notes))
                    case ShareSlept() | ShareWoken():
                        if self._reply is not None and not self._reply.done():
                            self._reply.set_result(None)
                    case ShareFailed() as failed:
                        text = f"on node {self._node}: {failed.message}"
                        flags = {"cancelled": failed.cancelled, "has_room_elsewhere": failed.has_room_elsewhere}
                        self._fail(LoadRejected(failed.kind, text, **flags))
                    case ShareEnding():
                        if self._sink is not None and not self._is_ending:
                            self._sink.on_ending(f"node {self._node} shuts down")
                    case ShareLost(reason=why):
                        reason = f"on node {self._node}: {why}"
                        break
                    case ShareUnloaded():
                        break
        except msgspec.MsgspecError as error:
            reason = f"node {self._node} sent an invalid message: {error}"
        self._lost(reason)
        await self._connection.close()

    def _lost(self, reason: str) -> None:
        self._ended.set()
        self.resident = None
        was_loaded = self._loaded.done() and self._loaded.exception() is None
        self._fail(WorkerLost(reason))
        if was_loaded and not self._is_ending and self._sink is not None:
            self._sink.on_lost(reason)

    def _fail(self, error: Exception) -> None:
        for reply in (self._prepared, self._loaded, self._reply):
            if reply is not None and not reply.done():
                reply.set_exception(error)
                reply.exception()  # marks it as retrieved: a share may end before its load is awaited


def _resident(notes: tuple[str, ...]) -> Resident:
    """Nothing of it is in the memory of this node."""
    info = EngineInfo("", "", 0, 0, weight_bytes=0, kv_bytes=0, page_tokens=0, num_pages=0, notes=notes)
    return Resident(info, measured_bytes=0, process_bytes=0)
