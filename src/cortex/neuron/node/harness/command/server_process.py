"""The processes of one server, from their start to their end, their memory, and the last lines of their output."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
from pynvml import NVMLError

from cortex.neuron.node.harness.command import guard
from cortex.neuron.node.harness.command.server_log import ServerLog, plain_lines
from cortex.wire.node.protocol import Device

log = logging.getLogger(__name__)

_PROC = Path("/proc")


def descendants(process: int, proc: Path = _PROC) -> list[int]:
    """The processes below `process`, parents first. Blocks for the time of a few small reads. `proc`: where the kernel
    describes processes."""
    found: list[int] = []
    remaining = [process]
    while remaining:
        children = _children(remaining.pop(), proc)
        found += children
        remaining += children
    return found


def resident_bytes(processes: list[int]) -> int:
    """The memory of these processes, with shared memory counted once and ended processes as 0."""
    return sum(map(_resident_bytes, processes))


def is_stopped(process: int) -> bool:
    try:
        stat = (_PROC / str(process) / "stat").read_text()
    except OSError:  # it has ended
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _children(process: int, proc: Path) -> list[int]:
    try:
        threads = list((proc / str(process) / "task").iterdir())
    except OSError:  # it has ended
        return []
    children: list[int] = []
    for thread in threads:
        with contextlib.suppress(OSError):  # this thread has ended; others may have children
            children += map(int, (thread / "children").read_text().split())
    return children


def _resident_bytes(process: int) -> int:
    """Its proportional share, or all resident memory if the kernel does not report that."""
    for file, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = (_PROC / str(process) / file).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(field):
                return int(line.split()[1]) << 10
    return 0


def gpu_bytes(devices: Sequence[Device], processes: Sequence[int], library: Any = pynvml) -> int | None:
    """Bytes that `processes` hold on `devices`, by the driver. None if unknown: it reports host process ids, which a
    container does not see, and on some systems no memory per process. Blocks."""
    wanted = set(processes)
    try:
        library.nvmlInit()
    except NVMLError:
        return None
    try:
        found = [
            used
            for device in devices
            for used in library.nvmlDeviceGetComputeRunningProcesses(library.nvmlDeviceGetHandleByIndex(device.index))
            if used.pid in wanted
        ]
    except NVMLError:
        return None
    finally:
        library.nvmlShutdown()
    if not found or any(used.usedGpuMemory is None for used in found):
        return None
    return sum(int(used.usedGpuMemory) for used in found)


_GUARD = str(Path(guard.__file__).resolve())
_NO_MEMORY = re.compile(
    rb"out of (device |host )?memory|OutOf(Device|Host)?Memory|MemoryError|cannot allocate memory|bad_alloc"
    rb"|not enough memory|no available memory|free memory on device .* is less than desired",
    re.IGNORECASE,
)
"""Messages of programs that run out of GPU or host memory, among them llama.cpp over Vulkan, vLLM and SGLang."""
_BLOCK_BYTES = 1 << 20
_PID_S = 60.0
"""Time limit of the command that prints a process id."""


async def output_of(
    command: Sequence[str], env: Mapping[str, str], timeout_s: float, stderr: int = asyncio.subprocess.DEVNULL
) -> bytes:
    """What a command prints. Raises OSError, also when it takes longer than `timeout_s`; then it is killed."""
    async with asyncio.timeout(timeout_s):
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
        try:
            return (await process.communicate())[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


class ServerProcess:
    """Belongs to the loop that started it. A separate thread reads its output, because a server may write faster than
    the loop reads and must not wait."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, output: int, log: ServerLog) -> None:
        """`output`: the read end of its output pipe, closed with it."""
        self._name = name
        self._process = process
        self._log = log
        self._outside: int | None = None
        """The server's process if a daemon started it."""
        self._is_killed = False
        self._is_read = asyncio.Event()
        """All of its output is in the log."""
        loop = asyncio.get_running_loop()
        reader = partial(self._read_output, output, lambda: loop.call_soon_threadsafe(self._is_read.set))
        threading.Thread(target=reader, name=f"log of {name}", daemon=True).start()
        self._waiter = asyncio.create_task(self._wait(), name=f"end of {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: ServerLog,
        cleaning: Sequence[str] = (),
    ) -> ServerProcess:
        """`name`: for the node's own log. `cleaning`: a command that runs when all processes have ended. A command that
        cannot be started ends at once, and its log says why."""
        log.begin(f"--- {name} starts: {command[0]}")
        output, write_end = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # fewer wake-ups where the system permits it
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _BLOCK_BYTES)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                _GUARD,
                str(len(cleaning)),
                *cleaning,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(write_end)
        return cls(name, process, output, log)

    @property
    def pid(self) -> int | None:
        """The server's own process id; None before it has started and after its end."""
        return next(iter(descendants(self._process.pid)), None)

    @property
    def has_ended(self) -> bool:
        return self._waiter.done()

    @property
    def num_bytes(self) -> int:
        """The host's memory of all its processes. Blocks for the time of a few small reads."""
        return resident_bytes(self.processes)

    @property
    def processes(self) -> list[int]:
        """Blocks for the time of a few small reads."""
        outside = [] if self._outside is None else [self._outside, *descendants(self._outside)]
        return list(dict.fromkeys([*descendants(self._process.pid), *outside]))

    @property
    def is_stopped(self) -> bool:
        """Whether a process of it is stopped by a signal. Blocks for the time of a few small reads."""
        return any(map(is_stopped, self.processes))

    async def find_outside(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Count the process whose id `command` prints, with all below it, as the server's."""
        try:
            self._outside = int(await output_of(command, env, _PID_S))
        except (OSError, ValueError) as error:
            log.warning("%s: cmd_pid printed no process id (%s); its memory is not measured", self._name, error)

    @property
    def last_lines(self) -> str:
        """The end of its output, for an error."""
        return self._log.last_lines

    @property
    def lacked_memory(self) -> bool:
        """Whether it has ended for lack of memory: the system killed it, or its output says so."""
        if self._is_killed or not self._waiter.done():
            return False
        is_killed_by_system = self._waiter.result() == 128 + signal.SIGKILL
        return is_killed_by_system or self._log.has(_NO_MEMORY)

    async def ended(self) -> str:
        """How it ended, once it has, and all of its output is read. May be cancelled and called again."""
        return self._manner(await asyncio.shield(self._waiter))

    def _manner(self, code: int) -> str:
        if code == guard.NOT_STARTED:
            return "could not be started"
        if self._is_killed:
            return "was killed by the node"
        if code == 128 + signal.SIGKILL:
            return "was ended by signal 9, which the system sends when memory runs out"
        return f"was ended by signal {code - 128}" if code > 128 else f"ended with status {code}"

    async def stop(self, timeout_s: float, command: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        """Asks the server to end, by SIGTERM or with `command`, and kills it after `timeout_s`. Returns when none of
        its processes is left."""
        try:
            async with asyncio.timeout(timeout_s):
                if command:
                    await self._run(command, env or {})
                else:
                    self._write(b"T")
                await asyncio.shield(self._waiter)
        except TimeoutError:
            log.warning("%s: did not end within %g s and is killed", self._name, timeout_s)
        finally:
            self.kill()
        await asyncio.shield(self._waiter)

    def kill(self) -> None:
        """Kills all its processes now. `ended` returns when they have ended."""
        self._is_killed = self._is_killed or not self.has_ended
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _write(self, data: bytes) -> None:
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    async def _run(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        try:
            stopper = await asyncio.create_subprocess_exec(
                *command, env=dict(env), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
            )
        except (OSError, ValueError) as error:  # ValueError: an argument with a NUL
            log.warning("%s: cmd_stop cannot be started (%s); SIGTERM is sent instead", self._name, error)
            self._write(b"T")
            return
        try:
            await stopper.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                stopper.kill()

    async def _wait(self) -> int:
        code = await self._process.wait()
        await self._is_read.wait()
        self._log.end(f"--- {self._name} {self._manner(code)}")
        return code

    def _read_output(self, output: int, done: Callable[[], object]) -> None:
        """Runs in a thread, until every process that writes there has ended."""
        try:
            while data := os.read(output, _BLOCK_BYTES):
                self._keep(data)
            self._keep(b"")
        finally:
            os.close(output)
            with contextlib.suppress(RuntimeError):  # the loop was closed before
                done()

    def _keep(self, data: bytes) -> None:
        self._log.feed(data)
        if log.isEnabledFor(logging.DEBUG):
            for line in plain_lines(data):
                log.debug("%s: %s", self._name, line)
