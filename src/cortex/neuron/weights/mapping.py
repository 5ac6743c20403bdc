"""A file mapped into memory. Only the pages that are accessed are read."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from functools import cached_property
from pathlib import Path
from types import TracebackType

from cortex.neuron.weights.errors import FilesMissing, Malformed

# torch needs a writable buffer, so the mapping is private and copy-on-write. Without this flag the kernel counts every
# mapped byte as memory that might be written, and rejects files larger than RAM. `mmap` has no name for the flag.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class MappedFile:
    """One regular file. It stays mapped as long as this object or a tensor over `buffer` exists.

    `descriptor` is for positioned reads, which are thread-safe; `close()` closes it. The mapping is released with its
    last view, so that tensors over it stay valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        try:
            # Non-blocking, so that opening a named pipe does not wait for a writer and the pipe is rejected.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise FilesMissing(f"cannot open {path}: {error.strerror}; check the path and its permissions") from error
        try:
            status = os.fstat(self.descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FilesMissing(f"{path} is not a regular file; point to the model file itself")
            self.num_bytes = status.st_size
            if self.num_bytes == 0:
                raise Malformed(f"{path} is empty; download it again")
        except OSError as error:
            self.close()
            raise FilesMissing(f"cannot read {path}: {error.strerror}; {_remedy(error)}") from error
        except BaseException:
            self.close()
            raise

    def header(self, num_bytes: int) -> mmap.mmap:
        """The first bytes of the file, or all of it. A process whose address space is limited could not map a whole
        model."""
        return self._mapped(min(num_bytes, self.num_bytes), mmap.MAP_PRIVATE, mmap.PROT_READ)

    @cached_property
    def buffer(self) -> mmap.mmap:
        """The whole file, for tensors. Accessed first before `close`."""
        return self._mapped(self.num_bytes, mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes from `offset` on; thread-safe. If the file shrinks, this fails cleanly, where a
        mapping would crash. Raises FilesMissing, or Malformed."""
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self.descriptor, [memory[done:]], offset + done)
            except OSError as error:
                raise FilesMissing(f"cannot read {self.path}: {error.strerror}; check the disk") from error
            if count == 0:
                raise Malformed(f"{self.path} ends at byte {offset + done} while it is being read; download it again")
            done += count

    def _mapped(self, num_bytes: int, flags: int, prot: int) -> mmap.mmap:
        try:
            return mmap.mmap(self.descriptor, num_bytes, flags=flags, prot=prot)
        except OSError as error:
            raise FilesMissing(f"cannot map {self.path}: {error.strerror}; {_remedy(error)}") from error

    def close(self) -> None:
        """Close the descriptor; idempotent. Views of `buffer` stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _remedy(error: OSError) -> str:
    return "free memory on the host" if error.errno == errno.ENOMEM else "check that its file system is supported"
