"""The orientation of a picture, from the EXIF data in its file. Pure."""

from __future__ import annotations

import struct

UPRIGHT = 1
_ORIENTATION_TAG = 0x0112
_SHORT = 3
_MAX_ENTRIES = 512
_PREFIX = b"Exif\0\0"


def read_orientation(exif: bytes) -> int:
    """The orientation as EXIF numbers it, 1 to 8; `UPRIGHT` if the data has none or is malformed."""
    data = exif.removeprefix(_PREFIX)
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None:
        return UPRIGHT
    try:
        (start,) = struct.unpack_from(f"{order}I", data, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", data, start)
        for index in range(min(num_entries, _MAX_ENTRIES)):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", data, start + 2 + 12 * index)
            if tag == _ORIENTATION_TAG and kind == _SHORT and UPRIGHT <= value <= 8:
                return int(value)
    except struct.error:
        pass
    return UPRIGHT


def swaps_sides(orientation: int) -> bool:
    """Whether width and height of the upright picture are height and width of the stored one."""
    return orientation >= 5
