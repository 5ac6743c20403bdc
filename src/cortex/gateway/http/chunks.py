"""A piece of a body whose length is not known beforehand, as it goes on the wire.

There are many ways to frame the same bytes (leading zeros, capitals, extensions), and this gateway writes only one of
them. What came framed that way can go on as it is.
"""

from __future__ import annotations

LAST = b"0\r\n\r\n"
"""Ends the body."""

_LONGEST_QUICK_BYTES = 4096
_NUM_CLOSING_BYTES = 2


def frame(data: bytes) -> bytes:
    """`data` as one chunk; it must not be empty, for that would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def unframe(wire: bytes) -> bytes:
    """The bytes which `frame` makes exactly `wire` of, or none: it is several chunks, a part of one, framed in another
    way, the last one, or too long to be worth the look."""
    try:
        size_line = _SIZE_LINES[len(wire)]
    except IndexError:
        return b""
    if size_line is not None and wire.startswith(size_line) and wire.endswith(b"\r\n"):
        return wire[len(size_line) : -_NUM_CLOSING_BYTES]
    return b""


def ends_with_chunk(wire: bytes, data: bytes) -> bool:
    """`wire` ends with `data` as one whole chunk. False is also said of one too long to be worth the look."""
    return len(data) < _LONGEST_QUICK_BYTES and wire.endswith(frame(data))


def _size_lines() -> tuple[bytes | None, ...]:
    """How a chunk of so many bytes on the wire must begin; None where no chunk is that long."""
    lines: list[bytes | None] = [None] * (_LONGEST_QUICK_BYTES + 1)
    for num_bytes in range(1, _LONGEST_QUICK_BYTES):
        line = b"%x\r\n" % num_bytes
        num_wire_bytes = len(line) + num_bytes + _NUM_CLOSING_BYTES
        if num_wire_bytes <= _LONGEST_QUICK_BYTES:
            lines[num_wire_bytes] = line
    return tuple(lines)


_SIZE_LINES = _size_lines()
