"""What is read off nodes that are not ours."""

from typing import Any

import msgspec
import pytest

from cortex.gateway.dispatch.node_client import ForeignModel


@pytest.mark.parametrize(
    ("said", "context_tokens"),
    [
        ({}, None),
        ({"max_model_len": 32768}, 32768),
        ({"context_length": 4096, "owned_by": "x"}, 4096),
        ({"context_window": 131072, "max_model_len": None}, 131072),
        ({"context_length": "8k"}, None),
        ({"max_model_len": True}, None),
        ({"max_model_len": 0}, None),
    ],
)
def test_the_context_of_a_foreign_model_is_read_in_the_words_of_several_servers(
    said: dict[str, Any], context_tokens: int | None
) -> None:
    model = msgspec.json.decode(msgspec.json.encode({"id": "m", **said}), type=ForeignModel)
    assert model.context_tokens == context_tokens
