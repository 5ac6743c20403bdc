"""A request body that is not held in memory: pieces of bytes, and ranges of a file without a name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from cortex.http.limits import ClientShares
from cortex.wire.errors import CortexError, Overloaded

_WINDOW_BYTES = 1 << 18
_ON_DISK = Path("/var/tmp")


class FileRange(NamedTuple):
    """Bytes of a file, which stays open for as long as somebody refers to it."""

    file: IO[bytes]
    start: int
    num_bytes: int


class ComposedBody:
    """Read-only. Any number of readers may read it at once, each at its own position."""

    __slots__ = ("_num_bytes", "pieces")

    def __init__(self, pieces: Sequence[bytes | FileRange]) -> None:
        self.pieces = pieces
        self._num_bytes = sum(len(piece) if isinstance(piece, bytes) else piece.num_bytes for piece in pieces)

    def __len__(self) -> int:
        return self._num_bytes

    def read(self, position: int, num_bytes: int) -> bytes:
        """Up to `num_bytes` from `position` on, and at least one byte before the end. Blocks for a short read of a
        file that was written a moment ago."""
        for piece in self.pieces:
            size = len(piece) if isinstance(piece, bytes) else piece.num_bytes
            if position < size:
                if isinstance(piece, bytes):
                    return piece[position : position + num_bytes]
                wanted = min(num_bytes, size - position)
                return os.pread(piece.file.fileno(), wanted, piece.start + position)
            position -= size
        return b""

    def __getitem__(self, where: slice) -> bytes:
        """The bytes of a short range, as those of `bytes`."""
        start, end, _ = where.indices(len(self))
        parts = []
        while start < end and (data := self.read(start, end - start)):
            parts.append(data)
            start += len(data)
        return b"".join(parts)

    def find(self, wanted: bytes, start: int = 0, end: int | None = None) -> int:
        """As that of `bytes`. Reads a window at a time; blocks."""
        end = len(self) if end is None else min(end, len(self))
        while start < end:
            window = self[start : min(start + _WINDOW_BYTES, end)]
            if (found := window.find(wanted)) >= 0:
                return start + found
            if start + len(window) >= end:
                return -1
            start += len(window) - len(wanted) + 1
        return -1

    def composed(self, pieces: Sequence[bytes | tuple[int, int]]) -> ComposedBody:
        """A body of new bytes, and of ranges (start, end) of this one, which is one whole file."""
        [piece] = self.pieces
        assert isinstance(piece, FileRange)
        return ComposedBody(
            [part if isinstance(part, bytes) else FileRange(piece.file, part[0], part[1] - part[0]) for part in pieces]
        )


Body = bytes | ComposedBody


def new_spool() -> IO[bytes]:
    """A file without a name: nothing is left of it when it is closed, or this process killed. In `TMPDIR`, else on disk
    rather than in `/tmp`, which often is memory. Raises OSError."""
    on_disk = None if os.environ.get("TMPDIR") or not os.access(_ON_DISK, os.W_OK) else _ON_DISK
    return tempfile.TemporaryFile(buffering=0, dir=on_disk)


class BodySpool:
    """A file that a request body is written to while it arrives. Adds its bytes to those that `client` has in
    `spooled`; who takes the body, or drops it, subtracts them."""

    __slots__ = ("_client", "_file", "_num_bytes", "_spooled")

    def __init__(self, spooled: ClientShares, client: str) -> None:
        """Raises OSError."""
        self._spooled = spooled
        self._client = client
        self._num_bytes = 0
        self._file = new_spool()

    def write(self, data: bytes) -> CortexError | None:
        """Returns why the body is rejected."""
        self._num_bytes += len(data)
        self._spooled.add(self._client, len(data))
        if not self._spooled.has_room(self._client):
            return no_room("on disk")
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            return cannot_spool(error)
        return None

    def taken(self) -> ComposedBody:
        """The whole body, for the request."""
        return ComposedBody((FileRange(self._file, 0, self._num_bytes),))

    def drop(self) -> None:
        self._file.close()
        self._spooled.add(self._client, -self._num_bytes)


def no_room(where: str = "in memory") -> Overloaded:
    """The error for a request whose body would exceed the limit on all bodies."""
    return Overloaded(f"the request bodies {where} have reached their limit; try again in a moment")


def cannot_spool(error: OSError) -> Overloaded:
    return Overloaded(f"the request body cannot be written to disk ({error.strerror}); try again later")
