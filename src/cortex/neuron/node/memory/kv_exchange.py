"""Exchange of KV blocks between nodes: this node offers what it has, and fetches before it computes a prompt.

Blocks travel from disk to disk, in the format of their files. A node fetches blocks that the gateway reports at another
node if that is expected to be faster than computing. If the model can, it computes the prompt from its first page on
meanwhile, and the blocks arrive from the last one on, until both meet. Otherwise the prompt waits for all blocks, at
most as long as computing would take. Devices of one node exchange blocks through the folder that all of them read.
Failures here never fail a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import msgspec

from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.block_files import BlockFile, DamagedFile, Selection
from cortex.neuron.engine.host_pages.rates import (
    DISK_BYTES_PER_S,
    LINK_BYTES_PER_S,
    PAGE_CACHE_BYTES_PER_S,
    WORTH,
    CopyRate,
    end_of_front,
    fetch_s,
    saves_time,
)
from cortex.neuron.engine.host_pages.store import ChosenBlocks
from cortex.neuron.engine.kv.pages import ROOT, Digest, page_digests
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats
from cortex.neuron.hub_process.neighbours import NeighbourFailed, Transfer
from cortex.neuron.worker.process import WorkerLost
from cortex.neuron.worker.protocol import BlocksOrder, ExpectBlocks, FindBlocks
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.wire.node.kv_blocks import PAGES, PATH, BlocksRequest
from cortex.wire.node.neighbours import Neighbour

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.02
"""Interval of checks whether a worker has written the blocks."""
LINK_DELAY_S = 0.02
"""Delay before the first byte arrives."""
MEASURED_BYTES = 16 << 20
"""A cancelled transfer of fewer bytes tells nothing about the link."""
MAX_FETCHES = 4
"""Concurrent fetches; others wait, at most for as long as computing would take."""


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """The limits of fetches."""

    min_tokens: int = 512
    """Shorter prefixes are computed, not fetched."""
    worth: float = WORTH
    save_s: float = 4.0
    """Time limit for writing blocks from device or host memory to disk; then those on disk are sent."""
    connect_s: float = 2.0
    avoid_s: float = 30.0
    """A node that failed is not used for this long."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that this node is about to compute."""

    model_id: str
    info: EngineInfo
    stats: EngineStats
    digests: tuple[Digest, ...]
    """Of its pages."""

    @classmethod
    def of(cls, model_id: str, info: EngineInfo, stats: EngineStats, request: EngineRequest) -> _Prompt:
        digests = page_digests(request.tenant or ROOT, request.prompt, info.page_tokens)
        return cls(model_id, info, stats, tuple(digests))

    @property
    def model(self) -> bytes:
        return bytes.fromhex(self.info.kv_name)

    def num_tokens(self, first: int, end: int) -> int:
        """Those of the pages from `first` to `end`."""
        return (end - first) * self.info.page_tokens

    def compute_s(self, first: int, end: int) -> float:
        """Expected time to compute the pages; 0: unknown."""
        start, count = first * self.info.page_tokens, self.num_tokens(first, end)
        work = self.info.work
        return 0.0 if work is None else self.stats.prompt_token_s * work.prompt_worth(start, count)


