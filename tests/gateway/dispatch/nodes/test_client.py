"""Models of foreign servers."""

from typing import Any

import msgspec
import pytest

from cortex.gateway.dispatch.nodes.client import ForeignModel


@pytest.mark.parametrize(
    ("fields", "context_tokens"),
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
def test_reads_context_length_under_the_names_of_several_servers(
    fields: dict[str, Any], context_tokens: int | None
) -> None:
    model = msgspec.json.decode(msgspec.json.encode({"id": "m", **fields}), type=ForeignModel)
    assert model.context_tokens == context_tokens
