"""Reads blocks from files to the device: by several threads into a few page-locked buffers, and by another one from
there to the device. So it goes on while the engine steps."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.block_files import BlockFile
from cortex.neuron.engine.host_pages.copies import BlockTensors, IncomingCopies, RunningCopy
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.store import BlockPlace
from cortex.neuron.engine.kv.page_groups import IncomingPages
from cortex.neuron.engine.kv.pages import Digest

log = logging.getLogger(__name__)

READ_BYTES = 8 << 20
"""Bytes of one read; each reader runs one at a time."""
READERS = 16
BUFFERS = 2 * READERS
"""Half of them are read into while the rest is copied to the device."""
SWITCH_S = 0.0005
"""During reads, how long a thread runs Python while others wait. With the usual 5 ms, readers wait for the engine: each
needs the interpreter about ten times for a buffer."""
MAX_BUFFER_BYTES = 512 << 20
"""Bytes of all buffers together. There are at least two, because the state of a hybrid model may take hundreds of
MB."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block on disk, and its place on the device."""

    file: BlockFile
    number: int
    """Its index in the file."""
    tensors: BlockTensors
    id: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of one file, and where they go on the device."""

    tensors: BlockTensors
    file: BlockFile
    first: int
    ids: list[int] = field(default_factory=list)


class DiskReader:
    """One for all models of a device. Fetches begin on the engine thread, and take turns with its buffers."""

    def __init__(self, device: torch.device, *, read_bytes: int, max_buffer_bytes: int) -> None:
        """`read_bytes`: size of one read. `max_buffer_bytes`: of all buffers together."""
        self.buffers = HostSlabs(device)
        self.buffers.may_wait = True
        self.read_bytes = read_bytes
        self._max_buffer_bytes = max_buffer_bytes
        self._buffer_bytes = self._num_buffers = 0
        self.lock = threading.Lock()
        """Of what follows, and of the state of fetches."""
        self.free: list[int] = []
        self._waiting: deque[DiskFetch] = deque()
        """Those with blocks to read; the first one gets the next buffer."""
        self._usual_switch_s = sys.getswitchinterval()
        self._readers = ThreadPoolExecutor(READERS, "kv-reader")
        self._copier = ThreadPoolExecutor(1, "kv-copier")

    def allocate(self, num_bytes: int) -> bool:
        """Allocates buffers that hold a block of `num_bytes`. False: the host has no memory for them now, or smaller
        ones are in use."""
        wanted = max(self.read_bytes, num_bytes)
        with self.lock:
            if self._buffer_bytes < wanted and len(self.free) == self._num_buffers:
                for buffer in self.free:
                    self.buffers.free(buffer)
                most = min(BUFFERS, max(2, self._max_buffer_bytes // wanted))
                self.free = [buffer for buffer in range(most) if self.buffers.allocate(buffer, wanted)]
                self._num_buffers = len(self.free)
                self._buffer_bytes = wanted if self.free else 0
            return self._buffer_bytes >= wanted

    def begin(self, fetch: DiskFetch) -> None:
        with self.lock:
            self._waiting.append(fetch)
            self._begin_reads()

    def _begin_reads(self) -> None:
        """With the lock."""
        sys.setswitchinterval(SWITCH_S)
        while self.free and self._waiting:
            fetch = self._waiting.popleft()
            if fetch.runs:
                run, buffer = fetch.runs.popleft(), self.free.pop()
                fetch.num_running += 1
                self._waiting.append(fetch)
                self._readers.submit(self._read, fetch, run, buffer)
        if len(self.free) == self._num_buffers:
            sys.setswitchinterval(self._usual_switch_s)

    def _read(self, fetch: DiskFetch, run: _Run, buffer: int) -> None:
        """On one of the readers."""
        is_read = False
        try:
            rows = self.buffers.rows(buffer, 0, len(run.ids), run.file.kind.num_bytes)
            is_read = block_files.read_blocks(run.file, run.first, rows.view(-1).numpy().data)
        except Exception:
            log.exception("blocks of %s cannot be read", run.file.path)
        self._copier.submit(self._copy, fetch, run, buffer, is_read=is_read)

    def _copy(self, fetch: DiskFetch, run: _Run, buffer: int, *, is_read: bool) -> None:
        """On the copier."""
        is_copied = False
        try:
            if is_read and not fetch.has_failed:
                places = [BlockPlace(buffer, slot) for slot in range(len(run.ids))]
                fetch.copies.to_device(run.tensors, run.ids, places).wait()
                is_copied = True
        except torch.OutOfMemoryError:
            pass
        except Exception:
            log.exception("blocks of %s cannot be copied", run.file.path)
        with self.lock:
            self.free.append(buffer)
            fetch.num_running -= 1
            if not is_read:
                fetch.unreadable.append(run.file)
            if not is_copied:
                fetch.fail()
            fetch.note_end()
            self._begin_reads()

    def close(self) -> None:
        """Ends the threads."""
        self._readers.shutdown(cancel_futures=True)
        self._copier.shutdown(cancel_futures=True)


class DiskFetch:
    """A fetch of blocks from files to the device."""

    def __init__(
        self, reader: DiskReader, copies: IncomingCopies, blocks: Sequence[StoredBlock], num_cached_bytes: int = 0
    ) -> None:
        """`copies`: from the reader's buffers. `num_cached_bytes`: of the blocks, probably in the page cache."""
        self.copies = copies
        self._reader = reader
        self.runs: deque[_Run] = deque()
        """Those that are not read yet."""
        self.num_running = 0
        """Those being read or copied."""
        self.unreadable: list[BlockFile] = []
        """Damaged files, and those that are gone."""
        self.has_failed = False
        """A file is unreadable, the device has no memory for a copy, or the fetch was cancelled."""
        self._ended = threading.Event()
        self.ended_s: float | None = None
        """When the last block arrived: while a front is computed, the engine looks for the end only between steps."""
        self.num_bytes = sum(block.file.kind.num_bytes for block in blocks)
        self.cached_share = min(1.0, num_cached_bytes / max(1, self.num_bytes))
        for block in sorted(blocks, key=lambda each: (each.file.path, each.number)):
            file, run = block.file, self.runs[-1] if self.runs else None
            most = max(1, reader.read_bytes // file.kind.num_bytes)
            if run is None or run.file is not file or run.first + len(run.ids) != block.number or len(run.ids) == most:
                run = _Run(block.tensors, file, block.number)
                self.runs.append(run)
            run.ids.append(block.id)
        copies.follow()
        reader.begin(self)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is in progress any more."""
        return self._ended.is_set()

    def wait(self, wait_s: float | None) -> None:
        """None: until it is complete."""
        self._ended.wait(wait_s)

    def cancel(self) -> None:
        """Starts no further reads. Running ones must end before the device's blocks are reused."""
        with self._reader.lock:
            self.fail()
            self.note_end()

    def fail(self) -> None:
        """With the lock, as the next one."""
        self.has_failed = True
        self.runs.clear()

    def note_end(self) -> None:
        if not (self.runs or self.num_running):
            self.ended_s = time.monotonic()
            self._ended.set()


@dataclass(frozen=True, slots=True)
class Fetch:
    """The blocks of one waiting prompt, on their way from host memory and disk to the device."""

    copies: tuple[RunningCopy, ...]
    """Those from host memory."""
    pages: Sequence[IncomingPages]
    state: tuple[int, Digest] | None
    places: tuple[BlockPlace, ...]
    num_tokens: int
    num_bytes: int
    started_s: float
    from_disk: DiskFetch | None = None

    @property
    def is_complete(self) -> bool:
        is_read = self.from_disk is None or self.from_disk.is_complete
        return is_read and all(copy.is_complete for copy in self.copies)

    def wait(self, wait_s: float | None) -> None:
        """At most so long for a disk, and for all copies from host memory; None: until it is complete."""
        if self.from_disk is not None:
            self.from_disk.wait(wait_s)
        for copy in self.copies if wait_s is None or self.from_disk is None else ():
            copy.wait()
