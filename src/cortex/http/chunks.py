"""Chunked transfer coding: framing, and recognising chunks that need no new framing.

The same bytes can be framed in many ways (leading zeros, capitals, extensions). This gateway writes only one of them,
and recognises only that one.
"""

from __future__ import annotations

LAST = b"0\r\n\r\n"
"""Ends the body."""

_MAX_WIRE_BYTES = 4096
_NUM_CLOSING_BYTES = 2


def frame(data: bytes) -> bytes:
    """`data` as one chunk. It must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def payload(chunk: bytes) -> bytes:
    """The data of one chunk that `frame` wrote."""
    return chunk[chunk.index(b"\n") + 1 : -_NUM_CLOSING_BYTES]


def ends_with_chunk(wire: bytes, data: bytes) -> bool:
    """Whether `wire` ends with `data` as one whole chunk. False for chunks too long to be compared cheaply."""
    return len(data) < _MAX_WIRE_BYTES and wire.endswith(frame(data))


def _size_lines() -> tuple[bytes, ...]:
    lines = [bytes(_MAX_WIRE_BYTES + 1)] * (_MAX_WIRE_BYTES + 1)  # longer than anything compared with it: no match
    for num_bytes in range(1, _MAX_WIRE_BYTES):
        line = b"%x\r\n" % num_bytes
        num_wire_bytes = len(line) + num_bytes + _NUM_CLOSING_BYTES
        if num_wire_bytes <= _MAX_WIRE_BYTES:
            lines[num_wire_bytes] = line
    return tuple(lines)


SIZE_LINES = _size_lines()
"""The size line of a chunk, by the chunk's length on the wire. A length that no chunk has gets a line that matches
nothing. Chunks longer than the table are not worth recognising."""
