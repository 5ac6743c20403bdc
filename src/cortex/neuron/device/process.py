"""One incarnation of a device's worker: the process, its channel, and the certainty of its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from cortex.neuron.device.address import DeviceAddress
from cortex.neuron.device.channel import LoopChannel
from cortex.neuron.device.protocol import Command, Event, Exit, Faulted

log = logging.getLogger(__name__)

ENGINE = "cortex.neuron.device.torch_harness:load"
"""The engine that workers run; tests put a faulty one in its place."""

LAST_WORDS_S = 1.0
"""A dead worker's channel is read to its end, which holds the reason; this bounds the wait for it."""


class WorkerProcess:
    """Belongs to the loop that spawned it. `on_lost` is called exactly once, whatever ends the process."""

    def __init__(self, on_event: Callable[[Event], None], on_lost: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._on_lost = on_lost
        self._channel = LoopChannel(self._received, self._channel_closed)
        self._process: asyncio.subprocess.Process | None = None
        self._reason: str | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._heard_all = asyncio.Event()

    @classmethod
    async def spawn(
        cls,
        device: DeviceAddress,
        *,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str], None],
        engine: str = ENGINE,
    ) -> WorkerProcess:
        worker = cls(on_event, on_lost)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # A session of its own: a signal to the terminal's group must not reach it before the daemon decides.
                worker._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "cortex.neuron.device.worker"),
                    *("--channel", str(theirs.fileno())),
                    *("--kind", device.kind),
                    *("--index", str(device.index)),
                    *("--engine", engine),
                    *("--log-level", logging.getLevelName(log.getEffectiveLevel())),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(device),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker._channel, sock=ours)
        worker._reaper = asyncio.create_task(worker._reap(worker._process))
        return worker

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, command: Command) -> None:
        self._channel.send(command)

    def kill(self, reason: str) -> None:
        """Ends the process now; `on_lost` follows with `reason`. Idempotent."""
        self._reason = self._reason or reason
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """Asks it to leave, kills it after `grace_s`; returns when the process is reaped."""
        assert self._reaper is not None
        self._reason = self._reason or "the worker was stopped"
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
        if self._process is not None and self._process.returncode is None:
            asyncio.get_running_loop().call_later(0.2, self.kill, reason)

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        return_code = await process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._heard_all.wait(), LAST_WORDS_S)
        self._channel.close()
        reason = self._reason or _describe_exit(return_code)
        log.info("worker %d ended: %s", process.pid, reason)
        self._on_lost(reason)


def _environment(device: DeviceAddress) -> dict[str, str]:
    """The daemon's own, so that the worker imports from the same places, with only its device visible.

    Threads that wait for each other sleep rather than spin: on a busy host a spinning thread keeps the core from the
    very thread it waits for, and a matrix product takes ten times as long.
    """
    paths = os.pathsep.join(filter(None, sys.path))
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": paths, **device.environment()}


def _describe_exit(return_code: int) -> str:
    if return_code >= 0:
        return f"the worker exited with code {return_code}"
    name = signal.Signals(-return_code).name
    hint = " (was the host out of memory? see dmesg)" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{hint}"
