"""The processes of one server, from their start to their end, and the last lines of their output."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from cortex.neuron.node.harness.command import guard
from cortex.neuron.node.harness.command.process_memory import descendants, resident_bytes

log = logging.getLogger(__name__)

_GUARD = str(Path(guard.__file__).resolve())
_LINE_END = re.compile(rb"[\r\n]+")  # progress bars return to the begin of their line
_KEPT_LINES = 500
_LINE_BYTES = 2000
_ERROR_LINES = 12


class ServerProcess:
    """Belongs to the loop that started it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = asyncio.create_task(self._read_output(), name=f"log of {name}")
        self._waiter = asyncio.create_task(self._wait(), name=f"end of {name}")

    @classmethod
    async def start(cls, name: str, command: Sequence[str], env: Mapping[str, str]) -> ServerProcess:
        """`name`: for the log. A command that cannot be started ends at once, and its log says why."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            _GUARD,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
        return cls(name, process)

    @property
    def pid(self) -> int | None:
        """The server's own process id; None before it has started and after its end."""
        return next(iter(descendants(self._process.pid)), None)

    @property
    def has_ended(self) -> bool:
        return self._waiter.done()

    @property
    def processes(self) -> list[int]:
        """All of them that run now."""
        return descendants(self._process.pid)

    @property
    def num_bytes(self) -> int:
        """The memory of all its processes."""
        return resident_bytes(self.processes)

    @property
    def last_lines(self) -> str:
        """The end of its output, for an error."""
        lines = " | ".join(list(self._lines)[-_ERROR_LINES:])
        return f"; the end of its log: {lines}" if lines else "; it wrote nothing"

    async def ended(self) -> str:
        """How it ended, once it has, and all of its output is read. May be cancelled and called again."""
        code = await asyncio.shield(self._waiter)
        if code == guard.NOT_STARTED:
            return "could not be started"
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
        """Ends all its processes now. `ended` returns when they have."""
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
        await self._reader
        return code

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(1 << 14):
            *lines, rest = _LINE_END.split(rest + data)
            self._keep(*lines)
            rest = rest[-_LINE_BYTES:]
        self._keep(rest)

    def _keep(self, *lines: bytes) -> None:
        for line in lines:
            if text := line[:_LINE_BYTES].decode("utf-8", "replace").strip():
                self._lines.append(text)
                log.debug("%s: %s", self._name, text)
