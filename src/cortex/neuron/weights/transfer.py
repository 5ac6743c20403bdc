"""Weights from files to where the model wants them, at the speed of the bus, with a bounded footprint in RAM.

On a GPU: reader threads fill a few pinned buffers while the calling thread, the only one that touches the device, sends
them off and decodes there. On the CPU: copies out of the mapped files. Either way a tensor of any size moves in pieces,
so that progress is steady and a cancelled load ends at once.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cortex.neuron.weights.checkpoint import Checkpoint
from cortex.neuron.weights.decode import decode, mapped_bytes
from cortex.neuron.weights.errors import Cancelled, CheckpointError, FilesMissing, Malformed, TensorMissing
from cortex.neuron.weights.stored import StoredTensor

Transform = Callable[[torch.Tensor], torch.Tensor]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), on the calling thread; never goes back."""

_PIECE_BYTES: Final = 8 << 20
_NUM_READERS: Final = 8
_MAX_PINNED_BYTES: Final = 16 * _PIECE_BYTES
_POLL_S: Final = 0.02
_POLL_IN_FLIGHT_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor of the checkpoint and the place its values go to.

    `destination` is allocated already, on any device, in any dtype, and may be a slice of something larger.
    `select` takes a part of the tensor, one slice a dimension (a rank's share); only the rows it needs are read.
    `transform` is applied on the destination's device to runs of whole rows, so it must not mix rows.
    """

    name: str
    destination: torch.Tensor
    select: tuple[slice, ...] = ()
    transform: Transform | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of whole groups of one tensor, small enough for a buffer."""

    placement: Placement
    stored: StoredTensor
    start_group: int
    num_groups: int

    @property
    def num_bytes(self) -> int:
        return self.num_groups * self.stored.group_bytes


def load_into(
    checkpoint: Checkpoint,
    placements: Sequence[Placement],
    *,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> None:
    """Fill every destination from the checkpoint; all of them lie on one device.

    Raises TensorMissing before anything is moved when a name or a shape is wrong, CheckpointError when a file cannot be
    read, and Cancelled within a tenth of a second after `cancelled()` turns true; then destinations hold garbage.
    When it returns, everything is on the device.
    """
    pieces = [piece for placement in placements for piece in _pieces(checkpoint, placement)]
    total_bytes = sum(piece.num_bytes for piece in pieces)
    devices = {placement.destination.device for placement in placements}
    if len(devices) > 1:
        raise ValueError(f"destinations on several devices: {sorted(map(str, devices))}")
    progress(0, total_bytes)
    done_bytes = 0
    device = next(iter(devices), torch.device("cpu"))
    with torch.no_grad():
        arrivals = _mapped(pieces, cancelled) if device.type == "cpu" else _staged(pieces, device, cancelled)
        for piece in arrivals:
            done_bytes += piece.num_bytes
            progress(done_bytes, total_bytes)


def _pieces(checkpoint: Checkpoint, placement: Placement) -> Iterator[_Piece]:
    """Cut the rows that `placement` needs into pieces, after checking that they fit its destination."""
    stored = checkpoint.stored(placement.name)
    shape = stored.shape
    if len(placement.select) > len(shape) or any(part.step not in (None, 1) for part in placement.select):
        raise ValueError(f"{placement.name} has the shape {shape}; {placement.select} is no contiguous part of it")
    selected = tuple(
        len(range(*part.indices(extent))) for part, extent in zip(placement.select, shape, strict=False)
    ) + tuple(shape[len(placement.select) :])
    wanted = tuple(placement.destination.shape)
    fits = wanted[:1] == selected[:1] if placement.transform else wanted == selected
    if not fits:
        raise TensorMissing(
            f"{checkpoint.path}: {placement.name} gives the shape {selected}, the model needs {wanted}; "
            "is this the model its config describes?"
        )
    if not stored.num_elements:
        return
    rows = _rows(placement, stored)
    first_group = rows.start // stored.group_rows
    last_group = -(-rows.stop // stored.group_rows)
    step = max(1, _PIECE_BYTES // stored.group_bytes)
    for start in range(first_group, last_group, step):
        yield _Piece(placement, stored, start, min(step, last_group - start))


def _rows(placement: Placement, stored: StoredTensor) -> range:
    rows = range(stored.num_rows)
    return rows[placement.select[0]] if placement.select else rows


def _settle(piece: _Piece, raw: torch.Tensor) -> None:
    """Decode a piece's bytes, which are on the destination's device, and put its rows in their place."""
    placement, stored = piece.placement, piece.stored
    numbers = decode(stored, raw)
    if not stored.shape:
        placement.destination.copy_(placement.transform(numbers) if placement.transform else numbers)
        return
    rows = _rows(placement, stored)
    first_row = piece.start_group * stored.group_rows
    start = max(rows.start, first_row)
    stop = min(rows.stop, first_row + numbers.shape[0])
    numbers = numbers[(slice(start - first_row, stop - first_row), *placement.select[1:])]
    if placement.transform:
        numbers = placement.transform(numbers)
    placement.destination[start - rows.start : stop - rows.start].copy_(numbers)


def _mapped(pieces: Sequence[_Piece], cancelled: Callable[[], bool]) -> Iterator[_Piece]:
    """Settle pieces on the CPU straight from the mapped files."""
    for piece in pieces:
        if cancelled():
            raise Cancelled("the load was called off")
        _settle(piece, mapped_bytes(piece.stored, piece.start_group, piece.num_groups))
        yield piece


@dataclass(slots=True)
class _Buffer:
    """Pinned memory for one piece at a time; `memory` lets a reader fill it without torch."""

    tensor: torch.Tensor
    memory: memoryview

    @classmethod
    def pinned(cls, num_bytes: int) -> _Buffer:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return cls(tensor, tensor.numpy().data)


def _staged(pieces: Sequence[_Piece], device: torch.device, cancelled: Callable[[], bool]) -> Iterator[_Piece]:
    """Settle pieces on `device` by way of pinned buffers; yields each when its buffer is free again.

    A buffer goes: reader fills it → this thread starts the copy to the device and queues the decoding behind it →
    once the device is past that point, the buffer is free for the next reader.
    """
    stream = torch.cuda.current_stream(device)
    largest = max((piece.num_bytes for piece in pieces), default=0)
    num_buffers = max(1, min(_MAX_PINNED_BYTES // max(1, largest), len(pieces)))
    with _Readers(pieces, [_Buffer.pinned(largest) for _ in range(num_buffers)]) as readers:
        in_flight: deque[tuple[torch.cuda.Event, _Buffer, _Piece]] = deque()
        num_left = len(pieces)
        while num_left:
            if cancelled():
                raise Cancelled("the load was called off")
            while in_flight and in_flight[0][0].query():
                _, buffer, piece = in_flight.popleft()
                readers.release(buffer)
                num_left -= 1
                yield piece
            filled = readers.next_filled(_POLL_IN_FLIGHT_S if in_flight else _POLL_S)
            if filled is None:
                continue
            piece, buffer = filled
            raw = buffer.tensor[: piece.num_bytes].to(device, non_blocking=True)
            _settle(piece, raw)
            in_flight.append((stream.record_event(), buffer, piece))


class _Readers:
    """Threads that read pieces into buffers. They end with the `with` block, whatever ends it."""

    def __init__(self, pieces: Sequence[_Piece], buffers: Sequence[_Buffer]) -> None:
        self._free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[_Piece, _Buffer] | CheckpointError] = queue.SimpleQueue()
        self._pieces = iter(pieces)
        self._pieces_lock = threading.Lock()
        for buffer in buffers:
            self._free.put(buffer)
        num_readers = min(_NUM_READERS, len(buffers), os.cpu_count() or 1)
        self._threads = [
            threading.Thread(target=self._work, name=f"weights-reader-{number}", daemon=True)
            for number in range(num_readers)
        ]

    def __enter__(self) -> _Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._pieces_lock:
            self._pieces = iter(())
        for _thread in self._threads:
            self._free.put(None)
        for thread in self._threads:
            thread.join()

    def release(self, buffer: _Buffer) -> None:
        self._free.put(buffer)

    def next_filled(self, timeout_s: float) -> tuple[_Piece, _Buffer] | None:
        """A piece that has been read, None when there is none in time; raises what a reader ran into."""
        try:
            filled = self._filled.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(filled, CheckpointError):
            raise filled
        return filled

    def _work(self) -> None:
        while (buffer := self._free.get()) is not None:
            with self._pieces_lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            try:
                _read(piece, buffer)
            except CheckpointError as error:
                self._filled.put(error)
                return
            self._filled.put((piece, buffer))


def _read(piece: _Piece, buffer: _Buffer) -> None:
    """Fill `buffer` with the piece's bytes. Reading, unlike mapping, survives a file that shrinks meanwhile."""
    file = piece.stored.file
    offset = piece.stored.offset + piece.start_group * piece.stored.group_bytes
    done = 0
    while done < piece.num_bytes:
        try:
            count = os.preadv(file.descriptor, [buffer.memory[done : piece.num_bytes]], offset + done)
        except OSError as error:
            raise FilesMissing(f"cannot read {file.path}: {error.strerror}; check the disk") from error
        if count == 0:
            raise Malformed(f"{file.path} ends at byte {offset + done} while it is being read; download it again")
        done += count
