"""Files of pictures for tests."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image

ORIENTATION_TAG = 0x0112


def picture(
    width: int = 64,
    height: int = 48,
    *,
    color: Any = (200, 30, 30),
    mode: str = "RGB",
    kind: str = "PNG",
    orientation: int | None = None,
    **options: Any,
) -> bytes:
    """A file in one color."""
    return saved(Image.new(mode, (width, height), color), kind, orientation, **options)


def saved(image: Image.Image, kind: str = "PNG", orientation: int | None = None, **options: Any) -> bytes:
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION_TAG] = orientation
        options["exif"] = exif.tobytes()
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def animated(kind: str, width: int = 64, height: int = 48) -> bytes:
    """A red frame, then a green one."""
    frames = [Image.new("RGB", (width, height), color) for color in ((200, 30, 30), (30, 200, 30))]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)


def png_of_size(width: int, height: int) -> bytes:
    """A small file whose header promises a large picture, as decompression bombs do."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(3 * 1000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def with_scans(jpeg: bytes, num_scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated until there are `num_scans`: each takes the time of a decoding."""
    last = jpeg.rindex(b"\xff\xda")
    scan = jpeg[last:-2]
    return jpeg[:-2] + scan * (num_scans - jpeg.count(b"\xff\xda")) + jpeg[-2:]


def base64_of(file: bytes) -> str:
    return base64.b64encode(file).decode()


def data_url(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64_of(file)}"
