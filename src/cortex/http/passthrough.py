"""The relay's fast path: chunks of an event stream that go to the client unparsed."""

from __future__ import annotations

from collections.abc import Callable

from cortex.http.chunks import SIZE_LINES, payload
from cortex.http.event_boundary import BLANK_LINES

TAIL_BYTES = 2048
ERROR_TAIL_BYTES = 64 * 1024
"""An error is read as a whole: its code may be anywhere in its body."""
_NUM_TAIL_CHUNKS = 8
"""Chunks that are kept for the tail: the last ones of a stream, where its usage is."""
_MAX_HELD_CHUNKS = 4 * _NUM_TAIL_CHUNKS
_FRAME_BYTES = 6
"""Framing of a chunk of 16 to 255 bytes, which most events are; smaller ones have a byte less, larger ones one more."""
WHOLE_EVENTS = tuple(blank + b"\r\n" for blank in BLANK_LINES)
"""How a chunk ends that leaves no event open."""
WHOLE_LINES = (b"}\n\r\n",)
"""The same where events are lines."""


class BodyTail:
    """The end of a response body, where usage is reported, and the body's length. Chunk framing is not part of it."""

    __slots__ = ("_kept", "max_bytes", "num_bytes")

    def __init__(self) -> None:
        self._kept = bytearray()
        self.max_bytes = TAIL_BYTES
        self.num_bytes = 0
        """Length of the body so far. Inexact by a byte for each small or large chunk that was passed through."""

    def push(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._kept += data[-self.max_bytes :]
        if len(self._kept) > 4 * self.max_bytes:  # seldom, not at every push
            del self._kept[: -self.max_bytes]

    def skip(self, num_bytes: int) -> None:
        """Count bytes that are not kept: more of the body has already followed them."""
        self.num_bytes += num_bytes
        self._kept.clear()

    def __bytes__(self) -> bytes:
        """The last bytes of the body, at most `max_bytes`."""
        return bytes(self._kept[-self.max_bytes :])


class ChunkPassthrough:
    """Sends chunks to the client as they came from the node. Used between two events of a stream, for nearly all of it.

    `take` makes as few calls and objects as it can. A quiet stream finds the CPU caches cold at every event, so each of
    them would cost a cache miss.
    """

    __slots__ = ("_capture", "_chunks", "_ends", "_tail", "_write", "is_active")

    def __init__(
        self,
        write: Callable[[bytes], None],
        tail: BodyTail,
        capture: Callable[[bytes], None] | None = None,
        ends: tuple[bytes, ...] = WHOLE_EVENTS,
    ) -> None:
        """`write` sends framed bytes to the client. `fold` adds the data that went through here to `tail`, and passes
        it to `capture`. `ends`: how a chunk of whole events ends."""
        self._ends = ends
        self._write = write
        self._tail = tail
        self._capture = capture
        self._chunks: list[bytes] = []
        self.is_active = False
        """Set when a chunk was sent; cleared by the reader."""

    def take(self, wire: bytes) -> bool:
        """Send `wire` if it is one whole chunk, framed as `chunks.frame` does, whose last event is complete.

        Returns False, with nothing done, if it is anything else.
        """
        try:
            is_whole = wire.startswith(SIZE_LINES[len(wire)]) and wire.endswith(self._ends)
        except IndexError:  # longer than the table covers
            return False
        if is_whole:
            self._write(wire)
            self.is_active = True
            chunks = self._chunks
            chunks.append(wire)
            if len(chunks) > _MAX_HELD_CHUNKS:
                self._drop_oldest()
        return is_whole

    def _drop_oldest(self) -> None:
        dropped = self._chunks[:-_NUM_TAIL_CHUNKS]
        del self._chunks[:-_NUM_TAIL_CHUNKS]
        self._tail.skip(sum(map(len, dropped)) - _FRAME_BYTES * len(dropped))

    def fold(self) -> None:
        """Add the chunks that were sent since the last call to the tail."""
        if self._chunks:
            data = b"".join(map(payload, self._chunks))
            self._tail.push(data)
            self._chunks.clear()
            if self._capture is not None:
                self._capture(data)
