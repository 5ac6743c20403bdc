"""Copies of blocks between a model's device memory and host memory.

On a GPU they run on a stream of their own, after the steps that were launched before them. A block's parts are
scattered over the layers: they are gathered in a small buffer on the device, which is copied as one piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.store import BlockPlace

BUFFER_BYTES = 32 << 20
"""Device memory for blocks being copied; twice this while they are gathered."""


class BlockTensors:
    """The device memory of one kind of blocks: tensors with the shape [parts, blocks, ...]."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [tensor[0, 0].nbytes for tensor in tensors]
        word = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[math.gcd(8, *sizes)]
        self._word = word
        self._tensors = [tensor.flatten(2).view(word) for tensor in tensors]
        self.num_bytes = sum(tensor.shape[0] * tensor.shape[2] * word.itemsize for tensor in self._tensors)
        """Bytes of one block."""

    def gather(self, ids: Tensor, rows: Tensor) -> None:
        """rows: [ids, num_bytes] of uint8"""
        for tensor, part in self._parts(rows):
            part.copy_(tensor.index_select(1, ids).transpose(0, 1))

    def scatter(self, ids: Tensor, rows: Tensor) -> None:
        """The reverse of `gather`."""
        for tensor, part in self._parts(rows):
            tensor.index_copy_(1, ids, part.transpose(0, 1))

    def _parts(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        words, first = rows.view(self._word), 0
        for tensor in self._tensors:
            parts, _, size = tensor.shape
            yield tensor, words[:, first : first + parts * size].unflatten(1, (parts, size))
            first += parts * size


@dataclass(frozen=True, slots=True, eq=False)
class RunningCopy:
    """A copy that was started; equal only to itself."""

    event: torch.cuda.Event | None
    """None: the copy is complete."""

    @property
    def is_complete(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Blocks the host."""
        if self.event is not None:
            self.event.synchronize()

    def precede_steps(self) -> None:
        """Steps launched from now on wait for the copy."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class BlockCopies:
    """They run in the order in which they were started. Belongs to the engine thread."""

    def __init__(self, slabs: HostSlabs, device: torch.device) -> None:
        self._slabs = slabs
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def incoming(self, slabs: HostSlabs) -> IncomingCopies:
        """Copies from other host memory."""
        return IncomingCopies(slabs, self._device, self)

    def precede(self, stream: torch.cuda.Stream | None) -> None:
        """Copies started on `stream` from now on run after these."""
        if stream is not None and self._stream is not None:
            stream.wait_stream(self._stream)

    @property
    def are_concurrent(self) -> bool:
        """Whether copies run in the background; otherwise they are complete when the call returns."""
        return self._stream is not None

    def to_host(self, blocks: BlockTensors, ids: Sequence[int], places: Sequence[BlockPlace]) -> RunningCopy:
        """Copies the blocks with these ids to `places`. Raises OutOfMemoryError, possibly after copying some."""
        return self._run(blocks, ids, places, is_outward=True)

    def to_device(self, blocks: BlockTensors, ids: Sequence[int], places: Sequence[BlockPlace]) -> RunningCopy:
        """Copies from `places` to the blocks with these ids. Raises OutOfMemoryError, as `to_host`."""
        return self._run(blocks, ids, places, is_outward=False)

    def _run(
        self, blocks: BlockTensors, ids: Sequence[int], places: Sequence[BlockPlace], *, is_outward: bool
    ) -> RunningCopy:
        runs = [
            (ids[start : start + count], self._slabs.rows(*places[start], count, blocks.num_bytes))
            for start, count in consecutive(places)
        ]
        with torch.inference_mode():
            if self._stream is None:
                for chosen, rows in runs:
                    (blocks.gather if is_outward else blocks.scatter)(torch.tensor(chosen), rows)
                return RunningCopy(None)
            self._follow_steps()
            with torch.cuda.stream(self._stream):
                index = torch.tensor(ids).pin_memory()  # else the upload would wait for the steps before it
                try:
                    self._through_buffer(blocks, index, [rows for _, rows in runs], is_outward=is_outward)
                except torch.OutOfMemoryError:
                    self._stream.synchronize()  # its launched copies still write
                    raise
                event = torch.cuda.Event()
                event.record(self._stream)
                return RunningCopy(event)

    def _follow_steps(self) -> None:
        """Copies started from now on run after the steps that were launched before."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _through_buffer(self, blocks: BlockTensors, index: Tensor, runs: Sequence[Tensor], *, is_outward: bool) -> None:
        most = max(1, BUFFER_BYTES // blocks.num_bytes)
        buffer = torch.empty(most, blocks.num_bytes, dtype=torch.uint8, device=self._device)
        index = index.to(self._device, non_blocking=True)
        first = 0
        for rows in runs:
            for start in range(0, len(rows), most):
                host = rows[start : start + most]
                staged, chosen = buffer[: len(host)], index[first : first + len(host)]
                first += len(host)
                if is_outward:
                    blocks.gather(chosen, staged)
                    host.copy_(staged, non_blocking=True)
                else:
                    staged.copy_(host, non_blocking=True)
                    blocks.scatter(chosen, staged)


class IncomingCopies(BlockCopies):
    """Copies to the device, on a stream and from a thread of their own. They run after the steps and copies that
    `follow` has seen, and together with later ones, which use the blocks only when they have arrived."""

    def __init__(self, slabs: HostSlabs, device: torch.device, others: BlockCopies) -> None:
        super().__init__(slabs, device)
        self._others = others

    def follow(self) -> None:
        """Call on the engine thread: a block is overwritten only after all that used it, and the copy of what it
        held."""
        super()._follow_steps()
        self._others.precede(self._stream)

    def _follow_steps(self) -> None:
        pass


def consecutive(places: Sequence[BlockPlace]) -> list[tuple[int, int]]:
    """(index, count) of each run of adjacent places in one slab."""
    runs: list[tuple[int, int]] = []
    for index, place in enumerate(places):
        if index and place == (places[index - 1].slab, places[index - 1].slot + 1):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
