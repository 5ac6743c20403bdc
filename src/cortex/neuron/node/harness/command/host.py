"""The host of one model in a server of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from cortex.http.limits import UpstreamLimits
from cortex.http.ticker import Ticker
from cortex.http.upstream.faults import UpstreamFault
from cortex.http.upstream.pool import Pool
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, StepOutput
from cortex.neuron.node.harness.command.estimates import SizeOfModel
from cortex.neuron.node.harness.command.group import MemberLink
from cortex.neuron.node.harness.command.server_log import ServerLog
from cortex.neuron.node.harness.command.server_memory import MemoryWatch, ServerMemory
from cortex.neuron.node.harness.command.server_process import ServerProcess
from cortex.neuron.servers.entry import HarnessEntry, StateRequest
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelSink, Resident, SleepRejected
from cortex.system.tasks import run_once
from cortex.wire.errors import LoadFailed
from cortex.wire.node.groups import MemberAddress


class SilenceWatch:
    """Triggers a check of the server whenever a response has been awaited for `after_s`. Belongs to the loop's
    thread."""

    def __init__(self, after_s: float, check: Callable[[], Awaitable[None]]) -> None:
        self._after_s = after_s
        self._check = check
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """By request."""

    def begin(self, request_id: str) -> None:
        """The request was sent."""
        self._timers[request_id] = asyncio.get_running_loop().call_later(self._after_s, self._overdue, request_id)

    def end(self, request_id: str) -> None:
        """Part of the response has arrived, or it is no longer awaited. May be called repeatedly."""
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

    def clear(self) -> None:
        """Stop awaiting any response."""
        for request_id in list(self._timers):
            self.end(request_id)

    def _overdue(self, request_id: str) -> None:
        run_once(self._check_and_go_on(request_id), "check a silent server")

    async def _check_and_go_on(self, request_id: str) -> None:
        await self._check()
        if request_id in self._timers:
            self.begin(request_id)


log = logging.getLogger(__name__)

_POLL_S = 0.1
_MEASURE_S = 1.0
"""Interval of memory measurements while a server starts; each takes the kernel some time per GiB."""
_PORT_TRIES = 3
_STOPPED_CHECKS = 2
_STOPPED_CHECK_S = 2.0
_SHORTEST_STREAM_S = 0.02
"""A response that is complete within this time after its first piece arrived as a whole; its speed is unknown."""
_PAGES = 1 << 40
"""A server manages its own KV cache: the node only bounds the number of its requests."""


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Time limits of a server, and the interval of its memory measurements."""

    health_s: float = 15.0
    """Time limit of one health check."""
    begin_s: float = 3600.0
    """Minimum time granted to a working server until part of a response arrives; a whole response arrives only when
    complete."""
    loss_s: float = 5.0
    """The death of a server is noticed this much later than its closed connection."""
    reclaim_s: float = 5.0
    """Time for the driver of a GPU to free the server's memory."""
    watch_s: float = 5.0
    """Minimum interval of memory measurements while the server serves."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What to run for one model, on a port."""

    argv: Callable[[int], list[str]]
    stop: Callable[[int, int], list[str]]
    """The stop command for a port and process id; empty for SIGTERM."""
    env: Callable[[int], Mapping[str, str]]
    kill: Callable[[int], list[str]] = lambda _: []
    """The cleanup command after its processes were killed."""
    find_pid: Callable[[int], list[str]] = lambda _: []
    """The command that prints the process id of a server started by a daemon."""


