"""A file mapped into memory: bytes by offset, without reading what nobody asks for."""

from __future__ import annotations

import mmap
import os
import stat
import sys
from pathlib import Path
from types import TracebackType

from cortex.neuron.weights.errors import FilesMissing, Malformed

# Tensors want a writable buffer, so the mapping is private and copy-on-write. Without this flag the kernel would
# account every byte of it as memory that might be written, and refuse files larger than RAM. `mmap` has no name for it.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class MappedFile:
    """One regular file, open for as long as this object or any tensor over `buffer` lives.

    `descriptor` is for positioned reads (thread-safe) and dies with `close()`; the mapping itself is released when the
    last view of it is, so that a tensor handed out earlier never dangles.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        try:
            # Non-blocking, so that a named pipe in place of a file is refused instead of waited for.
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
            self.buffer = mmap.mmap(
                self.descriptor,
                self.num_bytes,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except OSError as error:
            self.close()
            raise FilesMissing(f"cannot map {path}: {error.strerror}; is its file system supported?") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptor back; idempotent. Views of `buffer` stay valid."""
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
