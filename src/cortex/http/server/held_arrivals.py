"""Keeps clients from connecting to a socket that is about to be closed, which would reset what it has not accepted."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys

_ATTACH_FILTER = 26
"""`SO_ATTACH_FILTER` of Linux, which Python does not name."""
_FLAGS_AT = 13
"""The offset of the flags in a TCP header."""
_SYN, _SYN_AND_ACK = 0x02, 0x12
_INSTRUCTIONS = (
    (0x30, 0, 0, _FLAGS_AT),  # load a byte
    (0x54, 0, 0, _SYN_AND_ACK),  # keep these bits
    (0x15, 0, 1, _SYN),  # go on if that is what is left, else skip one
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # pass all of it
)
_PROGRAM = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _INSTRUCTIONS))


def hold_arrivals(listening: socket.socket) -> None:
    """From now on nobody connects to this socket, and what has connected can be accepted. A client that tries sends its
    packet again after a second: to a successor on the same address, if there is one then. Without effect where the
    platform has no filters. The socket must not be another process's too."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            program = struct.pack("HP", len(_INSTRUCTIONS), ctypes.addressof(_PROGRAM))
            listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
