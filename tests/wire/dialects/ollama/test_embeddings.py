"""Ollama's embeddings in terms of those of OpenAI."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.ollama import embeddings
from cortex.wire.errors import InvalidValue, UpstreamInterrupted
from cortex.wire.pooling.parse import parse_embeddings


@pytest.mark.parametrize(
    ("fields", "truncate_to"),
    [
        ({"input": ["a"], "truncate": True}, -1),
        ({"input": ["a"], "truncate": False}, None),
        ({"input": ["a"]}, -1),
        ({"prompt": "a"}, None),  # Ollama rejects it, too
        ({"prompt": "a", "truncate": True}, -1),
    ],
)
def test_texts_are_truncated_unless_the_client_says_otherwise(fields: dict[str, Any], truncate_to: int | None) -> None:
    request = parse_embeddings(embeddings.embed_request(None, msgspec.json.encode({"model": "e", **fields})))
    assert (request.truncate_to, request.texts) == (truncate_to, ("a",))


@pytest.mark.parametrize("fields", [{}, {"input": ""}, {"input": []}, {"prompt": ""}, {"input": None}])
def test_request_without_a_text_loads_the_model(fields: dict[str, Any]) -> None:
    request = parse_embeddings(embeddings.embed_request(None, msgspec.json.encode({"model": "e", **fields})))
    assert (request.loads_only, request.texts) == (True, ())
    empty = b'{"object": "list", "data": [], "model": "e"}'
    written, _ = embeddings.response_body(empty, embeddings.PATH, load_s=0.0, total_s=0.0)
    assert msgspec.json.decode(written)["embeddings"] == []
    assert embeddings.response_body(empty, embeddings.OLD_PATH, load_s=0.0, total_s=0.0)[0] == b'{"embedding":[]}'


def test_truncate_is_a_flag() -> None:
    with pytest.raises(InvalidValue, match="truncate"):
        embeddings.embed_request(None, b'{"model": "e", "input": "a", "truncate": 8}')


def test_vectors_are_passed_on_as_they_were_written() -> None:
    body = b'{"data": [{"index": 1, "embedding": [1e-3, 2]}, {"index": 0, "embedding": [0.50, -3]}], "model": "e"}'
    written, _ = embeddings.response_body(body, embeddings.PATH, load_s=0.0, total_s=0.0)
    assert b'"embeddings":[[0.50, -3],[1e-3, 2]]' in written
    assert (
        embeddings.response_body(body, embeddings.OLD_PATH, load_s=0.0, total_s=0.0)[0] == b'{"embedding":[0.50, -3]}'
    )
    with pytest.raises(UpstreamInterrupted, match="no array"):
        embeddings.response_body(b'{"data": [{"embedding": "AAAA"}]}', embeddings.PATH, load_s=0.0, total_s=0.0)
