"""One model that is divided among several devices, as the daemon sees it: rank r is in the worker of the r-th device.

The leader, rank 0, takes the requests. A rank that is lost leaves the others in the middle of a step, so all workers of
the group are replaced, and the model is lost as a whole. Of a model that spans nodes, the node of the leader has the
group: its own ranks, then the shares of the other nodes. Each of those has a group of its own ranks, which all follow.
Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from cortex.neuron.engine.request import EngineRequest, EngineStats, LoadSpec, Meeting, RankSpec, StepOutput
from cortex.neuron.worker.device_claims import DeviceClaim
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelSink, Resident, SleepRejected, together
from cortex.neuron.worker.process import WorkerLost
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.tasks import run_once
from cortex.wire.words import os_error_in_words

log = logging.getLogger(__name__)


Backend = Literal["nccl", "tcp"]


class Member(Protocol):
    """One rank in the worker of a device here, or the ranks of another node. See `WorkerSupervisor`."""

    @property
    def freed_at_s(self) -> float: ...
    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident: ...
    async def unload(self, resident: Resident) -> Reclaimed: ...
    async def sleep(self, resident: Resident) -> Resident: ...
    async def wake(self, resident: Resident) -> Resident: ...
    def kill_worker(self, reason: str) -> None: ...


class Share(Member, Protocol):
    """The ranks of another node."""

    async def close(self) -> None:
        """Ends the connection to the node, which frees what it has. Idempotent."""


@dataclass(frozen=True, slots=True)
class RanksOnNode:
    """The part of a group on one node, if its model spans several."""

    ranks: tuple[int, ...]
    """The first rank of each member."""
    size: int
    meeting: Meeting
    shares: tuple[Share, ...] = ()
    """Of the leader's group: the other nodes."""
    held_ports: tuple[socket.socket, ...] = ()
    """The ports of `meeting`, until the load has ended."""


