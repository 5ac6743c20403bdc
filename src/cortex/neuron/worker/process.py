"""One incarnation of a device's worker: the process, its channel, and the certainty of its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable

from cortex.ipc.channel import LoopChannel
from cortex.neuron.worker.address import DeviceAddress
from cortex.neuron.worker.factory import WorkerFactory, WorkerHandle
from cortex.neuron.worker.protocol import Command, Event, Exit, Faulted

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""A dead worker's channel is read to its end, which holds the reason; this bounds the wait for it."""


class WorkerProcess:
    """Belongs to the loop that spawned it. `on_lost` is called exactly once, whatever ends the process."""

    def __init__(self, on_event: Callable[[Event], None], on_lost: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._on_lost = on_lost
        self._channel: LoopChannel[Event] = LoopChannel(Event, self._received, self._channel_closed)
        self._process: WorkerHandle | None = None
        self._reason: str | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._heard_all = asyncio.Event()

    @classmethod
    async def spawn(
        cls,
        device: DeviceAddress,
        worker_factory: WorkerFactory,
        *,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str], None],
    ) -> WorkerProcess:
        """A worker for `device`, which serves as soon as it is forked. Raises OSError where none can be made."""
        worker = cls(on_event, on_lost)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            await asyncio.get_running_loop().create_unix_connection(lambda: worker._channel, sock=ours)
            try:
                # Awaited last: a spawn that is cancelled must not leave a process that nobody knows.
                worker._process = await worker_factory.fork(device, theirs)
            except BaseException:
                worker._channel.close()
                raise
        worker._reaper = asyncio.create_task(worker._reap(worker._process))
        return worker

    @property
    def process_id(self) -> int | None:
        """None until it is forked."""
        return self._process.process_id if self._process is not None else None

    def send(self, command: Command) -> None:
        self._channel.send(command)

    def kill(self, reason: str) -> None:
        """Ends the process now; `on_lost` follows with `reason`. Idempotent."""
        self._reason = self._reason or reason
        if self._process is not None:
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """Asks it to leave, kills it after `grace_s`; returns when the process is reaped."""
        assert self._reaper is not None
        self._reason = self._reason or "the worker was stopped"
        if self.process_id is not None:
            self.send(Exit())
            await asyncio.wait({self._reaper}, timeout=grace_s)
        self.kill(self._reason)
        await asyncio.wait({self._reaper})

    def _received(self, event: Event) -> None:
        if isinstance(event, Faulted):
            self._reason = self._reason or event.message
        else:
            self._on_event(event)

    def _channel_closed(self, reason: str) -> None:
        # The channel closes a moment before the process can be reaped, or because the stream made no sense:
        # either way it is of no more use.
        self._heard_all.set()
        if self._process is not None and not self._process.exited.done():
            asyncio.get_running_loop().call_later(0.2, self.kill, reason)

    async def _reap(self, process: WorkerHandle) -> None:
        return_code = await process.exited
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._heard_all.wait(), LAST_WORDS_S)
        self._channel.close()
        reason = self._reason or _describe_exit(return_code)
        log.info("worker %s ended: %s", process.process_id, reason)
        self._on_lost(reason)


def _describe_exit(return_code: int) -> str:
    if return_code >= 0:
        return f"the worker exited with code {return_code}"
    name = signal.Signals(-return_code).name
    hint = " (was the host out of memory? see dmesg)" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{hint}"
