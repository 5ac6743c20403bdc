from __future__ import annotations

import pytest

from cortex.parsing.pictures import has_any


@pytest.mark.parametrize(
    ("text", "marks", "expected"),
    [
        (b"a body", (b"x", b"bod"), True),
        (b"a body", (b"a", b"x"), True),
        (b"a body", (b"Body", b"bodyy"), False),
        (b"", (b"a",), False),
        (b"a body", (), False),
    ],
)
def test_finds_any_of_the_marks(text: bytes, marks: tuple[bytes, ...], expected: bool) -> None:
    assert has_any(text, marks) is expected
