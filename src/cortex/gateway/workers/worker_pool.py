"""The worker processes of a gateway: started, replaced when they die, and ended. Lives in the main process."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cortex.gateway.config import Config
from cortex.gateway.proxy.admission import LocalAdmissionController
from cortex.gateway.workers.merged_metrics import merged
from cortex.gateway.workers.messages import Close, Setup
from cortex.gateway.workers.worker import encode_config
from cortex.gateway.workers.worker_session import WorkerSession
from cortex.ipc.child import start_child

log = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
"""How long the gateway's start waits for its workers."""
REPLACE_AFTER_S = 1.0
EXIT_TIMEOUT_S = 5.0
"""How long a worker may take to exit after its grace period before it is killed."""


class WorkerPool:
    """`num_workers` processes besides the main one. Owned by the gateway, on its loop."""

    def __init__(self, num_workers: int, admission: LocalAdmissionController, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock
        self._directory = Path(tempfile.mkdtemp(prefix="cortex-"))  # only this user can read it
        self.api_socket = self._directory / "api"
        """Where the main process must serve its own routes for the workers, before `start`."""
        self._api_descriptor = -1
        self._sessions: set[WorkerSession] = set()
        self._ended_metrics = b""
        """The metrics of workers that have ended: counters never decrease."""
        self._setup = Setup(b"", "", 0)
        self._ready = [asyncio.Event() for _ in range(num_workers)]
        self._runners: list[asyncio.Task[None]] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._is_closing = False

    async def start(self, config: Config, host: str, port: int) -> None:
        """Returns when every worker accepts connections on `host:port`, or after `START_TIMEOUT_S`."""
        self._setup = Setup(encode_config(config), host, port)
        # The socket stays reachable through this descriptor, which workers inherit. Its name is removed now, so no file
        # is left behind however this process ends.
        self._api_descriptor = os.open(self.api_socket, os.O_PATH)
        shutil.rmtree(self._directory)
        self._runners = [
            asyncio.create_task(self._keep_running(number, ready), name=f"worker {number}")
            for number, ready in enumerate(self._ready, 1)
        ]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for ready in self._ready:
                    await ready.wait()
        except TimeoutError:
            num_ready = sum(ready.is_set() for ready in self._ready)
            log.error("%d of %d workers started within %.0f s", num_ready, len(self._ready), START_TIMEOUT_S)

    def reconfigure(self, config: Config) -> None:
        """Sends `config` to every worker; leases granted afterwards follow it."""
        self._setup = Setup(encode_config(config), self._setup.host, self._setup.port)
        for session in self._sessions:
            session.send(self._setup)

    def metrics(self) -> Iterator[bytes]:
        """The metrics of all workers, including those that have ended; up to a second old."""
        if self._ended_metrics:
            yield self._ended_metrics
        yield from (session.metrics for session in self._sessions if session.metrics)

    async def close(self, grace_s: float) -> None:
        """Gives running responses `grace_s` to end; no process is left afterwards."""
        self._is_closing = True
        for session in self._sessions:
            session.send(Close(grace_s))
        if self._runners:
            await asyncio.wait(self._runners, timeout=grace_s + EXIT_TIMEOUT_S)
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._runners, return_exceptions=True)
        if self._api_descriptor >= 0:
            os.close(self._api_descriptor)
            self._api_descriptor = -1
        shutil.rmtree(self._directory, ignore_errors=True)  # exists only if `start` was never called

    async def _keep_running(self, number: int, ready: asyncio.Event) -> None:
        """Runs one worker after another until the pool closes."""
        while not self._is_closing:
            try:
                reason = f"exit code {await self._run_worker(ready)}"
            except OSError as error:
                reason = str(error)
            if not self._is_closing:
                log.error("worker %d ended (%s); starting another in %.0f s", number, reason, REPLACE_AFTER_S)
                await asyncio.sleep(REPLACE_AFTER_S)

    async def _run_worker(self, ready: asyncio.Event) -> int:
        """The worker's exit code. Raises OSError when no process can be created."""
        process, control = await start_child(
            "cortex.gateway.workers",
            *("--api", str(self._api_descriptor)),
            kind=socket.SOCK_STREAM,
            descriptors=(self._api_descriptor,),
        )
        self._processes.add(process)
        try:
            session = WorkerSession(self._admission, self._clock, ready, self._session_ended)
            await session.channel.attach(control)
            self._sessions.add(session)
            session.send(self._setup)
            if self._is_closing:
                session.send(Close(0.0))
            return await process.wait()
        finally:
            self._processes.discard(process)

    def _session_ended(self, session: WorkerSession) -> None:
        self._sessions.discard(session)
        if session.metrics:
            self._ended_metrics = merged([self._ended_metrics, session.metrics])
