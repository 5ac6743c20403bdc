"""From the texts of a request to those that a model pools."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.neuron.api.inference.pooling import (
    INSTRUCTION,
    MAX_CHARACTERS,
    check_lengths,
    engine_texts,
    texts_to_encode,
)
from cortex.neuron.engine.request import PooledTexts
from cortex.neuron.models.pooling.config import NormalizeStep, PoolingConfig
from cortex.wire.errors import ContextLengthExceeded, InvalidValue
from cortex.wire.pooling.request import PoolingRequest

PROMPTS = {"query": "q: ", "passage": "p: ", "fact": "f: "}
STEPS = (NormalizeStep(),)
EMBEDDER = PoolingConfig("embed", ("mean",), STEPS, prompts=PROMPTS, default_prompt="fact", dimensions=(4,))
PAIRS = PoolingConfig("score", ("cls",))
TEMPLATE = PoolingConfig("score", ("last",), template="<{instruction}|{query}|{document}>")


def embedding(**changes: object) -> PoolingRequest:
    return PoolingRequest("m", "openai", ("one", "two"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, "f: one"),
        ({"purpose": "query"}, "q: one"),
        ({"purpose": "document"}, "p: one"),
        ({"prompt_name": "query"}, "q: one"),
    ],
)
def test_prompt_of_the_purpose_precedes_each_text(changes: dict[str, object], first: str) -> None:
    encode = texts_to_encode(embedding(**changes), EMBEDDER, 16)
    assert encode is not None
    assert encode.texts[0] == first


@pytest.mark.parametrize(("asked", "limit"), [(None, None), (-1, 16), (8, 8), (99, 16)])
def test_texts_are_cut_off_only_if_the_request_says_so(asked: int | None, limit: int | None) -> None:
    encode = texts_to_encode(embedding(truncate_to=asked), EMBEDDER, 16)
    assert encode is not None
    assert encode.max_tokens == limit


def test_template_is_filled_without_reading_the_texts_as_one() -> None:
    request = PoolingRequest("m", "rerank", ("{query}", "d"), queries=("{document}",))
    encode = texts_to_encode(request, TEMPLATE, 16)
    assert encode is not None
    assert encode.texts == (f"<{INSTRUCTION}|{{document}}|{{query}}>", f"<{INSTRUCTION}|{{document}}|d>")
    spans = [[text[slice(*span)] for span in each] for text, each in zip(encode.texts, encode.literal, strict=True)]
    assert spans == [[INSTRUCTION, "{document}", "{query}"], [INSTRUCTION, "{document}", "d"]]


@pytest.mark.parametrize("pooling", [TEMPLATE, PAIRS])
@pytest.mark.parametrize(("shape", "field"), [("rerank", "query"), ("score", "text_1"), ("score", "queries")])
def test_shared_query_counts_once_for_each_document(pooling: PoolingConfig, shape: Any, field: str) -> None:
    query = "q" * (MAX_CHARACTERS // 4096)
    fits = PoolingRequest("m", shape, texts=("d",) * 64, queries=(query,), queries_field=field)
    assert texts_to_encode(fits, pooling, 16) is not None
    with pytest.raises(InvalidValue, match="4096 documents") as raised:
        texts_to_encode(msgspec.structs.replace(fits, texts=("d",) * 4096), pooling, 16)
    assert raised.value.param == field


def test_tokens_of_the_client_are_not_tokenised_again() -> None:
    request = PoolingRequest("m", "openai", tokens=((1, 2), (3,)))
    assert texts_to_encode(request, EMBEDDER, 16) is None
    texts = engine_texts(request, EMBEDDER, None, 8)
    assert (texts.lengths, len(texts.ids)) == ((2, 1), 12)


def test_vectors_are_cut_to_lengths_that_the_model_knows() -> None:
    plain = PooledTexts(b"", (1,))
    assert engine_texts(embedding(dimensions=4), EMBEDDER, plain, 8).normalize
    assert not engine_texts(embedding(), EMBEDDER, plain, 8).normalize
    for dimensions in (3, 9):
        with pytest.raises(InvalidValue, match="one of 4"):
            engine_texts(embedding(dimensions=dimensions), EMBEDDER, plain, 8)


def test_lengths_are_limited() -> None:
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 16 tokens") as caught:
        check_lengths(PooledTexts(b"", (4, 17)), 16, 8, "documents")
    assert caught.value.param == "documents"
    with pytest.raises(InvalidValue, match="no tokens"):
        check_lengths(PooledTexts(b"", (4, 0)), 16, 8)
    with pytest.raises(InvalidValue, match="several requests"):
        check_lengths(PooledTexts(b"", (4,) * 4096), 16, 4096)
