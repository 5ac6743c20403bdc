"""A running program under attack: its memory, how fast it responds, and raw connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..waiting import WAIT_S

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A program that listens on `port` of this host."""

    port: int
    pid: int
    log: Path

    def memory_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    async def health_s(self) -> float:
        """How long a new client waits for `/health`. Raises when it gets no good response."""
        began_s = time.monotonic()
        response = await self.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 200 "), response[:200]
        return time.monotonic() - began_s

    async def send(self, sent: bytes) -> bytes:
        """What the program sends until it closes the connection."""
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(sent)
                return await _read_all(reader)
            finally:
                writer.transport.abort()

    @contextlib.asynccontextmanager
    async def connections(
        self, count: int
    ) -> AsyncIterator[Sequence[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
        """Open connections, which end with the block."""
        opened = [await asyncio.open_connection("127.0.0.1", self.port) for _ in range(count)]
        try:
            yield opened
        finally:
            for _, writer in opened:
                writer.transport.abort()

    @contextlib.asynccontextmanager
    async def bounded(self, growth_bytes: int) -> AsyncIterator[None]:
        """Fails if the program's memory grows by more than `growth_bytes` within the block, or if others wait much
        longer for a response at its end than before it."""
        idle_s = min([await self.health_s() for _ in range(3)])
        before_bytes = self.memory_bytes()
        yield
        attacked_s = min([await self.health_s() for _ in range(3)])
        grown_bytes = self.memory_bytes() - before_bytes
        assert grown_bytes < growth_bytes, f"{grown_bytes / MEBIBYTE:.0f} MiB more"
        assert attacked_s < 10.0 + 100 * idle_s, f"{attacked_s:.2f} s instead of {idle_s:.3f} s"
        assert "Traceback" not in self.log.read_text()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            found += data
    return found


async def write_until_blocked(writer: asyncio.StreamWriter, data: bytes, most_bytes: int, patience_s: float) -> int:
    """Write `data` again and again until the other side takes nothing for `patience_s`, closes, or has taken
    `most_bytes`. Returns the bytes that it took."""
    num_bytes = 0
    writer.transport.set_write_buffer_limits(high=0)
    with contextlib.suppress(ConnectionError, TimeoutError):
        while num_bytes < most_bytes:
            writer.write(data)
            async with asyncio.timeout(patience_s):
                await writer.drain()
            num_bytes += len(data)
    return num_bytes