class WorkerGroup:
    """The `ModelHost` of one divided model; made for its load, and of no use after its unload or loss."""

    def __init__(
        self,
        supervisors: Sequence[WorkerSupervisor],
        device_locks: Sequence[str],
        claim: DeviceClaim,
        span: RanksOnNode | None = None,
    ) -> None:
        """`supervisors`: by device index, which is the order of the ranks. `device_locks`: see `RankSpec`. `claim`: on
        these devices, held as long as the model is."""
        self._supervisors = tuple(supervisors)
        self._members: tuple[Member, ...] = (*supervisors, *(span.shares if span is not None else ()))
        self._device_locks = tuple(device_locks)
        self._claim = claim
        self._span = span
        self._residents: tuple[Resident, ...] = ()
        """What each member holds; the share of another node counts nothing here."""
        self._is_closing = False
        self._is_given_up = False
        """No rank waits for another one any more: the leader is unloaded, or the load failed."""
        self._is_asleep = False
        self._lost: set[int] = set()
        """Members whose part of the model is gone."""

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        return (self.device_indices,)

    @property
    def device_indices(self) -> tuple[int, ...]:
        return tuple(supervisor.device.index for supervisor in self._supervisors)

    @property
    def freed_at_s(self) -> float:
        return max(member.freed_at_s for member in self._members)

    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident:
        """Loads all ranks side by side. If one fails, or when this is cancelled, nothing of any rank is left.

        Raises LoadRejected or WorkerLost.
        """
        if (conflict := self._claim.conflict()) is not None:  # a lost replica has its devices no longer
            raise LoadRejected(FaultKind.REQUEST, conflict)
        self._claim.take()
        loads: list[asyncio.Task[Resident]] = []
        try:
            directory = tempfile.mkdtemp(prefix="neuron-group-")
        except OSError as error:
            await self._ended(loads)
            message = f"no directory for the ranks of the model: {os_error_in_words(error)}"
            raise LoadRejected(FaultKind.REQUEST, message) from error
        try:
            loads += [
                asyncio.create_task(member.load(replace(spec, rank=place), self._sink_of(number, sink)))
                for number, (member, place) in enumerate(zip(self._members, self._places(directory), strict=True))
            ]
            await asyncio.wait(loads, return_when=asyncio.FIRST_EXCEPTION)
            if not all(load.done() and load.exception() is None for load in loads):
                raise await self._failure_of(loads)
        except asyncio.CancelledError:
            await self._ended(loads)
            raise
        finally:
            self._release_ports()
            # In a task: a load that is cancelled here would leave its ranks in memory.
            run_once(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True), f"remove {directory}")
        self._residents = tuple(load.result() for load in loads)
        return together(self._residents)

    def _places(self, directory: str) -> list[RankSpec]:
        on_gpus = all(supervisor.device.kind == "cuda" for supervisor in self._supervisors)
        backend: Backend = "nccl" if on_gpus else "tcp"
        if (span := self._span) is not None:
            return [RankSpec(rank, span.size, directory, backend, meeting=span.meeting) for rank in span.ranks]
        size = len(self._supervisors)
        return [RankSpec(rank, size, directory, backend, self._device_locks) for rank in range(size)]

    async def _failure_of(self, loads: Sequence[asyncio.Task[Resident]]) -> BaseException:
        """Ends the loads that still run. Returns the error that made the others fail."""
        await self._ended(loads)
        errors = [error for load in loads if not load.cancelled() and (error := load.exception()) is not None]
        causes = [error for error in errors if not (isinstance(error, LoadRejected) and error.cancelled)]
        return (causes or errors)[0]

    async def _ended(self, loads: Sequence[asyncio.Task[Resident]]) -> None:
        """Ends the loads and frees the ranks that are loaded, whatever becomes of the others, and also when this is
        cancelled."""
        self._is_given_up = True
        ending = run_once(self._end_loads(loads), "end the loads of a divided model")
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait({ending})
            raise

    async def _end_loads(self, loads: Sequence[asyncio.Task[Resident]]) -> None:
        for load in loads:
            load.cancel()
        if loads:
            await asyncio.wait(loads)
        unloads = [
            member.unload(load.result())
            for member, load in zip(self._members, loads, strict=False)  # none if there was no directory for them
            if not load.cancelled() and load.exception() is None
        ]
        for problem in await asyncio.gather(*unloads, return_exceptions=True):
            if isinstance(problem, BaseException):
                log.error("a rank of a model that is not loaded could not be freed: %s", problem, exc_info=problem)
        if self._span is not None:  # a load that was cancelled before it began has not closed its connection
            await asyncio.gather(*(share.close() for share in self._span.shares))
        self._release_ports()
        self._claim.release()

    def _release_ports(self) -> None:
        """The leader's worker has them, or nobody needs them."""
        for held in self._span.held_ports if self._span is not None else ():
            held.close()

    async def unload(self, resident: Resident) -> Reclaimed:
        """Frees all ranks, the leader first: it announces no steps any more. Never fails."""
        del resident
        first, *others = zip(self._members, self._residents, strict=True)
        freed = [await first[0].unload(first[1])]
        self._is_given_up = True
        freed += await asyncio.gather(*(member.unload(part) for member, part in others))
        self._claim.release()
        return Reclaimed.total(freed)

    async def sleep(self, resident: Resident) -> Resident:
        """Puts the leader to sleep first, whose last self-test needs the others. A sleeping model takes no steps, and
        claims no devices. Raises SleepRejected or WorkerLost."""
        del resident
        first, *others = zip(self._members, self._residents, strict=True)
        parts = [await first[0].sleep(first[1])]
        for supervisor, part in others:
            parts.append(await supervisor.sleep(part))
        self._residents = tuple(parts)
        self._is_asleep = True
        self._claim.release()
        return together(self._residents)

    async def wake(self, resident: Resident) -> Resident:
        """Wakes the leader last, whose self-test needs the others. Raises LoadRejected (the model is asleep as before),
        Damaged or WorkerLost."""
        del resident
        if (conflict := self._claim.conflict()) is not None:
            raise LoadRejected(FaultKind.OUT_OF_MEMORY, conflict)
        self._claim.take()
        self._is_asleep = False
        first, *others = zip(self._members, self._residents, strict=True)
        woken: list[tuple[Member, Resident]] = []
        try:
            for supervisor, part in others:
                woken.append((supervisor, await supervisor.wake(part)))
            leader = await first[0].wake(first[1])
        except LoadRejected:
            await self._back_to_sleep(woken)
            self._is_asleep = True
            self._claim.release()
            raise
        except Damaged:
            # The damaged rank, which came after the woken ones, was closed.
            damaged = others[len(woken)][0] if len(woken) < len(others) else first[0]
            for supervisor, part in (first, *others):
                if supervisor is not damaged:
                    await supervisor.unload(part)
            self._claim.release()
            raise
        self._residents = (leader, *(part for _, part in woken))
        return together(self._residents)

    async def _back_to_sleep(self, woken: Sequence[tuple[Member, Resident]]) -> None:
        """Raises WorkerLost if nothing of the model is left."""
        for member, part in woken:
            try:
                await member.sleep(part)
            except SleepRejected as error:
                await self.unload(together(self._residents))
                message = f"the model was unloaded: a rank that woke cannot be put to sleep again: {error}"
                raise WorkerLost(message) from error

    def submit(self, resident: Resident, request: EngineRequest) -> None:
        del resident
        self._supervisors[0].submit(self._residents[0], request)

    def cancel(self, resident: Resident, request_id: str) -> None:
        del resident
        self._supervisors[0].cancel(self._residents[0], request_id)

    def kill(self, reason: str) -> None:
        """Kills the workers of all ranks here; the model is reported as lost when they have ended."""
        for supervisor in self._supervisors:
            supervisor.kill_worker(reason)

    def stop_reloads(self) -> None:
        """The node shuts down: that ranks end is no fault from now on."""
        self._is_closing = True

    def _sink_of(self, rank: int, sink: ModelSink) -> ModelSink:
        def on_lost(reason: str) -> None:
            self._on_rank_lost(rank, reason, sink)

        def on_ending(reason: str) -> None:
            def leave() -> None:
                run_once(self._leave(reason, sink), "free a model before a part of it goes")

            sink.on_ending(reason, leave)

        return _RankSink(sink if rank == 0 else None, on_lost, on_ending)

    def _on_rank_lost(self, rank: int, reason: str, sink: ModelSink) -> None:
        """Replaces the workers of the other members. The model is reported as lost when all of them have ended, so that
        the next load finds new ones."""
        if self._is_given_up:
            return  # the other workers may have other models
        if self._is_asleep:  # no rank waits for another one
            self._is_given_up = True
            run_once(self._free_others(rank, reason, sink), "free the other ranks of a sleeping model")
            return
        if not self._lost and not self._is_closing:
            log.warning("rank %d of a divided model is lost (%s); replacing the workers of its group", rank, reason)
        self._lost.add(rank)
        for number, member in enumerate(self._members):
            if number not in self._lost:
                member.kill_worker(f"rank {rank} of a model on this device was lost: {reason}")
        if len(self._lost) == len(self._members):
            self._claim.release()
            sink.on_lost(reason)

    async def _leave(self, reason: str, sink: ModelSink) -> None:
        """Frees all ranks, which are idle, so that no worker has to be replaced."""
        if not self._lost and not self._is_given_up:
            self._is_given_up = True
            await self.unload(together(self._residents))
            sink.on_lost(reason)

    async def _free_others(self, lost: int, reason: str, sink: ModelSink) -> None:
        parts = list(zip(self._members, self._residents, strict=True))
        await asyncio.gather(*(member.unload(part) for member, part in parts[:lost] + parts[lost + 1 :]))
        sink.on_lost(reason)


class _RankSink:
    """The `ModelSink` of one rank. Only the leader's events concern the model; a loss of any rank does."""

    def __init__(
        self, model: ModelSink | None, on_lost: Callable[[str], None], on_ending: Callable[[str], None]
    ) -> None:
        self._model = model
        self._on_lost = on_lost
        self._on_ending = on_ending

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._model is not None:
            self._model.on_progress(stage, done_bytes, total_bytes)

    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None:
        if self._model is not None:
            self._model.on_outputs(outputs)

    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None:
        if self._model is not None:
            self._model.on_request_failed(request_id, kind, message)

    def on_stats(self, stats: EngineStats) -> None:
        if self._model is not None:
            self._model.on_stats(stats)

    def on_lost(self, reason: str) -> None:
        self._on_lost(reason)

    def on_ending(self, reason: str, then: Callable[[], None]) -> None:
        del then  # the group frees the rank
        self._on_ending(reason)
