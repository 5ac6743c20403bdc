"""Blocks on disk, the tier below host memory: their index, when they are written, and how fast they return.

Blocks are written in the background when they are the next to leave host memory, all that it holds when their model
sleeps or ends, and those of devices, too, before the process ends. Workers share the folder: each knows the files that
it found at a load or a rescan, those that it has written since, and those that the daemon has received.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.block_files import BlockFile
from cortex.neuron.engine.host_pages.copies import consecutive
from cortex.neuron.engine.host_pages.disk_reads import MAX_BUFFER_BYTES, READ_BYTES, DiskFetch, DiskReader
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.rates import DISK_BYTES_PER_S, PAGE_CACHE_BYTES_PER_S, WORTH, CopyRate
from cortex.neuron.engine.host_pages.store import SLAB_BYTES, BlockKind, BlockPlace, ChosenBlocks, HostPages
from cortex.neuron.engine.kv.pages import Digest

log = logging.getLogger(__name__)

LEAVING_SHARE = 0.125
"""Share of the host's budget: the least recently used blocks in it are written ahead."""
PURE_SHARE = 0.1
"""A fetch with less than this share from other sources counts as a measurement of its main source."""
RETRY_S = 60.0
"""Pause after a failed write."""
_COUNTED_S = 10.0
"""Writes of other workers are counted again only after this time."""


@dataclass(slots=True)
class _Write:
    kind: BlockKind
    digests: Sequence[Digest]
    places: Sequence[BlockPlace]
    written: Future[BlockFile | None]


