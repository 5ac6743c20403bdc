from __future__ import annotations

import pytest

from cortex.parsing.cost import (
    LARGE_BYTES,
    LARGE_RELAYED_BYTES,
    is_edited_elsewhere,
    is_parsed_elsewhere,
    is_read_elsewhere,
)

LINE = b'{"text":"x-anthropic-billing-header: a"},'


@pytest.mark.parametrize(
    ("body", "parsed", "edited", "read"),
    [
        (b"[]," * 2000, False, False, False),
        (b"x" * (LARGE_BYTES - 1), False, False, False),
        (b"x" * LARGE_BYTES, True, False, False),
        (b"x" * LARGE_RELAYED_BYTES, True, True, True),
        (b"[]," * 2048 + b"x" * 4000, False, False, False),
        (b"[]," * 2049 + b"x" * 4000, True, False, False),
        (b"1" * 9000 + b":" * 4096, False, False, False),
        (b"1" * 9000 + b":" * 4097, True, False, False),
        (b"{}," * 3000, True, False, False),
        (b'"",' * 5000, True, False, False),
        (b"151643," * 18_000, False, False, False),
        (b"1," * 65_000, False, False, False),
        (b'{"prompt":[' + b"1," * 65_000 + b"]", False, False, False),
        (b"[]," * 20_000, True, True, False),
        (LINE + b"[]," * 20_000, True, True, True),
        (LINE + b"x" * 10_000, False, False, False),
        (LINE * 300, False, False, True),
        (rb"\ud800" * 5000, True, False, True),
        (rb"\uD800" * 5000, True, False, True),
        (rb"\u00e9" * 5000, False, False, False),
    ],
)
def test_cost_grows_with_values_and_bytes(body: bytes, parsed: bool, edited: bool, read: bool) -> None:
    assert is_parsed_elsewhere(body) == parsed
    assert is_edited_elsewhere(body) == edited
    assert is_read_elsewhere(body, "anthropic_messages", strip_billing=True) == read


def test_conversation_with_pictures_and_many_values_is_read_elsewhere() -> None:
    turns = b'{"role":"user","content":"x"},' * 5000
    assert not is_read_elsewhere(turns, "openai_chat", strip_billing=False)
    assert is_read_elsewhere(turns + b'"data:image/png;base64,"', "openai_chat", strip_billing=False)
    assert not is_read_elsewhere(b'"data:image/png;base64,' + b"A" * 500_000 + b'"', "openai_chat", strip_billing=False)
