"""Bytes for people to read."""

from __future__ import annotations

import pytest

from cortex.formats.units import gib


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "?"), (0, "0.0 GiB"), (120 << 10, "120 KiB"), (452 << 20, "452 MiB"), (3 << 29, "1.5 GiB")],
)
def test_bytes_are_shown_in_the_largest_unit_of_which_there_is_one(num_bytes: int | None, text: str) -> None:
    assert gib(num_bytes) == text
