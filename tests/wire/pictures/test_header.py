"""The header reader agrees with a decoder, and never fails with anything but its own error."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from cortex.wire.pictures.header import UnreadablePicture, read_header

from ...examples import MANY
from ...picture_files import animated, picture, png_of_size, saved

FILES = {
    "png": picture(31, 17),
    "png gray": picture(31, 17, mode="L", color=9),
    "png 16-bit": picture(31, 17, mode="I;16", color=30000),
    "png palette": picture(31, 17, mode="P", color=3),
    "png transparent": picture(31, 17, mode="RGBA", color=(1, 2, 3, 4)),
    "png turned": picture(31, 17, orientation=6),
    "png animated": animated("PNG", 31, 17),
    "jpeg": picture(31, 17, kind="JPEG"),
    "jpeg progressive": picture(31, 17, kind="JPEG", progressive=True),
    "jpeg cmyk": picture(31, 17, mode="CMYK", color=(9, 8, 7, 6), kind="JPEG"),
    **{f"jpeg orientation {number}": picture(31, 17, kind="JPEG", orientation=number) for number in range(1, 9)},
    "jpeg comment": picture(31, 17, kind="JPEG", comment=b"x" * 60_000),
    "gif": picture(31, 17, mode="P", color=3, kind="GIF"),
    "gif animated": animated("GIF", 31, 17),
    "webp lossy": picture(31, 17, kind="WEBP"),
    "webp lossless": picture(31, 17, kind="WEBP", lossless=True),
    "webp transparent": picture(31, 17, mode="RGBA", color=(1, 2, 3, 4), kind="WEBP"),
    "webp turned": picture(31, 17, kind="WEBP", orientation=8),
    "webp animated": animated("WEBP", 31, 17),
    "one pixel": picture(1, 1),
    "long": picture(1, 20_000),
}


@pytest.mark.parametrize("name", FILES)
def test_size_is_that_of_the_upright_picture(name: str) -> None:
    file = FILES[name]
    header = read_header(file)
    decoded = Image.open(io.BytesIO(file))
    assert decoded.format is not None
    assert header.format == decoded.format.lower()
    assert (header.width, header.height) == ImageOps.exif_transpose(decoded).size
    assert header.orientation == decoded.getexif().get(0x0112, 1)


def test_frame_that_is_larger_than_the_screen_counts() -> None:
    file = bytearray(saved(Image.new("P", (31, 17), 3), "GIF"))
    file[6:10] = b"\x05\0\x05\0"
    assert read_header(bytes(file))[1:3] == Image.open(io.BytesIO(file)).size == (31, 17)


def test_size_of_a_decompression_bomb_is_known_before_it_is_decoded() -> None:
    assert read_header(png_of_size(60_000, 60_000))[1:3] == (60_000, 60_000)


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (b"", "neither JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "neither JPEG"),
        (b"%PDF-1.7", "neither JPEG"),
        (picture(4, 4, kind="BMP"), "neither JPEG"),
        (picture(4, 4)[:20], "PNG header is damaged"),
        (picture(4, 4, kind="JPEG")[:30], "JPEG header is damaged"),
        (picture(4, 4, kind="GIF", mode="L", color=1)[:9], "GIF header is damaged"),
        (picture(4, 4, kind="WEBP")[:20], "WEBP header is damaged"),
        (png_of_size(0, 4), "PNG header is damaged"),
    ],
)
def test_reports_what_is_no_picture(file: bytes, problem: str) -> None:
    with pytest.raises(UnreadablePicture, match=problem):
        read_header(file)


@MANY
@given(st.sampled_from(sorted(FILES)), st.integers(0, 400), st.binary(max_size=6), st.integers(4, 500))
def test_damaged_file_is_read_or_rejected(name: str, at: int, noise: bytes, kept: int) -> None:
    file = FILES[name]
    damaged = file[:at] + noise + file[at + len(noise) :]
    for each in (damaged, damaged[:kept]):
        try:
            header = read_header(each)
        except UnreadablePicture:
            continue
        assert header.width >= 1
        assert header.height >= 1
