"""Bodies of embeddings and scores are read, and responses have the shape of their route."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import msgspec
import pytest

from cortex.wire.errors import InvalidValue, MissingModel
from cortex.wire.pooling.parse import MAX_TEXTS, ROUTES, names_model, only_model, with_model
from cortex.wire.pooling.request import PoolingRequest
from cortex.wire.pooling.response import embeddings_body, scores_body

PATHS = {"embeddings": "/v1/embeddings", "embed": "/embed", "rerank": "/v1/rerank", "score": "/score"}
BODIES: dict[str, dict[str, Any]] = {
    "embeddings": {"input": "hello"},
    "embed": {"inputs": "hello"},
    "rerank": {"query": "q", "documents": ["hello"]},
    "score": {"text_1": "q", "text_2": ["hello"]},
}


def parse(name: str, *parts: dict[str, Any]) -> PoolingRequest:
    body = {"model": "m", **BODIES[name]}
    for part in parts:
        body |= part
    return ROUTES[PATHS[name]](json.dumps(body).encode())


@pytest.mark.parametrize(
    ("given", "texts", "tokens"),
    [
        ("a", ("a",), ()),
        (["a", "b"], ("a", "b"), ()),
        ([1, 2, 3], (), ((1, 2, 3),)),
        ([[1, 2], [3]], (), ((1, 2), (3,))),
    ],
)
def test_input_is_texts_or_tokens(given: Any, texts: tuple[str, ...], tokens: tuple[tuple[int, ...], ...]) -> None:
    request = parse("embeddings", {"input": given})
    assert (request.texts, request.tokens) == (texts, tokens)


@pytest.mark.parametrize(
    ("name", "changes", "param"),
    [
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": [[]]}, "input"),
        ("embeddings", {"input": ["a", 1]}, "input"),
        ("embeddings", {"input": [-1]}, "input"),
        ("embeddings", {"input": ["a"] * (MAX_TEXTS + 1)}, "input"),
        ("embeddings", {"input": {"a": 1}}, "input"),
        ("embeddings", {"dimensions": 0}, "dimensions"),
        ("embeddings", {"encoding_format": "int8"}, "encoding_format"),
        ("embeddings", {"input_type": "sonnet"}, "input_type"),
        ("embed", {"inputs": [1, 2]}, "inputs"),
        ("rerank", {"documents": []}, "documents"),
        ("rerank", {"documents": [{"title": "x"}]}, "documents"),
        ("rerank", {"query": None}, "query"),
        ("rerank", {"top_n": 0}, "top_n"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("score", {"text_2": None}, "text_2"),
        ("score", {"text_1": None, "text_2": None, "queries": "a"}, "documents"),
        ("score", {"text_1": None, "text_2": None, "documents": "a"}, "queries"),
        ("score", {"text_1": None, "text_2": None}, "text_1"),
    ],
)
def test_invalid_value_is_named(name: str, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse(name, changes)
    assert caught.value.param == param


@pytest.mark.parametrize("name", BODIES)
def test_body_without_a_model_is_rejected(name: str) -> None:
    with pytest.raises(MissingModel):
        parse(name, {"model": None})


def test_vectors_are_written_as_numbers_or_as_base64() -> None:
    vectors = struct.pack("<4f", 1.0, -2.5, 0.1, 3.0)
    whole = json.loads(b"".join(embeddings_body(PoolingRequest('a "b"', "openai"), vectors, 2, 7)))
    assert whole["model"] == 'a "b"'
    assert [each["index"] for each in whole["data"]] == [0, 1]
    assert whole["data"][0]["embedding"] == [1.0, -2.5]
    assert struct.pack("<f", whole["data"][1]["embedding"][0]) == vectors[8:12]
    assert whole["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    packed = json.loads(b"".join(embeddings_body(PoolingRequest("m", "openai", as_base64=True), vectors, 2, 7)))
    assert base64.b64decode(packed["data"][1]["embedding"]) == vectors[8:]
    assert json.loads(b"".join(embeddings_body(PoolingRequest("m", "tei_embed"), vectors, 2, 7)))[0] == [1.0, -2.5]


def test_rerank_keeps_the_order_of_equal_scores() -> None:
    request = PoolingRequest("m", "rerank", ("a", "b", "c"), top_n=2, returns_documents=True)
    found = msgspec.json.decode(scores_body(request, [0.5, 0.9, 0.5], 3, id="x", created=1))
    assert [(each["index"], each["document"]["text"]) for each in found["results"]] == [(1, "b"), (0, "a")]


@pytest.mark.parametrize(
    ("body", "with_one"),
    [
        (b'{"inputs": "a"}', b'{"model":"m","inputs": "a"}'),
        (b' { "inputs":"model" }', b'{"model":"m", "inputs":"model" }'),
        (b"{}", b'{"model":"m"}'),
        (b'{"inputs": "a", "model" : "x"}', None),
        (b'{"inputs": "a", "model" : null}', b'{"inputs": "a", "model":"m"}'),
        (rb'{"inputs": "\"model\": null"}', rb'{"model":"m","inputs": "\"model\": null"}'),
        (b'["a"]', b'["a"]'),
        (b"", b""),
    ],
)
def test_model_is_added_to_a_body_that_names_none(body: bytes, with_one: bytes | None) -> None:
    assert names_model(body) == (with_one is None)
    if with_one is not None:
        assert with_model(body, "m") == with_one


def test_only_model_for_a_task_need_not_be_named() -> None:
    assert only_model(["m", "m"], "embed") == "m"
    with pytest.raises(MissingModel, match="there are 2: a, b"):
        only_model(["b", "a"], "embed")
    with pytest.raises(MissingModel, match=r"one rerank model .* there is none"):
        only_model([], "score")
