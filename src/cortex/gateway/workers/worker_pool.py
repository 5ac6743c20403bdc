"""The worker processes of a gateway: started, replaced when they die, ended. Lives in the main process."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cortex.gateway.config import Config
from cortex.gateway.proxy.admission import LocalAdmissionController
from cortex.gateway.workers.merged_metrics import merged
from cortex.gateway.workers.messages import Close, Setup, ToMain
from cortex.gateway.workers.worker import encode_config
from cortex.gateway.workers.worker_session import WorkerSession
from cortex.ipc.message_channel import MessageChannel

log = logging.getLogger(__name__)

START_S = 20.0
"""How long the gateway's start waits for its workers."""
REPLACE_AFTER_S = 1.0
FAREWELL_S = 5.0
"""What a worker may take beyond its grace before it is killed."""


class WorkerPool:
    """`num_workers` processes beside the main one. Owned by the gateway, on its loop."""

    def __init__(self, num_workers: int, admission: LocalAdmissionController, clock: Callable[[], float]) -> None:
        self._num_workers = num_workers
        self._admission = admission
        self._clock = clock
        self._directory = Path(tempfile.mkdtemp(prefix="cortex-"))  # readable by us alone
        self.api_socket = self._directory / "api"
        """Where the main process must serve its own routes for the workers."""
        self._sessions: set[WorkerSession] = set()
        self._ended_metrics = b""
        """What workers that are gone had counted: a counter never goes back."""
        self._setup = Setup(b"", "", 0)
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._server: asyncio.Server | None = None
        self._closing = False

    async def start(self, config: Config, host: str, port: int) -> None:
        """Returns when every worker accepts connections on `host:port`, or `START_S` have passed."""
        self._setup = Setup(encode_config(config), host, port)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._welcome, str(self._directory / "channel"))
        self._keepers = [
            asyncio.create_task(self._keep(number), name=f"worker {number}")
            for number in range(1, self._num_workers + 1)
        ]
        deadline = self._clock() + START_S
        while sum(session.ready.is_set() for session in self._sessions) < self._num_workers:
            if self._clock() > deadline:
                log.error("not all workers have started within %.0f s; serving with those that have", START_S)
                return
            await asyncio.sleep(0.01)

    def reconfigure(self, config: Config) -> None:
        """Tell every worker; what is granted afterwards is granted under the new configuration."""
        self._setup = Setup(encode_config(config), self._setup.host, self._setup.port)
        for session in self._sessions:
            session.send(self._setup)

    def metrics(self) -> Iterator[bytes]:
        """What workers have counted, those that are gone included; up to a second old."""
        if self._ended_metrics:
            yield self._ended_metrics
        yield from (session.metrics for session in self._sessions if session.metrics)

    @property
    def process_ids(self) -> list[int]:
        """Of the workers that accept connections."""
        return [session.process_id for session in self._sessions if session.process_id is not None]

    async def close(self, grace_s: float) -> None:
        """Running answers have `grace_s` to end; no process is left behind."""
        self._closing = True
        for session in self._sessions:
            session.send(Close(grace_s))
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=grace_s + FAREWELL_S)
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _welcome(self) -> MessageChannel[ToMain]:
        return WorkerSession(self._admission, self._clock, self._came, self._left).channel

    def _came(self, session: WorkerSession) -> None:
        self._sessions.add(session)
        session.send(self._setup)

    def _left(self, session: WorkerSession) -> None:
        self._sessions.discard(session)
        if session.metrics:
            self._ended_metrics = merged([self._ended_metrics, session.metrics])

    async def _keep(self, number: int) -> None:
        """Run one worker after the other until the crew closes."""
        while not self._closing:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cortex.gateway.workers",
                str(self._directory / "channel"),
                str(self.api_socket),
                stdin=asyncio.subprocess.DEVNULL,
            )
            self._processes.add(process)
            code = await process.wait()
            self._processes.discard(process)
            if not self._closing:
                log.error("worker %d ended with exit code %d; another takes its place", number, code)
                await asyncio.sleep(REPLACE_AFTER_S)
