"""The daemon's side of one worker process: its calls, its watchdog, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from cortex.ipc.fork_client import Worker
from cortex.ipc.loop_channel import LoopChannel
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.protocol import (
    Activity,
    Command,
    DeviceAddress,
    Event,
    Exit,
    Faulted,
    Measured,
    Reply,
    Report,
)
from cortex.system.tasks import Supervisor, run_once

log = logging.getLogger(__name__)

_LAST_EVENTS_S = 5.0
"""How long to wait for the last events of a dead worker, which hold the reason of its death."""
_EXIT_REPORT_S = 2.0
"""How long the exit of a worker that has closed its channel may take to be reported, which says how it died."""
_WATCH_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """Time limits of a worker. The first four are times without progress; a load progresses piece by piece."""

    start_s: float = 300.0
    step_s: float = 120.0
    load_s: float = 300.0
    unload_s: float = 30.0
    reclaim_s: float = 5.0
    """How long the memory of an unloaded model may take to become free."""
    exit_s: float = 3.0
    """How long a worker may take to exit when asked to, without `save_s`."""
    saves_kv: bool = False
    """Whether it writes KV pages to disk before it exits."""
    save_s: float = 30.0
    """Time limit of that; pages not written by then are recomputed."""

    def without_progress_s(self, activity: Activity) -> float:
        match activity:
            case "start":
                return self.start_s
            case "load":
                return self.load_s
            case "unload":
                return self.unload_s
            case "idle" | "step":
                return self.step_s

    @property
    def shortest_s(self) -> float:
        """The shortest time without progress."""
        return min(self.start_s, self.step_s, self.load_s, self.unload_s)


@dataclass(frozen=True, slots=True)
class ProgressWatch:
    """The watchdog's state: the worker's last reported progress, and when that changed. Pure; the clock is passed in.

    A worker is stuck when work is pending and its progress does not change. Whether it sends reports does not matter.
    """

    activity: Activity
    progress: int
    since_s: float

    @classmethod
    def begin(cls, now_s: float) -> ProgressWatch:
        return cls("start", -1, now_s)

    def reported(self, activity: Activity, progress: int, now_s: float) -> ProgressWatch:
        """The state after a report. Only a change of progress restarts the clock; a change of activity does not."""
        since_s = now_s if progress != self.progress else self.since_s
        return ProgressWatch(activity, progress, since_s)

    @property
    def is_in_step(self) -> bool:
        """Whether it works without a pending call: prepares a model, or follows a leader."""
        return self.activity == "step"

    def restarted(self, now_s: float) -> ProgressWatch:
        """The state while no work is pending, and after a reply: the clock restarts."""
        return ProgressWatch(self.activity, self.progress, now_s)

    def excusing(self, late_s: float) -> ProgressWatch:
        """The state after the watchdog itself was `late_s` late: in that time, the worker may not have run either."""
        return ProgressWatch(self.activity, self.progress, self.since_s + late_s)

    def verdict(self, now_s: float, timeouts: WorkerTimeouts, *, is_called: bool = True) -> str | None:
        """Why the worker must be replaced, or None. Without a call it can only be in a step, because a worker that
        stops right after a load has reported nothing else."""
        activity = self.activity if is_called or self.activity == "idle" else "step"
        limit_s = timeouts.without_progress_s(activity)
        silent_s = now_s - self.since_s
        if silent_s < limit_s:
            return None
        return f"no progress in '{activity}' for {silent_s:.0f} s with work pending (limit {limit_s:.0f} s)"


class WorkerLost(Exception):
    """The worker ended before its reply; the message says why."""


class WorkerProcess:
    """Belongs to the loop that spawned it. `on_event` gets every event, replies included. `on_lost` is called exactly
    once, whatever ends the process."""

    def __init__(
        self,
        device: DeviceAddress,
        *,
        timeouts: Callable[[], WorkerTimeouts],
        on_event: Callable[[Event], None],
        on_lost: Callable[[str], None],
        has_live_requests: Callable[[], bool],
    ) -> None:
        self._device = device
        self._timeouts = timeouts
        self._on_event = on_event
        self._on_lost = on_lost
        self._has_live_requests = has_live_requests
        self._channel: LoopChannel[Event] = LoopChannel(Event, self._received, self._channel_closed)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._process: Worker | None = None
        self._reason: str | None = None
        self._closed_reason: str | None = None
        """The reason for killing it if it closes its channel and does not exit."""
        self._reaper: asyncio.Task[None] | None = None
        self._received_all = asyncio.Event()
        self._watch = ProgressWatch.begin(_now_s())

    async def spawn(self, worker_factory: WorkerFactory) -> None:
        """Starts the process; commands may be sent at once. Raises OSError when it cannot be created."""
        ours, theirs = socket.socketpair()
        with theirs:
            await self._channel.attach(ours)
            try:
                # Awaited last: a cancelled spawn must not leave a process without an owner.
                self._process = await worker_factory.fork(self._device, theirs)
            except BaseException:
                self._channel.close()
                raise
        self._reaper = run_once(self._reap(self._process), "reap a worker")

    @property
    def process_id(self) -> int | None:
        """None until the worker is forked."""
        return self._process.process_id if self._process is not None else None

    def send(self, command: Command) -> None:
        """Raises Unsendable."""
        self._channel.send(command)

    def call(self, number: int, command: Command) -> asyncio.Future[Reply]:
        """Sends a command that has a reply. `number` is its handle or query id, which has no other call pending.

        Raises Unsendable; the reply raises WorkerLost.
        """
        self._channel.send(command)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        return reply

    def kill(self, reason: str) -> None:
        """Kills the process; `on_lost` follows with `reason`. Idempotent."""
        self._reason = self._reason or reason
        if self._process is not None:
            self._process.kill()

    async def stop(self, grace_s: float, save_s: float = 0.0) -> None:
        """Asks the worker to exit, kills it after `grace_s`, returns when the process is reaped. `save_s`: see
        `Exit`."""
        assert self._reaper is not None
        self._reason = self._reason or "the worker was stopped"
        if self.process_id is not None:
            self.send(Exit(save_s))
            await asyncio.wait({self._reaper}, timeout=grace_s)
        self.kill(self._reason)
        await asyncio.wait({self._reaper})

    def _received(self, event: Event) -> None:
        if isinstance(event, Faulted):
            self._reason = self._reason or event.message
            return
        if isinstance(event, Report):
            self._watch = self._watch.reported(event.activity, event.progress, _now_s())
        self._on_event(event)
        if isinstance(event, Reply):
            number = event.query if isinstance(event, Measured) else event.handle
            reply = self._replies.pop(number, None)
            if reply is not None and not reply.done():
                reply.set_result(event)
            self._watch = self._watch.restarted(_now_s())

    def _channel_closed(self, reason: str) -> None:
        # Either the process is exiting and can be reaped in a moment, or its stream was corrupt. It is unusable.
        self._received_all.set()
        if self._process is not None and not self._process.exited.done():
            asyncio.get_running_loop().call_later(_EXIT_REPORT_S, self._kill_closed, self._process, reason)

    def _kill_closed(self, process: Worker, reason: str) -> None:
        if not process.exited.done():
            self._closed_reason = reason
            process.kill()

    async def _reap(self, process: Worker) -> None:
        watchdog = Supervisor().start(f"watch the worker of {self._device.thread_name}", self._keep_watch)
        return_code = await process.exited
        watchdog.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._received_all.wait(), _LAST_EVENTS_S)
        self._channel.close()
        closed = self._closed_reason if return_code == -signal.SIGKILL else None
        reason = self._reason or closed or _describe_exit(return_code)
        log.info("worker %s ended: %s", process.process_id, reason)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(WorkerLost(reason))
                reply.exception()  # marks it as retrieved: a cancelled caller does not do so
        self._on_lost(reason)

    async def _keep_watch(self) -> None:
        looked_s = _now_s()
        while True:
            timeouts = self._timeouts()
            interval_s = min(_WATCH_INTERVAL_S, timeouts.shortest_s / 4)
            await asyncio.sleep(interval_s)
            before_s, looked_s = looked_s, _now_s()
            self._watch = self._watch.excusing(max(0.0, looked_s - before_s - 2 * interval_s))
            if not (self._replies or self._has_live_requests() or self._watch.is_in_step):
                self._watch = self._watch.restarted(_now_s())
            elif verdict := self._watch.verdict(_now_s(), timeouts, is_called=bool(self._replies)):
                log.error("killing the worker of %s: %s", self._device.thread_name, verdict)
                self.kill(verdict)
                self._watch = self._watch.restarted(_now_s())


def _describe_exit(return_code: int) -> str:
    if return_code >= 0:
        return f"the worker exited with code {return_code}"
    name = signal.Signals(-return_code).name
    hint = " (was the host out of memory? see dmesg)" if name == "SIGKILL" else ""
    return f"the worker was killed by {name}{hint}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
