"""Every kind of file becomes an upright RGB picture, or is rejected with a text that says nothing of the library."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cortex.neuron.picture_process.decoding import decode
from cortex.wire.pictures.header import UnreadablePicture, read_header

from ...examples import MANY
from ...picture_files import animated, picture, saved

RED, WHITE = (200, 30, 30), (255, 255, 255)


def transparent_palette() -> bytes:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([*RED, 0, 0, 255])
    return saved(image, "PNG", transparency=0)


@pytest.mark.parametrize(
    ("file", "color"),
    [
        (picture(8, 8), RED),
        (picture(8, 8, kind="JPEG", quality=95), RED),
        (picture(8, 8, kind="WEBP", lossless=True), RED),
        (picture(1, 1), RED),
        (picture(8, 8, mode="L", color=77), (77, 77, 77)),
        (picture(8, 8, mode="1", color=1), WHITE),
        (picture(8, 8, mode="I;16", color=0x4D00), (77, 77, 77)),
        (picture(8, 8, mode="CMYK", color=(0, 0, 0, 0), kind="JPEG", quality=95), WHITE),
        (picture(8, 8, mode="RGBA", color=(*RED, 255)), RED),
        (picture(8, 8, mode="RGBA", color=(0, 0, 0, 0)), WHITE),
        (picture(8, 8, mode="RGBA", color=(0, 0, 0, 128)), (127, 127, 127)),
        (picture(8, 8, mode="LA", color=(0, 0)), WHITE),
        (picture(8, 8, mode="RGBA", color=(0, 0, 0, 0), kind="WEBP", lossless=True), WHITE),
        (transparent_palette(), WHITE),
        (animated("GIF", 8, 8), RED),
        (animated("PNG", 8, 8), RED),
        (animated("WEBP", 8, 8), RED),
    ],
)
def test_color_of_every_kind_of_file(file: bytes, color: tuple[int, int, int]) -> None:
    image = decode(file)
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image, dtype=int) - color).max() <= 6  # lossy formats


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_picture_is_upright_in_every_orientation(kind: str, orientation: int) -> None:
    upright = Image.new("RGB", (32, 16), (0, 0, 0))
    upright.paste((255, 255, 255), (0, 0, 8, 8))  # at the top left
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the inverse of each orientation
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(turns[orientation]))
    options = {} if kind == "PNG" else {"quality": 95}
    file = saved(stored, kind, orientation, **options)
    assert read_header(file)[1:3] == (32, 16)
    pixels = np.asarray(decode(file).convert("L"), dtype=int)
    assert pixels.shape == (16, 32)
    assert pixels[:6, :6].min() > 200
    assert pixels[10:, :].max() < 60
    assert pixels[:, 12:].max() < 60


def noise(kind: str) -> bytes:
    values = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    return saved(Image.fromarray(values), kind)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_file_that_is_cut_off_is_rejected(kind: str) -> None:
    file = noise(kind)
    with pytest.raises(UnreadablePicture, match=r"damaged or cut off$"):
        decode(file[: len(file) * 2 // 3])


def test_other_formats_are_not_opened() -> None:
    for kind in ("BMP", "TIFF", "PPM"):
        with pytest.raises(UnreadablePicture, match="neither JPEG"):
            decode(picture(4, 4, kind=kind))


@MANY
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]), st.integers(0, 4000), st.binary(min_size=1, max_size=8))
def test_damaged_file_is_decoded_or_rejected(kind: str, at: int, damage: bytes) -> None:
    file = noise(kind)
    try:
        image = decode(file[:at] + damage + file[at + len(damage) :])
    except UnreadablePicture:
        return
    assert image.mode == "RGB"