class DiskPages:
    """One for all models of a device. Belongs to the engine thread; files are written and read on threads of its
    own."""

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        device: torch.device,
        *,
        read_bytes: int = READ_BYTES,
        max_buffer_bytes: int = MAX_BUFFER_BYTES,
        worth: float = WORTH,
    ) -> None:
        """`read_bytes`: size of one read. `max_buffer_bytes`: of all buffers together. `worth`: reading must take less
        than this share of the computing time."""
        self.worth = worth
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.rate = CopyRate(assumed=DISK_BYTES_PER_S)
        self.cached_rate = CopyRate(assumed=PAGE_CACHE_BYTES_PER_S)
        """Rate of reads from the page cache."""
        self.num_cached_bytes = 0
        """Facts of the blocks requested last."""
        self.reader = DiskReader(device, read_bytes=read_bytes, max_buffer_bytes=max_buffer_bytes)
        self._models: dict[bytes, str] = {}
        self._files: dict[bytes, dict[Path, BlockFile]] = {}
        """By model, as of the last scan."""
        self._places: dict[tuple[BlockKind, Digest], tuple[BlockFile, int]] = {}
        self._num_blocks: dict[BlockKind, int] = {}
        self.num_found = 0
        """Files found or written so far."""
        self.transfers: set[str] = set()
        """The names of those that bring blocks of prompts from other nodes now."""
        self._writes: list[_Write] = []
        self._writer = ThreadPoolExecutor(1, "kv-writer")
        self._retry_at_s = 0.0
        self._used_bytes, self._counted_at_s = 0, float("-inf")
        """The writer's state."""

    # -- what is there ---------------------------------------------------------------------------------------------

    def open_model(self, model: bytes, model_id: str) -> None:
        """Finds the blocks of a model, whose new blocks are written from now on."""
        self._models[model] = model_id
        self.find_again(model)

    def find_again(self, model: bytes) -> None:
        """Another process has written or removed blocks of a model."""
        if model not in self._models:
            return
        before = self._files.get(model, {})
        files = self._files[model] = block_files.scan(self.folder, model, before)
        for path in before.keys() - files.keys():
            self.drop(before[path])
        for path in files.keys() - before.keys():
            self._add(files[path])

    def find_file(self, model: bytes, name: str) -> None:
        """Another process has written this file with blocks of a model. Unlike `find_again`, it reads no other one."""
        file = block_files.read_new(self.folder, model, name) if model in self._models else None
        if file is not None and file.path not in self._files[model]:
            self._add(file)

    def has(self, kind: BlockKind, digest: Digest) -> bool:
        return (kind, digest) in self._places

    def num_blocks(self, kind: BlockKind) -> int:
        return self._num_blocks.get(kind, 0)

    def find(self, kind: BlockKind, digest: Digest) -> tuple[BlockFile, int]:
        """The file, and the index in it, of a block that `has` confirmed."""
        return self._places[kind, digest]

    def distrust(self, kind: BlockKind, digests: Iterable[Digest]) -> None:
        """Remove the files of these blocks, whose contents cannot be trusted."""
        for digest in digests:
            if (found := self._places.get((kind, digest))) is not None:
                block_files.remove(found[0].path)
                self.drop(found[0])

    def forget(self, store: HostPages, chosen: ChosenBlocks) -> None:
        """Removes the files with a chosen block. Their other blocks are rewritten if host memory has them."""
        for file in {found for found, _ in self._places.values()}:
            if not block_files.is_chosen(file, chosen):
                continue
            block_files.remove(file.path)
            self.drop(file)
            store.saved(file.kind, file.digests, is_saved=False)

    def drop(self, file: BlockFile) -> None:
        """The file is gone or damaged."""
        self._files.get(file.kind.model, {}).pop(file.path, None)
        for digest in file.digests:
            if (found := self._places.get((file.kind, digest))) is not None and found[0].path == file.path:
                del self._places[file.kind, digest]
                self._num_blocks[file.kind] -= 1

    def _add(self, file: BlockFile) -> None:
        self.num_found += 1
        self._files.setdefault(file.kind.model, {})[file.path] = file
        for number, digest in enumerate(file.digests):
            if (file.kind, digest) not in self._places:
                self._places[file.kind, digest] = file, number
                self._num_blocks[file.kind] = self._num_blocks.get(file.kind, 0) + 1

    # -- writing ---------------------------------------------------------------------------------------------------

    def save(self, store: HostPages, slabs: HostSlabs, *, everything: bool = False) -> None:
        """Starts to write the blocks that leave host memory next, or all of them. Ends writes that are complete."""
        self.end_writes(store)
        if time.monotonic() < self._retry_at_s or (self._writes and not everything):
            return
        for kind, digests in store.unsaved(1.0 if everything else LEAVING_SHARE):
            if self._begin(kind, digests, store, slabs) and not everything:
                return

    def save_these(
        self, kinds: Iterable[BlockKind], digests: Sequence[Digest], store: HostPages, slabs: HostSlabs
    ) -> None:
        """Starts to write what host memory has of these blocks."""
        self.end_writes(store)
        if time.monotonic() < self._retry_at_s:
            return
        for kind in kinds:
            here = [digest for digest in digests if store.has(kind, digest) and not store.is_saved(kind, digest)]
            most = max(1, SLAB_BYTES // kind.num_bytes)
            for first in range(0, len(here), most):
                self._begin(kind, here[first : first + most], store, slabs)

    def _begin(self, kind: BlockKind, digests: Sequence[Digest], store: HostPages, slabs: HostSlabs) -> bool:
        """Starts to write blocks of host memory as one file. False if there is nothing to write."""
        if kind.model not in self._models:
            return False  # a part of a divided model
        lacking = [digest for digest in digests if not self.has(kind, digest)]
        store.saved(kind, digests)
        if not lacking:
            return False
        places = store.borrow(kind, lacking, uses=False)
        pieces = [
            slabs.rows(*places[first], count, kind.num_bytes).view(-1).numpy().data
            for first, count in consecutive(places)
        ]
        written = self._writer.submit(self._write, kind, self._models[kind.model], lacking, pieces)
        self._writes.append(_Write(kind, lacking, places, written))
        return True

    @property
    def is_writing(self) -> bool:
        return bool(self._writes)

    def settle(self, store: HostPages, until_s: float = float("inf")) -> bool:
        """Waits for writes, at most until a time of the monotonic clock. False if some have not ended, or failed."""
        while self._writes:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            wait([self._writes[-1].written], timeout=None if left_s == float("inf") else left_s)
            self.end_writes(store)
        return time.monotonic() >= self._retry_at_s

    def end_writes(self, store: HostPages) -> None:
        """Unpins written blocks, so that host memory may drop them."""
        for write in [each for each in self._writes if each.written.done()]:
            self._writes.remove(write)
            store.end(write.places)
            if (file := write.written.result()) is None:
                self._retry_at_s = time.monotonic() + RETRY_S
                store.saved(write.kind, write.digests, is_saved=False)
            else:
                self._add(file)

    def _write(
        self, kind: BlockKind, model_id: str, digests: Sequence[Digest], pieces: Sequence[memoryview]
    ) -> BlockFile | None:
        """On the writer's thread. None if impossible."""
        num_bytes = sum(piece.nbytes for piece in pieces)
        if num_bytes > self.budget_bytes:
            return None
        most_bytes = self.budget_bytes
        for is_last in (False, True):
            self._make_room(num_bytes, most_bytes)
            try:
                file = block_files.write_file(self.folder, kind, model_id, digests, pieces)
                self._used_bytes += file.num_bytes
                return file
            except OSError as error:
                if is_last or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    log.warning("KV blocks cannot be written to %s: %s", self.folder, error.strerror or error)
                    return None
                most_bytes, self._counted_at_s = self._used_bytes, float("-inf")  # the disk is full with less
        return None

    def _make_room(self, num_bytes: int, most_bytes: int) -> None:
        """As `block_files.make_room`, which looks at all files."""
        now_s = time.monotonic()
        if now_s - self._counted_at_s >= _COUNTED_S or self._used_bytes + num_bytes > most_bytes:
            self._used_bytes = block_files.make_room(self.folder, num_bytes, most_bytes)
            self._counted_at_s = now_s

    # -- reading ---------------------------------------------------------------------------------------------------

    def parts(self, blocks: Iterable[tuple[BlockKind, Digest]]) -> list[tuple[int, float]]:
        """Bytes of available blocks and their expected rates: those in the page cache, and others. A restarted node
        finds its recent writes in the page cache."""
        sizes: dict[BlockFile, int] = {}
        for kind, digest in blocks:
            file = self._places[kind, digest][0]
            sizes[file] = sizes.get(file, 0) + kind.num_bytes
        self.num_cached_bytes = sum(size for file, size in sizes.items() if block_files.is_cached(file))
        rest = sum(sizes.values()) - self.num_cached_bytes
        return [(self.num_cached_bytes, self.cached_rate.expected), (rest, self.rate.expected)]

    def measure(self, fetch: DiskFetch, started_s: float) -> None:
        """Records the rate of a complete fetch, for the disk or for the page cache if it came from only one."""
        if fetch.cached_share > 1 - PURE_SHARE:
            self.cached_rate.measured(fetch.num_bytes, started_s, fetch.ended_s)
        elif fetch.cached_share < PURE_SHARE:
            self.rate.measured(fetch.num_bytes, started_s, fetch.ended_s)

    def close(self) -> None:
        """Ends the threads. A worker keeps them until it exits."""
        self._writer.shutdown(cancel_futures=True)
        self.reader.close()
