"""The functions of the picture process: from the file of a picture to the pixels that a model takes.

They block, and may take any time and memory: files are not trusted. A worker that exceeds a limit, or that a file
crashes, is ended and replaced.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from cortex.neuron.pictures.picture import PictureGrid
from cortex.neuron.pictures.spec import PictureSpec, prepare
from cortex.wire.pictures.header import UnreadablePicture, read_header, swaps_sides
from cortex.wire.pictures.parts import invalid

_LOADED = (GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
"""Imported before the workers are forked, so that they start at once."""

_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By the orientation of EXIF."""
_WHITE: Final = (255, 255, 255, 255)

# The size was checked before, by limits of our own.
Image.MAX_IMAGE_PIXELS = None


def functions() -> dict[str, Callable[..., tuple[bytes, float]]]:
    return {"pixels": pixels}


def pixels(spec: PictureSpec, grid: PictureGrid, param: str, body: bytes) -> tuple[bytes, float]:
    """The pixels of the file `body` as `pictures.preparing.prepare` returns them, and the seconds that this computed.
    `param`: where the client has the picture. Raises InvalidValue."""
    began_s = time.thread_time()  # the time of a process with a limit on it advances in ticks of milliseconds
    try:
        prepared = prepare(spec, grid, decode(body)).tobytes()
    except UnreadablePicture as problem:
        raise invalid(param, f"the picture cannot be read: {problem}") from None
    return prepared, time.thread_time() - began_s


def decode(file: bytes) -> Image.Image:
    """The first frame, upright, in RGB; what is transparent shows a white ground, as the makers of the models do.
    Raises UnreadablePicture, and MemoryError."""
    header = read_header(file)
    stored = (header.height, header.width) if swaps_sides(header.orientation) else (header.width, header.height)
    try:
        with Image.open(io.BytesIO(file), formats=_FORMATS) as image:
            if image.size != stored:
                raise UnreadablePicture("its header contradicts its content")
            image.load()
            upright = _in_rgb(image)
    except (MemoryError, UnreadablePicture):
        raise
    except Exception:  # noqa: BLE001 - the library raises many kinds, whose texts say nothing to a client
        raise UnreadablePicture("it is damaged or cut off") from None
    turn = _TURNS.get(header.orientation)
    return upright if turn is None else upright.transpose(turn)


def _in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits of gray, which a plain conversion would cut off
        gray = np.clip(np.asarray(image), 0, 65535).astype(np.uint16) >> 8
        return Image.fromarray(gray.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, _WHITE)
        ground.alpha_composite(image.convert("RGBA"))
        return ground.convert("RGB")
    return image.convert("RGB")
