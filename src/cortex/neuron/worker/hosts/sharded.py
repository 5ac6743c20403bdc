"""All of several hosts as one: the ranks of a divided model, each in the worker of its device.

The leader, rank 0, takes the requests. A rank that is lost leaves the others in the middle of a step, so the workers of
all of them are replaced, and the model is lost as a whole. Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from cortex.neuron.engine.request import EngineRequest, RankSpec
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.hosts.several import load_all, uncancelled, unload_all, wake_all
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelHost, ModelPart, ModelSink, RelaySink, Resident
from cortex.system.tasks import run_once
from cortex.wire.words import os_error_in_words

Backend = Literal["nccl", "sockets"]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of the ranks of one load. It exists while it is entered, for the time of the load."""

    size: int
    backend: Backend
    device_locks: tuple[str, ...] = ()
    """See `RankSpec`."""
    directory: str = field(
        default_factory=lambda: str(Path(tempfile.gettempdir(), f"neuron-group-{secrets.token_hex(8)}"))
    )

    def rank(self, number: int) -> RankSpec:
        return RankSpec(number, self.size, self.directory, self.backend, self.device_locks)

    def __enter__(self) -> None:
        """Raises LoadRejected."""
        try:
            Path(self.directory).mkdir(mode=0o700)
        except OSError as error:
            message = f"no directory for the ranks of the model: {os_error_in_words(error)}"
            raise LoadRejected(FaultKind.REQUEST, message) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # In a task: a load that is cancelled here would leave its ranks in memory.
        removal = asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)
        run_once(removal, f"remove {self.directory}")


log = logging.getLogger(__name__)


class ShardedHost:
    """A `ModelHost`: its parts are loaded all or none, and the loss of one is the loss of all."""

    def __init__(
        self,
        leader: ModelHost,
        followers: Sequence[ModelPart],
        rendezvous: AbstractContextManager[None],
    ) -> None:
        """`rendezvous`: entered for the load; may raise LoadRejected."""
        self.resident: Resident | None = None
        self._leader = leader
        self._parts: tuple[ModelPart, ...] = (leader, *followers)
        self._rendezvous = rendezvous
        self._state: Literal["awake", "asleep", "ended"] = "awake"
        """`ended`: no part waits for another one any more."""
        self._lost: set[ModelPart] = set()
        self._loss_in_load: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_closing = False

    @property
    def device_indices(self) -> tuple[int, ...]:
        return tuple(index for part in self._parts for index in part.device_indices)

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        return (self.device_indices,)

    @property
    def freed_at_s(self) -> float:
        return max(part.freed_at_s for part in self._parts)

    async def load(self, sink: ModelSink) -> Resident:
        parts = [(part, _PartSink(self, part, sink, leads=part is self._leader)) for part in self._parts]
        try:
            with self._rendezvous:
                await load_all(parts, self._loss_in_load, self._end)
        except BaseException:
            self._end()
            await uncancelled(self.unload())
            raise
        return self._changed("awake")

    def _end(self) -> None:
        self._state = "ended"

    def _changed(self, state: Literal["awake", "asleep"]) -> Resident:
        self._state = state
        self.resident = Resident.together([part.resident for part in self._parts if part.resident is not None])
        return self.resident

    async def unload(self) -> Reclaimed:
        """The leader is unloaded first: it announces no more steps."""
        freed = [await unload_all(self._parts[:1])]
        self._end()
        freed.append(await unload_all(self._parts[1:]))
        self.resident = None
        return Reclaimed.total(freed)

    async def sleep(self) -> Resident:
        """The leader falls asleep first: its last self-test needs the others. A sleeping model takes no steps."""
        for part in self._parts:
            await part.sleep()
        return self._changed("asleep")

    async def wake(self) -> Resident:
        """The leader wakes last: its self-test needs the others."""
        self._state = "awake"
        try:
            await wake_all((*self._parts[1:], self._leader))
        except LoadRejected:
            self._state = "asleep"
            raise
        except Damaged:
            self._end()
            self.resident = None
            raise
        return self._changed("awake")

    def submit(self, request: EngineRequest) -> None:
        self._leader.submit(request)

    def cancel(self, request_id: str) -> None:
        self._leader.cancel(request_id)

    def kill(self, reason: str) -> None:
        if self._state != "ended":  # the workers may have other models
            for part in self._parts:
                part.kill(reason)

    def stop_reloads(self) -> None:
        self._is_closing = True

    def part_lost(self, part: ModelPart, reason: str, sink: ModelSink) -> None:
        """Replaces the workers of the other parts. The model is reported as lost when all of them have ended, so that
        the next load finds new ones."""
        if self._state == "ended":
            return  # the other workers may have other models
        if self._state == "asleep":  # no part waits for another one
            self._end()
            run_once(self._free(reason, sink), "free the other ranks of a sleeping model")
            return
        rank = self._parts.index(part)
        if not self._lost and not self._is_closing:
            log.warning("rank %d of a divided model is lost (%s); replacing the workers of its group", rank, reason)
        self._lost.add(part)
        for other in self._parts:
            if other not in self._lost:
                other.kill(f"rank {rank} of a model on this device was lost: {reason}")
        if self.resident is None:
            if not self._loss_in_load.done():
                self._loss_in_load.set_result(reason)
        elif len(self._lost) == len(self._parts):
            self._end()
            self.resident = None
            sink.on_lost(reason)

    async def _free(self, reason: str, sink: ModelSink) -> None:
        await self.unload()
        sink.on_lost(reason)


class _PartSink(RelaySink):
    """Only the leader's events concern the model; a loss of any part does."""

    def __init__(self, host: ShardedHost, part: ModelPart, model: ModelSink, *, leads: bool) -> None:
        super().__init__(model if leads else None)
        self._host = host
        self._part = part
        self._whole = model

    def on_lost(self, reason: str) -> None:
        self._host.part_lost(self._part, reason, self._whole)
