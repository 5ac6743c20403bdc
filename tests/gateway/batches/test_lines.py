"""What is read of the lines of a batch."""

from __future__ import annotations

import io
import json

import pytest

from cortex.gateway.batches import lines
from cortex.gateway.batches.lines import InvalidLine
from cortex.wire.fields.body import MAX_MODEL_NAME

from .conftest import CHAT, jsonl, line


@pytest.mark.parametrize(
    "wrong", [line(0, model="m" * (MAX_MODEL_NAME + 1)), line(0) | {"custom_id": "i" * (lines.MAX_CUSTOM_ID + 1)}]
)
def test_a_name_beyond_its_limit_is_invalid_and_not_kept(wrong: dict[str, object]) -> None:
    [read] = lines.read(io.BytesIO(jsonl([wrong])), CHAT, 10)

    assert isinstance(read, InvalidLine)
    assert len(json.dumps(read)) < 400
