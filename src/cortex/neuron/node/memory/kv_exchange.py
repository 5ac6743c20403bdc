"""KV blocks between nodes: what this one offers to others, and what it fetches before it computes a prompt.

Blocks travel from disk to disk, in the format of their files. A node fetches what its gateway says another one has, if
that is expected to be faster than computing it, and gives up when it is not. Nothing here fails a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.block_files import DamagedFile, Selection
from cortex.neuron.engine.host_pages.rates import LINK_BYTES_PER_S, WORTH, CopyRate, saves_time
from cortex.neuron.engine.kv.pages import ROOT, Digest, page_digests
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats
from cortex.neuron.hub_process.neighbours import NeighbourFailed, Transfer
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
        most_s = WORTH * compute_s(info, stats, own * page_tokens, len(digests) * page_tokens)
        if most_s <= LINK_DELAY_S:
            return 0
        rate = self._rates.setdefault(source.url, CopyRate(assumed=LINK_BYTES_PER_S))
        transfer = Transfer(source)

        def allowed_s(num_pages: int, num_bytes: int) -> float:
            """How long these may take; 0: they are not wanted."""
            needed_s = compute_s(info, stats, own * page_tokens, (own + num_pages) * page_tokens)
            if num_bytes <= self._budget_bytes and saves_time([(num_bytes, rate.expected)], LINK_DELAY_S, needed_s):
                return WORTH * needed_s
            rate.was_too_slow()
            return 0.0

        def receive() -> int:
            """The bytes that were received; 0: none are wanted, or not all came."""
            try:
                with transfer:
                    body = msgspec.json.encode(BlocksRequest(model=model, digests=tuple(digests[own:])))
                    timeouts = {"connect_s": min(CONNECT_S, most_s), "silence_s": min(CONNECT_S + SAVE_S, most_s)}
                    transfer.open("POST", PATH, body, **timeouts)
                    num_pages, num_bytes = int(transfer.header(PAGES) or 0), transfer.num_bytes
                    if num_bytes <= 0 or num_pages <= 0 or not (limit_s := allowed_s(num_pages, num_bytes)):
                        return 0
                    block_files.make_room(self._folder, num_bytes, self._budget_bytes)
                    return _receive(transfer, limit_s, rate, self._folder, model, model_id)
            except (NeighbourFailed, OSError, DamagedFile, ValueError) as error:
                if not transfer.is_cancelled:
                    log.warning("KV blocks of %s were not fetched from %s: %s", model_id, source.name, error)
                return 0

        try:
            num_bytes = await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, receive))
        except asyncio.CancelledError:
            transfer.cancel()
            raise
        if num_bytes:
            for writer in self._writers:
                writer.send(FindBlocks(model))
        return num_bytes


def _receive(transfer: Transfer, limit_s: float, rate: CopyRate, folder: Path, model: bytes, model_id: str) -> int:
    """Raises NeighbourFailed, DamagedFile, or OSError of the disk."""
    started_s, received = rate.clock(), 0

    def read_into(view: memoryview) -> int:
        nonlocal received
        if rate.clock() - started_s > limit_s:
            raise NeighbourFailed("the link is slower than computing")
        count = transfer.read_into(view[: 1 << 20])
        received += count
        return count

    try:
        return block_files.receive(read_into, folder, model, model_id)
    finally:
        if not transfer.is_cancelled:
            rate.measured(received, started_s)
