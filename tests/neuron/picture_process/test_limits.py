"""Each limit on pictures names the picture that exceeds it."""

from __future__ import annotations

import pytest

from cortex.neuron.picture_process.limits import PictureLimits
from cortex.wire.errors import InvalidValue
from cortex.wire.requests import PicturePart

LIMITS = PictureLimits(max_pictures=3, max_mb=2, max_megapixels=4, max_aspect=50)
SMALL = PicturePart(param="messages[0].content[0]", num_bytes=1000, width=64, height=64)


def image(width: int, height: int, num_bytes: int = 1000) -> PicturePart:
    return PicturePart(param="input[2].output[1]", num_bytes=num_bytes, width=width, height=height)


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ((image(64, 64, 2_000_001),), "2.0 MB"),
        ((image(2001, 2000),), "2001 × 2000 pixels, at most 4 million"),
        ((image(60_000, 60_000),), "at most 4 million"),
        ((image(1, 51),), "50 times as long"),
        ((image(20_000, 1),), "50 times as long"),
        ((SMALL, SMALL, image(64, 64)), "has 4 pictures, at most 3"),
    ],
)
def test_error_names_the_picture_and_the_setting(images: tuple[PicturePart, ...], problem: str) -> None:
    given = (SMALL, *images)
    with pytest.raises(InvalidValue, match=problem) as caught:
        LIMITS.check(given)
    assert caught.value.param == "input[2].output[1]"
    assert "pictures.m" in caught.value.message


def test_pictures_at_the_limits_pass() -> None:
    LIMITS.check((image(2000, 2000, 2_000_000), image(1, 50), image(1, 1)))


def test_pictures_can_be_forbidden() -> None:
    PictureLimits(max_pictures=0).check(())
    with pytest.raises(InvalidValue, match="at most 0"):
        PictureLimits(max_pictures=0).check((SMALL,))
