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


def ends_with_chunk(wire: bytes, data: bytes) -> bool:
    """`wire` ends with `data` as one whole chunk. False is also said of one too long to be worth the look."""
    return len(data) < _LONGEST_QUICK_BYTES and wire.endswith(frame(data))


def _size_lines() -> tuple[bytes, ...]:
    lines = [bytes(_LONGEST_QUICK_BYTES + 1)] * (_LONGEST_QUICK_BYTES + 1)  # nothing that short begins with this
    for num_bytes in range(1, _LONGEST_QUICK_BYTES):
        line = b"%x\r\n" % num_bytes
        num_wire_bytes = len(line) + num_bytes + _NUM_CLOSING_BYTES
        if num_wire_bytes <= _LONGEST_QUICK_BYTES:
            lines[num_wire_bytes] = line
    return tuple(lines)


SIZE_LINES = _size_lines()
"""By its length on the wire: how one whole chunk, framed as `frame` does it, begins. Of some lengths there is none, and
what stands there begins nothing. Longer ones are not worth the look."""
