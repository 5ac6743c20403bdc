"""From the file of a picture to an upright RGB picture. Blocks, and may take any time and memory: it is not trusted."""

from __future__ import annotations

import io
from typing import Final

import numpy as np
from PIL import Image

from cortex.wire.pictures.header import UnreadablePicture, read_header
from cortex.wire.pictures.orientation import swaps_sides

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
