from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.wire.byte_search import has_any

FEW_BYTES = st.binary(max_size=12).map(lambda text: bytes(byte % 3 for byte in text))


@given(FEW_BYTES, st.lists(FEW_BYTES, max_size=4))
def test_finds_what_the_operator_finds(text: bytes, marks: list[bytes]) -> None:
    assert has_any(text, tuple(marks)) == any(mark in text for mark in marks)
