"""Only our own framing is recognised."""

from __future__ import annotations

import random

import pytest

from cortex.http.chunks import LAST, SIZE_LINES, ends_with_chunk, frame, payload

LONGEST_BYTES = 4089
"""The longest data of a recognised chunk: with its framing it is 4 KiB long."""


def is_chunk(wire: bytes) -> bool:
    return len(wire) < len(SIZE_LINES) and wire.startswith(SIZE_LINES[len(wire)]) and wire.endswith(b"\r\n")


def test_recognises_its_own_framing_at_every_length() -> None:
    for num_bytes in range(1, LONGEST_BYTES + 1):
        data = bytes(num_bytes)
        assert is_chunk(frame(data))
        assert payload(frame(data)) == data
        assert ends_with_chunk(b"before" + frame(data), data)
    assert not is_chunk(frame(bytes(LONGEST_BYTES + 1)))
    assert not is_chunk(frame(bytes(100_000)))
    assert not ends_with_chunk(frame(bytes(100_000)), bytes(100_000))


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        LAST,
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\r\n5\r\nhello\r\n",
        b"5\r\nhello",
        b"5\r\nhello\r",
        b"5\r\nhello\n\r",
        b"\r\nhello\r\n",
        b"05\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"5;a=b\r\nhello\r\n",
        b"5\nhello\r\n",
        b"4\r\nhello\r\n",
        b"6\r\nhello\r\n",
        b"A\r\nhellohello\r\n",
        b"a\r\nhellohello\r\nx",
    ],
)
def test_does_not_recognise_other_framing(wire: bytes) -> None:
    assert not is_chunk(wire)


def test_recognises_only_what_reframing_reproduces() -> None:
    chance = random.Random(7)
    for _ in range(20_000):
        wire = bytes(chance.choices(b"0123456789abAB\r\n\r\n;x", k=chance.randrange(40)))
        if is_chunk(wire):
            assert frame(payload(wire)) == wire
