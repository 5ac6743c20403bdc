"""Blocks on disk reach the device while the engine does something else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.block_files import BlockFile
from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors, RunningCopy
from cortex.neuron.engine.host_pages.disk_reads import SWITCH_S, DiskFetch, DiskReader, StoredBlock
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.rates import CopyRate
from cortex.neuron.engine.host_pages.store import BlockKind, BlockPlace

from ....waiting import WAIT_S
from .engines import CPU

NUM_BLOCKS = 40
KIND = BlockKind(bytes(16), 0, 512)
PARTS = 2


class Device:
    """The memory of a device, and blocks on disk that belong there."""

    def __init__(self, folder: Path) -> None:
        self.memory = torch.zeros(PARTS, NUM_BLOCKS, KIND.num_bytes // PARTS, dtype=torch.uint8)
        self.blocks = BlockTensors([self.memory])
        self.reader = DiskReader(CPU, read_bytes=4 * KIND.num_bytes, max_buffer_bytes=8 * KIND.num_bytes)
        assert self.reader.allocate(KIND.num_bytes)
        self.copies = BlockCopies(HostSlabs(CPU), CPU).incoming(self.reader.buffers)
        contents = torch.randint(256, (NUM_BLOCKS, KIND.num_bytes), dtype=torch.uint8)
        names = [bytes([number]) * 16 for number in range(NUM_BLOCKS)]
        half = NUM_BLOCKS // 2
        self.files = [
            block_files.write_file(folder, KIND, "m", names[part], [contents[part].flatten().numpy().data])
            for part in (slice(half), slice(half, None))
        ]
        self.expected = contents.view(NUM_BLOCKS, PARTS, -1).transpose(0, 1)

    def fetch(self, ids: Sequence[int]) -> DiskFetch:
        blocks = [StoredBlock(self.files[id >= 20], id % 20, self.blocks, id) for id in ids]
        return DiskFetch(self.reader, self.copies, blocks)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path)
    yield made
    made.reader.close()


def test_fetches_that_nobody_looks_at_share_the_buffers_and_end(device: Device) -> None:
    fetches = [device.fetch(range(first, NUM_BLOCKS, 3)) for first in range(3)]
    for each in fetches:
        each.wait(WAIT_S)
        assert each.is_complete
        assert not each.has_failed
    assert torch.equal(device.memory, device.expected)
    assert len(device.reader.free) == 2
    assert sum(each.num_bytes for each in fetches) == NUM_BLOCKS * KIND.num_bytes


def test_rate_is_that_of_the_blocks_also_if_nobody_looks_at_the_end(device: Device) -> None:
    rate = CopyRate(lambda: float("inf"))  # whoever looks now comes late
    started_s = time.monotonic()
    fetch = device.fetch(range(NUM_BLOCKS))
    fetch.wait(WAIT_S)
    rate.measured(fetch.num_bytes, started_s, fetch.ended_s)
    assert rate.expected > 0


def test_readers_wait_less_for_the_interpreter_only_while_they_read(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual_s, read_blocks = sys.getswitchinterval(), block_files.read_blocks
    intervals: list[float] = []

    def read(file: BlockFile, first: int, view: memoryview) -> bool:
        intervals.append(sys.getswitchinterval())
        return read_blocks(file, first, view)

    monkeypatch.setattr(block_files, "read_blocks", read)
    fetch = device.fetch(range(NUM_BLOCKS))
    fetch.wait(WAIT_S)
    with device.reader.lock:  # its end is noted with the lock
        assert sys.getswitchinterval() == usual_s
    assert set(intervals) == {SWITCH_S}


def test_short_fetch_does_not_wait_for_a_long_one(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, read_blocks = threading.Semaphore(0), block_files.read_blocks

    def in_turns(file: BlockFile, first: int, view: memoryview) -> bool:
        assert first == 19 or may_read.acquire(timeout=WAIT_S)
        return read_blocks(file, first, view)

    monkeypatch.setattr(block_files, "read_blocks", in_turns)
    device.fetch(range(20))
    short = device.fetch([39])
    may_read.release(2)  # a buffer for another part of the long one, and one for the short one
    short.wait(WAIT_S)
    assert short.is_complete
    may_read.release(100)


def test_cancelled_fetch_ends_what_has_begun(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, read_blocks = threading.Event(), block_files.read_blocks
    monkeypatch.setattr(block_files, "read_blocks", lambda *values: may_read.wait(WAIT_S) and read_blocks(*values))
    fetch = device.fetch(range(NUM_BLOCKS))
    fetch.cancel()
    assert (fetch.is_complete, fetch.has_failed) == (False, True)
    may_read.set()
    fetch.wait(WAIT_S)
    assert fetch.is_complete
    assert not device.memory.any(), "its blocks may be given to others"
    assert (len(device.reader.free), fetch.unreadable) == (2, [])


def test_damaged_file_fails_the_fetch_and_is_named(device: Device) -> None:
    (damaged, _) = device.files
    data = bytearray(damaged.path.read_bytes())
    data[-1] ^= 1
    damaged.path.write_bytes(data)
    fetch = device.fetch(range(NUM_BLOCKS))
    fetch.wait(WAIT_S)
    assert (fetch.is_complete, fetch.has_failed) == (True, True)
    assert damaged in fetch.unreadable


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError, RuntimeError])
def test_copy_that_fails_fails_the_fetch(
    device: Device, monkeypatch: pytest.MonkeyPatch, problem: type[Exception]
) -> None:
    def fail(blocks: BlockTensors, ids: Sequence[int], places: Sequence[BlockPlace]) -> RunningCopy:
        raise problem

    monkeypatch.setattr(device.copies, "to_device", fail)
    fetch = device.fetch(range(NUM_BLOCKS))
    fetch.wait(WAIT_S)
    assert (fetch.is_complete, fetch.has_failed, fetch.unreadable) == (True, True, [])
    monkeypatch.undo()
    again = device.fetch(range(NUM_BLOCKS))
    again.wait(WAIT_S)
    assert torch.equal(device.memory, device.expected)
