"""The weights of a sleeping model: a copy in host memory while the device memory is free.

It works on storages rather than on tensors: a storage is emptied and filled again in place, so that every tensor and
every view of it (a tied head, the parts of a fused matrix, the kernels' rules) is valid again without an update.
Whatever holds addresses instead, such as a captured graph, must be gone before.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from cortex.formats.units import gib
from cortex.neuron.engine.errors import DamagedError, InsufficientMemory, SleepError
from cortex.neuron.engine.memory.device import device_memory

_ALIGNMENT_BYTES = 512
_HOST = torch.device("cpu")


class HostWeights:
    """Belongs to the engine thread. Copies run on its current stream, and are waited for once."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copies `storages`, which must not be written afterwards; they keep their memory until `vacate`.

        Raises SleepError if the host has no memory for the copy.
        """
        self._storages = list(storages)
        self._device = storages[0].device
        self._sizes = [storage.nbytes() for storage in storages]
        self._sums = self._checksums()
        self.num_bytes = sum(map(_aligned, self._sizes))
        self.buffer = HostBuffer(self.num_bytes, pinned=self._device.type == "cuda")
        for storage, copied in self._pairs():
            copied.copy_(_flat(storage), non_blocking=True)
        self._synchronise()

    def vacate(self) -> None:
        """Frees the device memory; the tensors are unusable until `restore`."""
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocates the device memory again and fills it. If it raises, it holds no device memory.

        Raises DamagedError if the checksums differ from those before, and torch's error if memory runs out.
        """
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
            for storage, copied in self._pairs():
                _flat(storage).copy_(copied, non_blocking=True)
            self._synchronise()
            if self._checksums() != self._sums:
                raise DamagedError("the weights changed while the model was asleep; load it again")
        except BaseException:
            self.vacate()
            raise

    def release(self) -> None:
        """Frees the host memory."""
        self.buffer.release()

    def _pairs(self) -> Iterator[tuple[torch.UntypedStorage, Tensor]]:
        offset = 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            yield storage, self.buffer.bytes[offset : offset + size]
            offset += _aligned(size)

    def _checksums(self) -> list[int]:
        """One number per storage, computed on its device: a few milliseconds on a GPU."""
        sums = []
        for storage in self._storages:
            octets = _flat(storage)
            whole = len(octets) // 8 * 8
            sums.append(octets[:whole].view(torch.int64).sum() + octets[whole:].sum(dtype=torch.int64))
        return [int(number) for number in torch.stack(sums).tolist()]

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class HostBuffer:
    """One piece of host memory, page-locked if a GPU copies from it: as fast as the bus allows.

    Not from torch's own allocator of pinned memory, which rounds up to powers of two and keeps freed memory.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        """Raises SleepError."""
        free_bytes = device_memory(_HOST).free_bytes
        if num_bytes > free_bytes:
            raise SleepError(f"the weights take {gib(num_bytes)} of host memory, but {gib(free_bytes)} are free")
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise SleepError(f"the host cannot allocate {gib(num_bytes)} for the weights: {error}") from error
        with contextlib.suppress(OSError):  # a kernel without huge pages uses small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._is_locked = False
        if pinned:
            self.bytes.zero_()  # maps the pages on all cores; the driver would use one
            error_code = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0))
            self._is_locked = error_code == 0
            if error_code:
                _clear_driver_error()
                raise SleepError(f"the driver does not lock {gib(num_bytes)} of host memory (error {error_code})")

    def release(self) -> None:
        """No copy may be running."""
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._is_locked = False
        self.bytes = torch.empty(0, dtype=torch.uint8)  # the mapping ends with the last tensor on it


class HostBuffers:
    """The host memory of weights that do not fit the device. Each piece is page-locked if a GPU copies it."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: list[HostBuffer] = []
        self.num_bytes = 0
        self.on_release: Callable[[], object] | None = None
        """Called before the memory is freed: ends the threads that use it."""

    @property
    def locked_bytes(self) -> int:
        return self.num_bytes if self._pinned else 0

    def allocate(self, num_bytes: int) -> Tensor:
        """[bytes] uint8, zeros. Raises InsufficientMemory."""
        try:
            buffer = HostBuffer(num_bytes, pinned=self._pinned)
        except SleepError as error:
            raise InsufficientMemory(str(error)) from error
        self._buffers.append(buffer)
        self.num_bytes += num_bytes
        return buffer.bytes

    def release(self) -> None:
        """Frees the memory. Nothing may use it any more."""
        if self._pinned and self._buffers:
            torch.cuda.synchronize()
        if self.on_release is not None:
            self.on_release()
        for buffer in self._buffers:
            buffer.release()
        self._buffers.clear()
        self.num_bytes = 0


def _flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _clear_driver_error() -> None:
    """Clear the driver's last error, which it would otherwise raise at the next launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
