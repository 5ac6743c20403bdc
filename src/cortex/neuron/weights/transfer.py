"""Loads weights from files into the tensors of a model, at bus speed and with bounded use of RAM.

Tensors are read in pieces, so that progress is steady and a cancelled load ends at once. They reach a GPU through
pinned buffers, which reader threads fill. Only the calling thread uses the device.
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
from cortex.neuron.weights.decode import mapped_bytes
from cortex.neuron.weights.errors import Cancelled, CheckpointError
from cortex.neuron.weights.placement import (
    PackedPlacement,
    PackedTarget,
    PieceSizes,
    Placement,
    Target,
    WeightPiece,
    checked,
    checked_packed,
    finish,
)

_NUM_READERS: Final = 8
_POLL_S: Final = 0.02
_POLL_IN_FLIGHT_S: Final = 0.0005


@dataclass(slots=True)
class Buffer:
    """Pinned memory for one piece at a time. Readers fill it through `memory`, without torch."""

    tensor: torch.Tensor
    memory: memoryview

    @classmethod
    def pinned(cls, num_bytes: int) -> Buffer:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return cls(tensor, tensor.numpy().data)


def staged(
    pieces: Sequence[WeightPiece], device: torch.device, cancelled: Callable[[], bool], pinned_bytes: int
) -> Iterator[WeightPiece]:
    """Write pieces to `device` through pinned buffers. Yields each piece when its buffer is free again.

    The cycle of a buffer: a reader fills it, this thread queues the copy to the device and the decoding, and once the
    device has finished both, the buffer is free for the next reader.
    """
    stream = torch.cuda.current_stream(device)
    largest = max((piece.num_bytes for piece in pieces), default=0)
    num_buffers = max(1, min(pinned_bytes // max(1, largest), len(pieces)))
    with Readers(pieces, [Buffer.pinned(largest) for _ in range(num_buffers)]) as readers:
        in_flight: deque[tuple[torch.cuda.Event, Buffer, WeightPiece]] = deque()
        num_left = len(pieces)
        while num_left:
            if cancelled():
                raise Cancelled("the load was cancelled by the caller")
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
            piece.target.write(piece, raw)
            in_flight.append((stream.record_event(), buffer, piece))


class Readers:
    """Threads that read pieces into buffers. They end with the `with` block, also after an exception."""

    def __init__(self, pieces: Sequence[WeightPiece], buffers: Sequence[Buffer]) -> None:
        self._free: queue.SimpleQueue[Buffer | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[WeightPiece, Buffer] | CheckpointError] = queue.SimpleQueue()
        self._pieces = iter(pieces)
        self._pieces_lock = threading.Lock()
        for buffer in buffers:
            self._free.put(buffer)
        num_readers = min(_NUM_READERS, len(buffers), os.cpu_count() or 1)
        self._threads = [
            threading.Thread(target=self._read_pieces, name=f"weights-reader-{number}", daemon=True)
            for number in range(num_readers)
        ]

    def __enter__(self) -> Readers:
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

    def release(self, buffer: Buffer) -> None:
        self._free.put(buffer)

    def next_filled(self, timeout_s: float) -> tuple[WeightPiece, Buffer] | None:
        """A piece that was read, or None after the timeout. Raises the CheckpointError of a reader."""
        try:
            filled = self._filled.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(filled, CheckpointError):
            raise filled
        return filled

    def _read_pieces(self) -> None:
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


def _read(piece: WeightPiece, buffer: Buffer) -> None:
    """Fill `buffer` with the bytes of the piece."""
    first = 0
    for offset, num_bytes in piece.stored.spans(piece.start_group, piece.num_groups):
        piece.stored.file.read_into(buffer.memory[first : first + num_bytes], offset)
        first += num_bytes


__all__ = ["PackedPlacement", "PieceSizes", "Placement", "Progress", "load_into"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes), on the calling thread. Bytes done never decrease."""


def load_into(
    checkpoint: Checkpoint,
    placements: Sequence[Placement],
    packed: Sequence[PackedPlacement] = (),
    *,
    progress: Progress,
    cancelled: Callable[[], bool],
    sizes: PieceSizes | None = None,
) -> None:
    """Fill every destination from the checkpoint. All destinations are on one device.

    Raises TensorMissing before any transfer if a name or a shape is wrong, CheckpointError if a file cannot be read or
    a scale is not a number,
    and Cancelled within a tenth of a second after `cancelled()` turns true. After an error the destinations hold
    undefined values. On return, all weights are on the device.
    """
    sizes = sizes or PieceSizes()
    targets: list[Target | PackedTarget] = [
        *(Target(placement, checked(checkpoint, placement), sizes) for placement in placements),
        *(PackedTarget(placement, checked_packed(checkpoint, placement), sizes) for placement in packed),
    ]
    pieces = [piece for target in targets for piece in target.pieces()]
    total_bytes = sum(piece.num_bytes for piece in pieces)
    devices = {placement.destination.device for placement in placements}
    devices |= {placement.matrix.device for placement in packed}
    if len(devices) > 1:
        raise ValueError(f"destinations are on several devices: {sorted(map(str, devices))}; use one call per device")
    progress(0, total_bytes)
    done_bytes = 0
    device = next(iter(devices), torch.device("cpu"))
    with torch.no_grad():
        on_cpu = device.type == "cpu"
        arrivals = _mapped(pieces, cancelled) if on_cpu else staged(pieces, device, cancelled, sizes.pinned_bytes)
        for piece in arrivals:
            done_bytes += piece.num_bytes
            progress(done_bytes, total_bytes)
        finish(target.check for target in targets)


def _mapped(pieces: Sequence[WeightPiece], cancelled: Callable[[], bool]) -> Iterator[WeightPiece]:
    """Write pieces on the CPU, directly from the mapped files."""
    for piece in pieces:
        if cancelled():
            raise Cancelled("the load was cancelled by the caller")
        piece.target.write(piece, mapped_bytes(piece.stored, piece.start_group, piece.num_groups))
        yield piece
