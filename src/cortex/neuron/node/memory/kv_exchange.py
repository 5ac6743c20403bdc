"""KV blocks between nodes: what this one offers to others, and what it fetches before it computes a prompt.

Blocks travel from disk to disk, in the format of their files. A node fetches what its gateway says another one has, if
that is expected to be faster than computing it, and gives up when it is not. Nothing here fails a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.block_files import DamagedFile, Selection
from cortex.neuron.engine.host_pages.rates import LINK_BYTES_PER_S, WORTH, CopyRate, saves_time
from cortex.neuron.engine.kv.pages import ROOT, Digest, page_digests
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats
from cortex.neuron.worker.process import WorkerLost
from cortex.neuron.worker.protocol import Command, FindBlocks
from cortex.wire.node.kv_blocks import PAGES, PATH, BlocksRequest
from cortex.wire.node.neighbours import Neighbour

log = logging.getLogger(__name__)

MIN_TOKENS = 512
"""Shorter prefixes are computed."""
SAVE_S = 4.0
"""How long blocks may take from a device or host memory to disk, before what is there is sent."""
CONNECT_S = 2.0
LINK_DELAY_S = 0.02
"""Before the first byte arrives."""


class BlockWriter(Protocol):
    """The supervisor of a device."""

    async def save_blocks(self) -> None: ...
    def send(self, command: Command) -> None: ...


def compute_s(info: EngineInfo, stats: EngineStats, start: int, end: int) -> float:
    """How long a model is expected to compute a prompt from one position to another; 0: that is not known."""
    return 0.0 if info.work is None else stats.prompt_token_s * info.work.prompt_worth(start, end - start)


class KvExchange:
    """One for the node, on the daemon's loop. Files are read and written on threads."""

    def __init__(self, folder: Path, budget_bytes: int, writers: Collection[BlockWriter]) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._writers = writers
        self._rates: dict[str, CopyRate] = {}
        """By the address of the other node."""

    async def offered(self, model: bytes, digests: Sequence[Digest]) -> Selection:
        """What there is of a prefix; what is not on disk yet is written first."""
        if not self._budget_bytes:
            return Selection(0, ())
        found = await asyncio.to_thread(block_files.select, self._folder, model, digests)
        if found.num_pages == len(digests):
            return found
        with contextlib.suppress(WorkerLost, TimeoutError):
            async with asyncio.timeout(SAVE_S):
                await asyncio.gather(*(writer.save_blocks() for writer in self._writers))
        return await asyncio.to_thread(block_files.select, self._folder, model, digests)

    async def fetch(
        self, model_id: str, info: EngineInfo, stats: EngineStats, request: EngineRequest, source: Neighbour
    ) -> int:
        """Fetches what `source` has of the prompt, and this node has not on disk, where that is expected to be faster
        than computing it; returns the bytes. Cancelled with its request."""
        if not (self._budget_bytes and info.kv_name and request.uses_prefix_cache) or request.pictures:
            return 0  # the digests of pages with pictures follow from more than tokens
        model, page_tokens = bytes.fromhex(info.kv_name), info.page_tokens
        digests = page_digests(request.tenant or ROOT, request.prompt, page_tokens)
        own = (await asyncio.to_thread(block_files.select, self._folder, model, digests)).num_pages
        if (len(digests) - own) * page_tokens < MIN_TOKENS:
            return 0
        rate = self._rates.setdefault(source.url, CopyRate(assumed=LINK_BYTES_PER_S))

        def allowed_s(num_pages: int, num_bytes: int) -> float:
            needed_s = compute_s(info, stats, own * page_tokens, (own + num_pages) * page_tokens)
            if num_bytes <= self._budget_bytes and saves_time([(num_bytes, rate.expected)], LINK_DELAY_S, needed_s):
                return WORTH * needed_s
            rate.was_too_slow()
            return 0.0

        body = msgspec.json.encode(BlocksRequest(model=model, digests=tuple(digests[own:])))
        transfer = _Transfer(source, body, allowed_s, rate)
        try:
            running = asyncio.get_running_loop().run_in_executor(None, transfer.run, self._folder, model, model_id)
            num_bytes = await asyncio.shield(running)
        except asyncio.CancelledError:
            transfer.cancel()
            raise
        if num_bytes:
            for writer in self._writers:
                writer.send(FindBlocks(model))
        return num_bytes


class _Transfer:
    """One request to another node, on a thread; `cancel` may be called on another one."""

    def __init__(self, source: Neighbour, body: bytes, allowed_s: Callable[[int, int], float], rate: CopyRate) -> None:
        """`allowed_s`: how long so many pages and bytes may take; 0: they are not wanted."""
        self._source = source
        self._body = body
        self._allowed_s = allowed_s
        self._rate = rate
        self._is_cancelled = False
        address = urlsplit(source.url)
        new: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if address.scheme == "https":
            context = ssl.create_default_context(cadata=source.authority)
            new = lambda *where, **options: http.client.HTTPSConnection(*where, context=context, **options)  # noqa: E731
        self._connection = new(address.hostname or "", address.port, timeout=CONNECT_S)

    def run(self, folder: Path, model: bytes, model_id: str) -> int:
        """The bytes that were received; 0: none are wanted, or not all came."""
        try:
            with contextlib.closing(self._connection):
                return self._receive(folder, model, model_id)
        except (OSError, http.client.HTTPException, DamagedFile, ValueError) as error:
            if not self._is_cancelled:
                log.warning("KV blocks of %s were not fetched from %s: %s", model_id, self._source.name, error)
            return 0

    def _receive(self, folder: Path, model: bytes, model_id: str) -> int:
        headers = {"content-type": "application/json"}
        if self._source.ticket is not None:
            headers["authorization"] = f"Bearer {self._source.ticket}"
        self._connection.request("POST", PATH, self._body, headers)
        if (sock := self._connection.sock) is not None:
            sock.settimeout(CONNECT_S + SAVE_S)
        response = self._connection.getresponse()
        if response.status != 200:
            raise OSError(f"it responded with {response.status}")
        num_pages, num_bytes = int(response.headers.get(PAGES, "0")), int(response.headers.get("content-length", "0"))
        allowed_s = self._allowed_s(num_pages, num_bytes) if num_pages else 0.0
        if not allowed_s:
            return 0
        started_s, received = self._rate.clock(), 0

        def read_into(view: memoryview) -> int:
            nonlocal received
            if time.monotonic() - started_s > allowed_s:
                raise TimeoutError("the link is slower than computing")
            count = response.readinto(view[: 1 << 20])
            received += count
            return count

        try:
            return block_files.receive(read_into, folder, model, model_id)
        finally:
            if not self._is_cancelled:
                self._rate.measured(received, started_s)

    def cancel(self) -> None:
        self._is_cancelled = True
        if (sock := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