class KvExchange:
    """One for the node, on the daemon's loop. Files are read and written on threads."""

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        workers: Collection[WorkerSupervisor],
        rules: ExchangeRules | None = None,
        rates: dict[str, CopyRate] | None = None,
    ) -> None:
        """`rates`: of other nodes, by their addresses; measured from now on."""
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._workers = workers
        self._rules = rules or ExchangeRules()
        self._files: dict[bytes, dict[Path, BlockFile]] = {}
        """Model → its files, as of the last scan."""
        self._rates = {} if rates is None else rates
        self._write_rate = CopyRate(assumed=DISK_BYTES_PER_S)
        """The rate of writing blocks for another device of this node."""
        self._avoided_until_s: dict[str, float] = {}
        self._turns = asyncio.Semaphore(MAX_FETCHES)
        self._threads = ThreadPoolExecutor(MAX_FETCHES, "kv-fetch")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def offered(self, wanted: BlocksRequest) -> Selection:
        """The blocks of a prefix that this node has. Blocks that are not on disk yet are written first."""
        if not self._budget_bytes:
            return Selection()
        model, digests = wanted.model, wanted.digests
        found = await self._found(wanted)
        if found.num_pages == len(digests):
            return found
        with contextlib.suppress(WorkerLost, TimeoutError):
            async with asyncio.timeout(self._rules.save_s):
                while not all(await asyncio.gather(*(each.save_blocks(model, digests) for each in self._workers))):
                    await asyncio.sleep(ASK_AGAIN_S)
        return await self._found(wanted)

    async def _found(self, wanted: BlocksRequest) -> Selection:
        """The blocks that are on disk."""
        model = wanted.model
        files = await asyncio.to_thread(block_files.scan, self._folder, model, self._files.get(model, {}))
        self._files[model] = files
        select = partial(block_files.select, last_first=wanted.last_first)
        return await asyncio.to_thread(select, files.values(), wanted.digests)

    async def forget(self, chosen: ChosenBlocks, unused_for_s: float | None = None) -> tuple[int, int]:
        """Deletes blocks on disk, and in memory unless only old ones are meant. Returns the number of files and bytes
        deleted."""
        purge = partial(block_files.purge, self._folder, chosen, unused_for_s)
        number, num_bytes = await asyncio.to_thread(purge)
        if unused_for_s is None:
            for worker in self._workers:
                with contextlib.suppress(WorkerLost):
                    await worker.forget_blocks(chosen.model_id, chosen.tenants)
            written = await asyncio.to_thread(purge)  # meanwhile
            number, num_bytes = number + written[0], num_bytes + written[1]
        return number, num_bytes

    async def fetch(
        self, model_id: str, info: EngineInfo, stats: EngineStats, request: EngineRequest, source: Neighbour
    ) -> int:
        """Fetches the blocks of the prompt that `source` has and this node lacks, if that is expected to be faster than
        computing; returns the bytes. Cancelled with its request, and when the prompt is computed meanwhile; until then,
        workers expect the blocks of the transfer named like the request."""
        if not self._may_exchange(info, request):
            return 0
        if time.monotonic() < self._avoided_until_s.get(source.url, 0.0):
            return 0
        prompt = _Prompt.of(model_id, info, stats, request)
        count = len(prompt.digests)
        if not self._is_worth_asking(prompt, 0):
            return 0
        is_asked = False
        try:
            if info.computes_fronts:
                self._send(ExpectBlocks(request.id))
            async with asyncio.timeout(None if info.computes_fronts else self._most_s(prompt, 0, count)):
                own = await self._own_pages(prompt)
                if not self._is_worth_asking(prompt, own):
                    return 0
                async with self._turns:
                    is_asked = True
                    num_bytes = await self._receive(prompt, own, source)
        except TimeoutError:
            if is_asked:
                self._avoid(source, "computing the prompt would have been faster")
            return 0
        finally:
            if info.computes_fronts:
                self._send(ExpectBlocks(request.id, has_ended=True))
        return num_bytes

    def _announce(self, model: bytes, *files: str) -> None:
        """Blocks of the model have arrived. Workers look at these files only: a full disk has thousands."""
        self._send(FindBlocks(model, files))

    def _send(self, command: BlocksOrder) -> None:
        for worker in self._workers:
            worker.send(command)

    def bytes_per_s(self, source: Neighbour) -> float | None:
        """The rate at which blocks of another node arrive; None if unknown."""
        rate = self._rates.get(source.url)
        return None if rate is None else rate.bytes_per_s

    async def share(
        self,
        info: EngineInfo,
        stats: EngineStats,
        request: EngineRequest,
        source: WorkerSupervisor,
        target: WorkerSupervisor,
    ) -> None:
        """Writes what one worker of this node has of the prompt to disk for another one, which computes it next, if
        writing and reading is expected to be faster than computing. `stats`: of either."""
        if not self._may_exchange(info, request) or len(request.prompt) < self._rules.min_tokens:
            return
        prompt = _Prompt.of("", info, stats, request)
        rate, model, digests = self._write_rate, prompt.model, prompt.digests
        try:
            first, end = await asyncio.gather(*(each.count_pages(model, digests) for each in (target, source)))
            if prompt.num_tokens(first, end) < self._rules.min_tokens:
                return
            num_bytes = int(prompt.num_tokens(first, end) * info.token_bytes)
            parts = [(num_bytes, rate.expected), (num_bytes, PAGE_CACHE_BYTES_PER_S)]
            most_s = self._most_s(prompt, first, end)
            if not saves_time(parts, ASK_AGAIN_S, most_s, worth=1.0):
                rate.was_too_slow()
                return
            started_s = rate.clock()
            try:
                async with asyncio.timeout(most_s):
                    while not await source.save_blocks(model, digests[:end]):
                        await asyncio.sleep(ASK_AGAIN_S)
            finally:
                rate.measured(num_bytes, started_s)
        except (WorkerLost, TimeoutError):
            return
        target.send(FindBlocks(model))

    def _may_exchange(self, info: EngineInfo, request: EngineRequest) -> bool:
        """The digests of pages with pictures follow from more than tokens. A prompt whose tokens are scored is
        computed."""
        is_reused = request.uses_prefix_cache and request.prompt_logprobs is None
        return bool(self._budget_bytes and info.kv_name and is_reused and not request.pictures)

    def _most_s(self, prompt: _Prompt, first: int, end: int) -> float:
        """How long a fetch of the pages from `first` to `end` may take."""
        return self._rules.worth * prompt.compute_s(first, end)

    def _is_worth_asking(self, prompt: _Prompt, first: int) -> bool:
        """Whether to ask for the pages from `first` on."""
        end = len(prompt.digests)
        return (
            prompt.num_tokens(first, end) >= self._rules.min_tokens and self._most_s(prompt, first, end) > LINK_DELAY_S
        )

    async def _own_pages(self, prompt: _Prompt) -> int:
        """Number of leading pages that this node has already. Workers that know of fewer look for files of the
        others."""
        calls = (each.count_pages(prompt.model, prompt.digests) for each in self._workers)
        counts = await asyncio.gather(*calls, return_exceptions=True)  # WorkerLost
        own = max((count for count in counts if isinstance(count, int)), default=0)
        for worker, count in zip(self._workers, counts, strict=True):
            if count != own:
                worker.send(FindBlocks(prompt.model))
        return own

    async def _receive(self, prompt: _Prompt, own: int, source: Neighbour) -> int:
        """Receives the blocks after the first `own` pages to disk while that is worth it; returns the bytes. Cancelling
        it cancels the transfer."""
        rate = self._rates.setdefault(source.url, CopyRate(assumed=LINK_BYTES_PER_S))
        transfer, loop = Transfer(source), asyncio.get_running_loop()
        complete: list[str] = []

        def written(path: Path) -> None:
            if prompt.info.computes_fronts:
                loop.call_soon_threadsafe(self._announce, prompt.model, path.name)
            else:
                complete.append(path.name)

        receiving = loop.run_in_executor(
            self._threads, self._receive_on_thread, prompt, own, source, transfer, rate, written
        )
        try:
            return await asyncio.shield(receiving)
        except asyncio.CancelledError:
            transfer.cancel()
            raise
        finally:
            if complete:
                self._announce(prompt.model, *complete)

    def _receive_on_thread(
        self,
        prompt: _Prompt,
        own: int,
        source: Neighbour,
        transfer: Transfer,
        rate: CopyRate,
        written: Callable[[Path], None],
    ) -> int:
        rules, wanted, meanwhile = self._rules, prompt.digests[own:], prompt.info.computes_fronts
        most_s = inf if meanwhile else self._most_s(prompt, own, len(prompt.digests))
        body = msgspec.json.encode(BlocksRequest(model=prompt.model, digests=wanted, last_first=meanwhile))
        try:
            with transfer:
                connect_s, silence_s = min(rules.connect_s, most_s), min(rules.connect_s + rules.save_s, most_s)
                transfer.open("POST", PATH, body, connect_s=connect_s, silence_s=silence_s)
                num_pages, num_bytes = int(transfer.header(PAGES) or 0), transfer.num_bytes
                if num_bytes <= 0 or num_pages <= 0:
                    return 0
                is_faster = self._is_worth_fetching(prompt, own, own + num_pages, num_bytes, rate)
                if num_bytes > self._budget_bytes or not is_faster:
                    rate.was_too_slow()
                    return 0
                block_files.make_room(self._folder, num_bytes, self._budget_bytes)
                read_into = _TimedReading(
                    transfer, rate, inf if meanwhile else self._most_s(prompt, own, own + num_pages)
                )
                try:
                    return block_files.receive(
                        read_into, self._folder, prompt.model, prompt.model_id, frozenset(wanted), written
                    )
                finally:
                    read_into.measure()
        except (NeighbourFailed, OSError, DamagedFile, ValueError) as error:
            if not transfer.is_cancelled:
                self._avoid(source, str(error))
            return 0

    def _is_worth_fetching(self, prompt: _Prompt, first: int, end: int, num_bytes: int, rate: CopyRate) -> bool:
        """Whether to fetch the pages from `first` to `end`."""
        parts, meanwhile = [(num_bytes, rate.expected)], prompt.info.computes_fronts
        if meanwhile and rate.bytes_per_s is None:
            return True  # nothing waits for the measurement
        if saves_time(parts, LINK_DELAY_S, prompt.compute_s(first, end), worth=self._rules.worth):
            return True
        compute_s = partial(prompt.compute_s, first)
        return meanwhile and end_of_front(first, end, fetch_s(parts, LINK_DELAY_S), compute_s) > first

    def _avoid(self, source: Neighbour, reason: str) -> None:
        """Also called on threads."""
        avoid_s = self._rules.avoid_s
        log.warning("no KV blocks from %s, which is not asked again for %.0f s: %s", source.name, avoid_s, reason)
        self._avoided_until_s[source.url] = time.monotonic() + avoid_s


class _TimedReading:
    """Reads a transfer, up to a time, and measures its rate."""

    def __init__(self, transfer: Transfer, rate: CopyRate, most_s: float) -> None:
        self._transfer = transfer
        self._rate = rate
        self._most_s = most_s
        self._started_s = rate.clock()
        self._num_bytes = 0

    def __call__(self, view: memoryview) -> int:
        """Raises NeighbourFailed."""
        if self._rate.clock() - self._started_s > self._most_s:
            raise NeighbourFailed("the link is slower than computing")
        count = self._transfer.read_into(view[: 1 << 20])
        self._num_bytes += count
        return count

    def measure(self) -> None:
        if not self._transfer.is_cancelled or self._num_bytes >= MEASURED_BYTES:
            self._rate.measured(self._num_bytes, self._started_s)
