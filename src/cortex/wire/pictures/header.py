"""Reads format and size from the header of a picture's file. Pure; nothing is decoded.

The size is that of the upright picture: cameras store pictures lying down and note how to turn them.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

UPRIGHT = 1
_ORIENTATION_TAG = 0x0112
_SHORT = 3
_MAX_ENTRIES = 512
_PREFIX = b"Exif\0\0"

PictureFormat = Literal["jpeg", "png", "webp", "gif"]

_MAX_SEGMENTS = 1024
"""Parts of a file that are looked through; further ones hold nothing that is needed."""
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
"""Markers without a length."""
_JPEG_SCAN, _JPEG_END, _JPEG_EXIF = 0xDA, 0xD9, 0xE1


class UnreadablePicture(ValueError):
    """The bytes are no picture of a format that is read here, or its header is damaged."""


class PictureHeader(NamedTuple):
    format: PictureFormat
    width: int
    height: int
    orientation: int = UPRIGHT

    @property
    def media_type(self) -> str:
        return f"image/{self.format}"


class _Found(NamedTuple):
    """As it is stored."""

    width: int
    height: int
    orientation: int = UPRIGHT


def format_of(data: bytes) -> PictureFormat | None:
    """The format, by the first bytes of a file; None for other files."""
    if data.startswith(_PNG):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return "gif" if data[:6] in (b"GIF87a", b"GIF89a") else None


def read_header(data: bytes) -> PictureHeader:
    """Raises UnreadablePicture."""
    found_format = format_of(data)
    if found_format is None:
        raise UnreadablePicture("it is neither JPEG nor PNG nor WebP nor GIF")
    try:
        found = _READERS[found_format](data)
    except (struct.error, IndexError):
        found = None
    if found is None or found.width < 1 or found.height < 1:
        raise UnreadablePicture(f"its {found_format.upper()} header is damaged or cut off")
    width, height, orientation = found
    if swaps_sides(orientation):
        width, height = height, width
    return PictureHeader(found_format, width, height, orientation)


def num_jpeg_scans(data: bytes) -> int:
    """The scans of a JPEG, or more: what looks like a scan behind the first one counts. 0 for other files."""
    if format_of(data) != "jpeg":
        return 0
    start = 2
    with contextlib.suppress(struct.error, IndexError):
        for _, _, end in _jpeg_segments(data):
            start = end
    return data.count(b"\xff\xda", start)  # in the data of a scan, another byte follows 0xff


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


def _read_png(data: bytes) -> _Found | None:
    if data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    orientation = UPRIGHT
    at = 8
    for _ in range(_MAX_SEGMENTS):
        if at + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"eXIf":
            orientation = read_orientation(data[at + 8 : at + 8 + length])
        at += 12 + length
    return _Found(width, height, orientation)


def _read_jpeg(data: bytes) -> _Found | None:
    size: tuple[int, int] | None = None
    orientation = UPRIGHT
    for marker, start, end in _jpeg_segments(data):
        if marker in _JPEG_SIZES and size is None:
            height, width = struct.unpack_from(">HH", data, start + 1)
            size = width, height
        elif marker == _JPEG_EXIF and data[start : start + 4] == b"Exif":
            orientation = read_orientation(data[start:end])
    return None if size is None else _Found(*size, orientation)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of the segments before the first scan."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        at = data.find(b"\xff", at)
        if at < 0:
            return
        while data[at] == 0xFF:  # fill bytes
            at += 1
        marker = data[at]
        at += 1
        if marker in (_JPEG_SCAN, _JPEG_END):
            return
        if marker in _JPEG_ALONE or marker == 0:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        yield marker, at + 2, at + length
        at += max(2, length)


def _read_gif(data: bytes) -> _Found | None:
    """The screen, or the first frame where that is larger."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    for _ in range(_MAX_SEGMENTS):
        kind = data[at]
        if kind == 0x2C:
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, at + 1)
            return _Found(max(width, left + frame_width), max(height, top + frame_height))
        if kind != 0x21:
            return None
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    return None


def _read_webp(data: bytes) -> _Found | None:
    found: _Found | None = None
    at = 12
    for _ in range(_MAX_SEGMENTS):
        if at + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        start = at + 8
        if kind == b"VP8X" and found is None:
            low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", data, start + 4)
            found = _Found(1 + low_width + (high_width << 16), 1 + low_height + (high_height << 16))
        elif kind == b"VP8L" and found is None:
            signature, bits = struct.unpack_from("<BI", data, start)
            if signature != 0x2F:
                return None
            found = _Found(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        elif kind == b"VP8 " and found is None:
            code, width, height = struct.unpack_from("<3sHH", data, start + 3)
            if code != b"\x9d\x01\x2a":
                return None
            found = _Found(width & 0x3FFF, height & 0x3FFF)
        elif kind == b"EXIF" and found is not None:
            found = found._replace(orientation=read_orientation(data[start : start + length]))
        at = start + length + (length & 1)
    return found


_READERS: dict[PictureFormat, Callable[[bytes], _Found | None]] = {
    "png": _read_png,
    "jpeg": _read_jpeg,
    "gif": _read_gif,
    "webp": _read_webp,
}
