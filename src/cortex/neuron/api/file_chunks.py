"""Reads files for other nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator


async def file_chunks(descriptor: int, start: int, end: int, chunk_bytes: int) -> AsyncGenerator[bytes, None]:
    """The bytes of a file from `start` to `end`, fewer if it has shrunk. The next chunk is read on a thread while the
    caller uses one. The descriptor may be closed once this generator is."""
    loop = asyncio.get_running_loop()

    def begin(position: int) -> asyncio.Future[bytes]:
        return loop.run_in_executor(None, os.pread, descriptor, max(0, min(chunk_bytes, end - position)), position)

    reading = begin(start)
    try:
        while chunk := await asyncio.shield(reading):
            start += len(chunk)
            reading = begin(start)
            yield chunk
    finally:
        await asyncio.wait({reading})
        reading.exception()
