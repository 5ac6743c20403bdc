"""The free text of custom tools, as JSON arguments and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.wire.fields.custom_tools import InputDecoder, arguments_of, input_of

from ...examples import MANY


@MANY
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])), ascii_only=st.booleans(), cuts=st.lists(st.integers(0, 99))
)
def test_input_is_decoded_for_any_split_of_its_arguments(text: str, ascii_only: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    ends = sorted({min(cut, len(arguments)) for cut in cuts} | {len(arguments)})
    decoder = InputDecoder()
    pieces = [decoder.push(arguments[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    assert "".join(pieces) + decoder.finish() == text
    assert input_of(arguments_of(text)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ("{}", ""),
        *((cut, "") for cut in ("{", '{"', '{"inp', '{"input"', '{ "input" :', '{"input": ', '{"input": "')),
        ('{"input": "cut off', "cut off"),
        ('{"input": "cut \\ud83d', "cut "),
        ('{"input": "a \\ud83d b\\ude00"}', "a \ufffd b\ufffd"),
        ('{"input": "\\ud83d\\u0041\\ud83d\\n"}', "\ufffdA\ufffd\n"),
        ('{"input": "\\d+ \\u12 \\x"}', "\\d+ \\u12 \\x"),
        ('{"input": "a\\ud83d", "more": "b"}', "a\ufffd"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"path": "x"}', '{"path": "x"}'),
        ("not json", "not json"),
        ('{ "input" :\n"spaced"}', "spaced"),
    ],
)
def test_arguments_of_another_shape_are_not_lost(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