@dataclass(eq=False, slots=True)
class CommandHost:
    """A `ModelHost`. A submitted request has a slot at once: its caller sends it to the server itself and reports with
    `produced` and `finished`."""

    model_id: str
    entry: HarnessEntry
    command: ServerCommand
    memory: ServerMemory
    context_tokens: int | None
    """As configured; None: the server decides, and does not say."""
    ticker: Ticker
    choose_port: Callable[[], int]
    size: SizeOfModel
    log: ServerLog = field(default_factory=ServerLog)
    link: MemberLink | None = None
    """The link to the other nodes, if the server is a member of a group. Only the leader's server takes requests and
    has a pool."""
    times: ServerTimes = field(default_factory=ServerTimes)
    resident: Resident | None = None
    pool: Pool | None = None
    """Requests to the server, while it is healthy."""
    freed_at_s: float = 0.0
    _loaded_bytes: int = 0
    """As measured when it was loaded."""
    _memory_watch: MemoryWatch | None = None
    _server: ServerProcess | None = None
    _sink: ModelSink | None = None
    _port: int = 0
    _last_check: str = "no check has finished"
    """The outcome of the last health check."""
    _kill_reason: str | None = None
    _watch: asyncio.Task[None] | None = None
    _stop_watch: asyncio.Task[None] | None = None
    _live: dict[str, float | None] = field(default_factory=dict)
    """Requests with a slot → when the server began to respond."""
    _silence: SilenceWatch = field(init=False)
    _stats: EngineStats = EngineStats()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        silence_s = self.entry.silence_timeout_s
        reason = f"its server has sent nothing for {silence_s:g} s"
        self._silence = SilenceWatch(silence_s, lambda: self.end_if_hung(reason))

    @property
    def device_indices(self) -> tuple[int, ...]:
        return self.memory.indices

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        return (self.memory.indices,)

    @property
    def _serves(self) -> bool:
        return self.link is None or self.link.member.is_leader

    async def load(self, sink: ModelSink) -> Resident:
        self._sink = sink
        free_before = await self.memory.free()
        try:
            if self.link is not None:
                group = self.entry.group
                checks_ports = group is not None and group.ready == "port"
                await self.link.open(self._group_ended, sink.on_ending, checks_ports=checks_ports)
            for attempt in range(_PORT_TRIES):
                if await self._start(sink, is_last=attempt == _PORT_TRIES - 1):
                    break
            assert self._server is not None
            measured = await self.memory.measured(self._server, free_before)
        except BaseException as error:
            self._leave_group(str(error) or "its load was cancelled")
            if self._server is not None:
                self._server.kill()
                await self._server.ended()
            self._gone()
            raise
        counted = self.size.started(measured)
        self._loaded_bytes = measured
        self.resident = Resident(self._info(counted), counted, measured)
        self._watch = run_once(self._watch_end(), f"server of {self.model_id}")
        if self.link is not None:
            self._stop_watch = run_once(self._watch_stopped(self._server), f"state of {self.model_id}")
        name = f"{self.model_id} ({self.entry.name})"
        self._memory_watch = MemoryWatch(
            name, self.memory, self._server, measured, self._holds, every_s=self.times.watch_s
        )
        return self.resident

    def _info(self, weight_bytes: int) -> EngineInfo:
        """The known metadata of a server's model; a context of 0 is unknown."""
        tokens = self.context_tokens or 0
        return EngineInfo(
            self.entry.name, "", tokens, 0, weight_bytes=weight_bytes, kv_bytes=0, page_tokens=1, num_pages=_PAGES
        )

    async def _start(self, sink: ModelSink, *, is_last: bool) -> bool:
        """Returns True when the server is healthy, and False if another program took its port first. Raises
        LoadRejected."""
        port, self._last_check = self.choose_port(), "no check has finished"
        self._port = port
        name = f"{self.model_id} ({self.entry.name})"
        server = self._server = await ServerProcess.start(
            name, self.command.argv(port), self.command.env(port), self.log, self.command.kill(port)
        )
        if self._kill_reason is not None:  # the group has ended while it was started
            server.kill()
        silence_s = self.entry.silence_timeout_s
        limits = UpstreamLimits(silence_s=silence_s, begin_s=max(silence_s, self.times.begin_s))
        pool = Pool(f"http://127.0.0.1:{port}", self.ticker, limits)
        health = self.entry.health
        healthy = asyncio.create_task(self._wait_until_healthy(pool, server, sink))
        ended = asyncio.create_task(server.ended())
        try:
            await asyncio.wait({healthy, ended}, timeout=health.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                if not is_last and not _is_free(port):
                    return False
                kind = FaultKind.OUT_OF_MEMORY if server.lacked_memory else FaultKind.BUG
                how = f"was ended: {self._kill_reason}" if self._kill_reason else ended.result()
                raise LoadRejected(kind, f"its server ({self.entry.name}) {how}{server.last_lines}")
            if not healthy.done():
                server.kill()
                await ended
                raise LoadRejected(
                    FaultKind.BUG,
                    f"its server ({self.entry.name}) was not healthy within {health.timeout_s:g} s "
                    f"(health.path {health.path}, health.timeout_s): {self._last_check}{server.last_lines}",
                )
            healthy.result()
            if find_pid := self.command.find_pid(port):
                await server.find_outside(find_pid, self.command.env(port))
            if self._serves:
                self.pool = pool
            return True
        finally:
            healthy.cancel()
            ended.cancel()
            if self.pool is not pool:
                pool.close()

    async def _wait_until_healthy(self, pool: Pool, server: ServerProcess, sink: ModelSink) -> None:
        expected = max(1, self.memory.expected_bytes)
        loop, measured_at_s = asyncio.get_running_loop(), -math.inf
        while not await self._is_healthy(pool):
            if loop.time() - measured_at_s >= _MEASURE_S:
                num_bytes, measured_at_s = await self.memory.held(server) or 0, loop.time()
                self.memory.took(num_bytes)
                sink.on_progress("place", min(num_bytes, expected), expected)
            await asyncio.sleep(_POLL_S)

    async def _is_healthy(self, pool: Pool) -> bool:
        if self.link is not None and not self._serves:
            return await self._is_member_ready(self.link.member.own)
        if self.entry.health.path == "none":
            self._last_check = "nothing listens on its port"
            return not _is_free(self._port)
        return 200 <= (await self._health_status(pool) or 0) < 300

    async def _is_member_ready(self, own: MemberAddress) -> bool:
        if self.entry.group is None or self.entry.group.ready == "started":
            return self._server is not None and self._server.pid is not None
        self._last_check = f"nothing listens on {own.host}:{own.port}"
        try:
            async with asyncio.timeout(self.times.health_s):
                _, writer = await asyncio.open_connection(own.host, own.port)
        except OSError:
            return False
        writer.close()
        return True

    async def _health_status(self, pool: Pool) -> int | None:
        """The status of a health check; None without a response."""
        try:
            path, timeout_s = self.entry.health.path.encode(), self.times.health_s
            status = (await pool.fetch(b"GET", path, timeout_s=timeout_s)).status
        except UpstreamFault as fault:
            self._last_check = str(fault)
            return None
        self._last_check = f"the last check had status {status}"
        return status

    def _holds(self, held: int) -> None:
        """The server holds this much while it serves."""
        resident, counted = self.resident, self.size.holds(held)
        if resident is not None and not resident.host_bytes:
            self.resident = replace(resident, measured_bytes=counted, process_bytes=held)

    async def _watch_end(self) -> None:
        assert self._server is not None
        how = await self._server.ended()
        if self._kill_reason is not None:
            how = f"was ended: {self._kill_reason}"
        reason = f"its server ({self.entry.name}) {how}{self._server.last_lines}"
        self._leave_group(reason)
        self._gone()
        if self._sink is not None:
            self._sink.on_lost(reason)

    async def _watch_stopped(self, server: ServerProcess) -> None:
        """A stopped process blocks the whole group without any connection showing it."""
        num_seen = 0
        while num_seen < _STOPPED_CHECKS:
            await asyncio.sleep(_STOPPED_CHECK_S)
            num_seen = num_seen + 1 if await asyncio.to_thread(lambda: server.is_stopped) else 0
        self.kill(f"a process of it is stopped, for {_STOPPED_CHECKS * _STOPPED_CHECK_S:.0f} s or more")

    # The group

    def _group_ended(self, reason: str) -> None:
        self._kill_reason = reason
        if self._server is None:
            return  # `_start` kills it
        if self._serves:
            self._server.kill()
        else:
            run_once(self._server.stop(self.entry.stop_timeout_s), f"end a member of {self.model_id}")

    def _leave_group(self, reason: str) -> None:
        if self._stop_watch is not None:
            self._stop_watch.cancel()
        if self.link is not None:
            self.link.end(reason)

    async def leave(self, drain_s: float) -> None:
        """The node of a member is shutting down: returns when the leader has ended its requests, or after `drain_s`."""
        if self.link is not None and not self._serves and self.resident is not None:
            await self.link.leave("its node shuts down", drain_s)

    async def sleep(self) -> Resident:
        server, resident = self._server, self.resident
        if not self._serves and server is not None and resident is not None:  # it sleeps with its leader
            held = await self.memory.held(server) or 0
            self.resident = replace(resident, process_bytes=held, host_bytes=max(1, self._loaded_bytes - held))
            return self.resident
        if not self.entry.sleep.path or self.memory.free_bytes is None:
            where = "" if self.memory.free_bytes is not None else " on a CPU, where it would free nothing"
            raise SleepRejected(f"the harness {self.entry.name} has no sleep{where}")
        assert server is not None
        assert resident is not None
        host_before, free_before = await asyncio.to_thread(lambda: server.num_bytes), await self.memory.free()
        if problem := await self._ask(self.entry.sleep):
            raise SleepRejected(f"its server ({self.entry.name}) was asked to sleep and {problem}")
        reclaimed = await self.memory.reclaimed(resident.process_bytes, free_before, self.times.reclaim_s)
        freed = reclaimed.freed_bytes
        if freed < resident.process_bytes // 2:
            raise SleepRejected(f"the sleep of its server ({self.entry.name}) freed {freed >> 20} MiB only")
        host_bytes = await asyncio.to_thread(lambda: server.num_bytes) - host_before
        left = max(0, resident.process_bytes - freed)
        self.resident = replace(resident, process_bytes=left, host_bytes=max(1, host_bytes))
        if self._memory_watch is not None:
            self._memory_watch.is_paused = True
        return self.resident

    async def wake(self) -> Resident:
        resident = self.resident
        assert resident is not None
        if self._serves and (problem := await self._ask(self.entry.wake)):
            await self.unload()
            raise Damaged(f"its server ({self.entry.name}) was asked to wake and {problem}")
        self.resident = replace(resident, process_bytes=self._loaded_bytes, host_bytes=0)
        if self._memory_watch is not None:
            self._memory_watch.is_paused = False
        return self.resident

    async def _ask(self, request: StateRequest) -> str | None:
        """Sends a request to sleep or wake; returns why it failed."""
        if self.pool is None:
            return "has ended"
        body, headers = msgspec.json.encode(request.body), ((b"content-type", b"application/json"),)
        try:
            response = await self.pool.fetch(b"POST", request.path.encode(), headers, body, timeout_s=request.timeout_s)
        except UpstreamFault as fault:
            return f"failed: {fault}"
        return None if response.status < 300 else f"responded with status {response.status}"

    async def unload(self) -> Reclaimed:
        server, resident = self._server, self.resident
        if self._watch is not None:
            self._watch.cancel()
        if server is None or resident is None:
            self._leave_group("it was unloaded")
            return Reclaimed(0, 0)
        if self._memory_watch is not None and not resident.host_bytes:
            await self._memory_watch.look()  # with the caches that its requests have filled
        free_before = await self.memory.free()
        await server.stop(self.entry.stop_timeout_s, *self._stop_command(server))
        self._leave_group("it was unloaded")
        self._gone()
        return await self.memory.reclaimed(resident.process_bytes, free_before, self.times.reclaim_s)

    def _stop_command(self, server: ServerProcess) -> tuple[list[str], Mapping[str, str]]:
        """Checked before the load, but the node's environment may have changed since; the server is ended in any
        case."""
        try:
            return self.command.stop(self._port, server.pid or 0), self.command.env(self._port)
        except LoadFailed as problem:
            log.warning("%s: cmd_stop cannot be run (%s); SIGTERM is sent instead", self.model_id, problem)
            return [], {}

    def _gone(self) -> None:
        if self._memory_watch is not None:
            self.size.ran(self._memory_watch.end())
            self._memory_watch = None
        self.resident = None
        self.freed_at_s = asyncio.get_running_loop().time()
        self._live.clear()
        self._silence.clear()
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    async def end_if_hung(self, reason: str) -> None:
        """Called when a response is overdue. A server that sends other responses, or responds to its health check with
        any status, is kept."""
        pool = self.pool
        if pool is None:
            return
        is_alive = pool.has_heard_since(asyncio.get_running_loop().time() - self.entry.silence_timeout_s)
        if not is_alive and self.entry.health.path != "none":
            is_alive = await self._health_status(pool) is not None
        if is_alive:
            log.info("%s: its server works, but a response is overdue: %s", self.model_id, reason)
        elif self.pool is pool:
            self.kill(reason)

    async def has_ended_soon(self) -> bool:
        """Whether the server has ended, or ends within a moment."""
        if self.pool is not None and self._watch is not None:
            await asyncio.wait({self._watch}, timeout=self.times.loss_s)
        return self.pool is None

    def kill(self, reason: str) -> None:
        if self._server is not None:
            self._kill_reason = reason
            self._server.kill()

    def stop_reloads(self) -> None:
        """Does nothing: the owner of a lost model decides about it."""

    # Requests

    def submit(self, request: EngineRequest) -> None:
        self._live[request.id] = None
        self._silence.begin(request.id)
        self._report(StepOutput(request.id))

    def cancel(self, request_id: str) -> None:
        self._silence.end(request_id)
        if request_id in self._live:
            del self._live[request_id]
            self._report(StepOutput(request_id, finish="cancelled"))

    def produced(self, request_id: str) -> None:
        """The server has begun to respond."""
        self._silence.end(request_id)
        if request_id in self._live:
            self._live[request_id] = asyncio.get_running_loop().time()
            self._report(StepOutput(request_id, tokens=(0,)))  # the server keeps the ids of its tokens to itself

    def finished(self, request_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        """The response is complete."""
        self._silence.end(request_id)
        stats = self._stats
        self._stats = replace(
            stats,
            steps=stats.steps + 1,
            prompt_tokens=stats.prompt_tokens + prompt_tokens,
            completion_tokens=stats.completion_tokens + completion_tokens,
        )
        if request_id in self._live:
            begun_s = self._live.pop(request_id)
            is_stream = begun_s is not None and asyncio.get_running_loop().time() - begun_s >= _SHORTEST_STREAM_S
            later = (0,) * max(0, completion_tokens - 1) if is_stream else ()
            self._report(StepOutput(request_id, tokens=later, finish="stop"))
            if self._sink is not None:
                self._sink.on_stats(self._stats)

    def _report(self, output: StepOutput) -> None:
        if self._sink is not None:
            self._sink.on_outputs((output,))


def free_port() -> int:
    """A currently free port of the loopback address."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port: int = chosen.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
