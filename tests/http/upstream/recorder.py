"""A sink that records the response of a node, and the shortest response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cortex.http.chunks import SIZE_LINES, payload
from cortex.http.request import Headers
from cortex.http.upstream.faults import UpstreamFault

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Recorder:
    """A sink that records its calls and checks their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.body = b""
        self.chunks: list[bytes] = []
        self.fault: UpstreamFault | None = None
        self.over = asyncio.Event()

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:
        assert self.calls == []
        self.calls.append(f"head {status} {content_length}")

    def on_data(self, data: bytes) -> None:
        assert data
        assert self.calls
        assert not self.over.is_set()
        self.body += data

    def chunk_receiver(self) -> Callable[[bytes], bool]:
        return self.take_chunk

    def take_chunk(self, wire: bytes) -> bool:
        assert self.calls
        assert not self.over.is_set()
        if len(wire) >= len(SIZE_LINES) or not wire.startswith(SIZE_LINES[len(wire)]) or not wire.endswith(b"\r\n"):
            return False
        self.body += payload(wire)
        self.chunks.append(wire)
        return True

    def on_end(self) -> None:
        assert not self.over.is_set()
        self.calls.append("end")
        self.over.set()

    def on_fault(self, fault: UpstreamFault) -> None:
        assert not self.over.is_set()
        self.fault = fault
        self.over.set()
