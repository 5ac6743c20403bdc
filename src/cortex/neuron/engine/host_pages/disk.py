"""Blocks on disk, the tier below host memory: their index, when they are written, and how they return to the
device.

Blocks are written in the background when they are the next to leave host memory, and all of them when their model
sleeps or ends. They are read by several threads into a few page-locked buffers, and copied to the device from there
while the next ones are read. Workers share the folder: each knows the files that it found at a load or a rescan, those
that it has written since, and those that the daemon has received.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.block_files import BlockFile
from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors, RunningCopy, consecutive
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.rates import DISK_BYTES_PER_S, PAGE_CACHE_BYTES_PER_S, WORTH, CopyRate
from cortex.neuron.engine.host_pages.store import SLAB_BYTES, BlockKind, BlockPlace, ChosenBlocks, HostPages
from cortex.neuron.engine.kv.pages import Digest

log = logging.getLogger(__name__)

READ_BYTES = 8 << 20
"""Bytes of one read; each reader runs one at a time."""
READERS = 16
BUFFERS = 2 * READERS
"""Half of them are read into while the rest is copied to the device."""
MAX_BUFFER_BYTES = 512 << 20
"""Bytes of all buffers together. There are at least two, because the state of a hybrid model may take hundreds of
MB."""
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
        self.read_bytes = read_bytes
        self.worth = worth
        self._max_buffer_bytes = max_buffer_bytes
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.rate = CopyRate(assumed=DISK_BYTES_PER_S)
        self.cached_rate = CopyRate(assumed=PAGE_CACHE_BYTES_PER_S)
        """Rate of reads from the page cache."""
        self.num_cached_bytes = 0
        """Facts of the blocks requested last."""
        self.buffers = HostSlabs(device)
        """Read buffers, until their contents are on the device: a slab per read."""
        self.buffers.may_wait = True
        self.free_buffers: list[int] = []
        self._buffer_bytes = self._num_buffers = 0
        self._models: dict[bytes, str] = {}
        self._files: dict[bytes, dict[Path, BlockFile]] = {}
        """By model, as of the last scan."""
        self._places: dict[tuple[BlockKind, Digest], tuple[BlockFile, int]] = {}
        self._num_blocks: dict[BlockKind, int] = {}
        self.num_found = 0
        """Files found or written so far."""
        self._writes: list[_Write] = []
        self._writer = ThreadPoolExecutor(1, "kv-writer")
        self.readers = ThreadPoolExecutor(READERS, "kv-reader")
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
        """Waits for writes, at most until a time of the monotonic clock. False if some have not ended."""
        while self._writes:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            wait([self._writes[-1].written], timeout=None if left_s == float("inf") else left_s)
            self.end_writes(store)
        return True

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

    def buffers_of(self, num_bytes: int) -> bool:
        """Allocates buffers that hold a block of `num_bytes`. False: the host has no memory for them now."""
        wanted = max(self.read_bytes, num_bytes)
        if self._buffer_bytes < wanted:
            if len(self.free_buffers) < self._num_buffers:
                return False  # smaller ones are in use
            for buffer in self.free_buffers:
                self.buffers.free(buffer)
            most = min(BUFFERS, max(2, self._max_buffer_bytes // wanted))
            self.free_buffers = [buffer for buffer in range(most) if self.buffers.allocate(buffer, wanted)]
            self._num_buffers = len(self.free_buffers)
            self._buffer_bytes = wanted if self.free_buffers else 0
        return self._buffer_bytes >= wanted

    def close(self) -> None:
        """Ends the threads. A worker keeps them until it exits."""
        self._writer.shutdown(cancel_futures=True)
        self.readers.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of one file, and where they go on the device."""

    tensors: BlockTensors
    file: BlockFile
    first: int
    ids: list[int] = field(default_factory=list)


class DiskFetch:
    """A fetch of blocks from files to the device. Belongs to the engine thread."""

    def __init__(
        self, disk: DiskPages, copies: BlockCopies, wanted: Sequence[tuple[BlockTensors, BlockKind, int, Digest]]
    ) -> None:
        """`copies`: from the disk's buffers. `wanted`: available blocks, and their ids on the device."""
        self._disk = disk
        self._copies = copies
        self._runs: deque[_Run] = deque()
        self._reads: dict[Future[bool], tuple[_Run, int]] = {}
        self._running: list[tuple[RunningCopy, int]] = []
        self.has_failed = False
        """A file is damaged or gone, the device has no memory for a copy, or the fetch was cancelled."""
        self.num_bytes = sum(kind.num_bytes for _, kind, _, _ in wanted)
        self._cached_share = min(1.0, disk.num_cached_bytes / max(1, self.num_bytes))
        found = [(*disk.find(kind, digest), tensors, id) for tensors, kind, id, digest in wanted]
        for file, number, tensors, id in sorted(found, key=lambda each: (each[0].path, each[1])):
            run = self._runs[-1] if self._runs else None
            most = max(1, disk.read_bytes // file.kind.num_bytes)
            if run is None or run.file is not file or run.first + len(run.ids) != number or len(run.ids) == most:
                run = _Run(tensors, file, number)
                self._runs.append(run)
            run.ids.append(id)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is in progress any more."""
        return not (self._runs or self._reads or self._running)

    def measure(self, started_s: float) -> None:
        """Record the rate of a complete fetch, for the disk or for the page cache if it came from only one."""
        if self._cached_share > 1 - PURE_SHARE:
            self._disk.cached_rate.measured(self.num_bytes, started_s)
        elif self._cached_share < PURE_SHARE:
            self._disk.rate.measured(self.num_bytes, started_s)

    def cancel(self) -> None:
        """Start no further reads. Running ones must end before the device's blocks are reused."""
        self.has_failed = True
        self._runs.clear()

    def advance(self, wait_s: float | None = 0.0) -> None:
        """Starts what can be started. `wait_s`: wait for the first read to end; None: wait for all."""
        while True:
            self._end_copies(wait_for_one=wait_s is None and not self._reads)
            for read in [each for each in self._reads if each.done()]:
                self._copy(*self._reads.pop(read), is_read=read.result())
            self._end_copies()
            while self._runs and self._disk.free_buffers:
                run, buffer = self._runs.popleft(), self._disk.free_buffers.pop()
                rows = self._disk.buffers.rows(buffer, 0, len(run.ids), run.file.kind.num_bytes)
                view = rows.view(-1).numpy().data
                read = self._disk.readers.submit(block_files.read_blocks, run.file, run.first, view)
                self._reads[read] = run, buffer
            if self.is_complete or (wait_s is not None and wait_s <= 0):
                return
            if self._reads:
                wait(self._reads, timeout=wait_s, return_when=FIRST_COMPLETED)
            elif not self._running:
                return  # other fetches have all buffers
            if wait_s is not None:
                wait_s = 0.0

    def _copy(self, run: _Run, buffer: int, *, is_read: bool) -> None:
        if not is_read:
            self._disk.drop(run.file)
        if is_read and not self.has_failed:
            places = [BlockPlace(buffer, slot) for slot in range(len(run.ids))]
            try:
                self._running.append((self._copies.to_device(run.tensors, run.ids, places), buffer))
                return
            except torch.OutOfMemoryError:
                pass
        self.cancel()
        self._disk.free_buffers.append(buffer)

    def _end_copies(self, *, wait_for_one: bool = False) -> None:
        if wait_for_one and self._running:
            self._running[0][0].wait()
        for each in [each for each in self._running if each[0].is_complete]:
            self._running.remove(each)
            self._disk.free_buffers.append(each[1])
