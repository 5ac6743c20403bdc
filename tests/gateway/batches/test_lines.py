"""What is read of the lines of a batch."""

from __future__ import annotations

import io
import json
import tracemalloc

import pytest

from cortex.gateway.batches import lines
from cortex.gateway.batches.lines import InvalidLine
from cortex.wire.dialects.anthropic_messages import batch
from cortex.wire.errors import InvalidValue, MalformedJSON
from cortex.wire.fields.body import MAX_MODEL_NAME

from .conftest import CHAT, jsonl, line


@pytest.mark.parametrize(
    "wrong", [line(0, model="m" * (MAX_MODEL_NAME + 1)), line(0) | {"custom_id": "i" * (lines.MAX_CUSTOM_ID + 1)}]
)
def test_a_name_beyond_its_limit_is_invalid_and_not_kept(wrong: dict[str, object]) -> None:
    [read] = lines.read(io.BytesIO(jsonl([wrong])), CHAT, 10)

    assert isinstance(read, InvalidLine)
    assert len(json.dumps(read)) < 400


@pytest.mark.parametrize("field", ["background", "previous_response_id", "conversation"])
@pytest.mark.parametrize("value", ["[{},{}]", '"x"', "1", "true", "null", "false", '""'])
def test_fields_of_state_are_rejected_where_they_are_used(field: str, value: str) -> None:
    body = f'{{"model": "m", "{field}": {value}}}'
    text = f'{{"custom_id": "a", "method": "POST", "url": "{CHAT}", "body": {body}}}\n'
    [read] = lines.read(io.BytesIO(text.encode()), CHAT, 10)
    assert isinstance(read, InvalidLine) == (value not in ("null", "false", '""')), read


def test_a_value_with_a_million_objects_takes_no_memory() -> None:
    head = f'{{"custom_id": "a", "method": "POST", "url": "{CHAT}", "body": {{"model": "m", "conversation": ['
    text = head.encode() + b",".join([b"{}"] * 300_000) + b"]}}\n"
    file = io.BytesIO(text)
    tracemalloc.start()
    try:
        [read] = lines.read(file, CHAT, 10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(read, InvalidLine)
    assert peak < 4 * len(text)


def test_a_batch_of_messages_is_divided_into_lines() -> None:
    body = b'{"requests": [{"custom_id": "a", "params": {"x": [1]}}, {"custom_id": "b", "params": 2}]}'
    text, num_lines = batch.parse_batch(10, body)
    assert (num_lines, json.loads(text.splitlines()[0])["body"]) == (2, {"x": [1]})
    for wrong in (body.replace(b'"b"', b'"a"'), body.replace(b'"b"', b'"b c"'), b'{"requests": []}', b"{", b"[]"):
        with pytest.raises((InvalidValue, MalformedJSON)):
            batch.parse_batch(10, wrong)
    with pytest.raises(InvalidValue, match="1 to 1 "):
        batch.parse_batch(1, body)


def test_lines_beyond_the_limit_of_models_are_invalid() -> None:
    names = [f"m{number}" for number in range(lines.MAX_MODELS + 1)] + ["m0"]
    text = jsonl(line(number, model=name) for number, name in enumerate(names))

    read = list(lines.read(io.BytesIO(text), CHAT, 100))

    assert [each.param for each in read if isinstance(each, InvalidLine)] == ["body.model"]
    assert isinstance(read[lines.MAX_MODELS], InvalidLine)
