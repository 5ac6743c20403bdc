"""Every entry of the field tables is true: the parsers do with its example what the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.page import POOLING_TABLES, TABLES, fields_page
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import CortexError, InvalidValue
from cortex.wire.fields.tables.table import BodyField, Treatment
from cortex.wire.pooling.parse import ROUTES
from cortex.wire.pooling.request import PoolingRequest
from cortex.wire.requests import GenerateRequest

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO},
    "completions": {"prompt": "hello"},
    "responses": {"input": "hello"},
    "messages": {"messages": HELLO, "max_tokens": 5},
    "api/chat": {"messages": HELLO},
    "api/generate": {"prompt": "hello"},
    "infill": {"input_prefix": "hello"},
    "embeddings": {"input": "hello"},
    "embed": {"inputs": "hello"},
    "rerank": {"query": "q", "documents": ["hello"]},
    "score": {"text_1": "q", "text_2": ["hello"]},
}
NAMES = {
    "chat": "openai_chat",
    "completions": "openai_completions",
    "responses": "openai_responses",
    "messages": "anthropic_messages",
    "api/chat": "ollama_chat",
    "api/generate": "ollama_generate",
    "infill": "llama_cpp_infill",
}
POOLING_PATHS = {"embeddings": "/v1/embeddings", "embed": "/embed", "rerank": "/v1/rerank", "score": "/score"}
PAGE = Path(__file__).parents[3] / "docs" / "fields.md"


def entries(treatment: Treatment) -> list[Any]:
    return [
        pytest.param(dialect, one, id=f"{dialect}-{one.name}")
        for dialect, table in (*TABLES.items(), *POOLING_TABLES.items())
        for one in table
        if one.treatment is treatment
    ]


def parse(dialect: str, *parts: dict[str, Any]) -> GenerateRequest | PoolingRequest:
    body = {"model": "m", **BODIES[dialect]}
    for part in parts:
        body |= part
    encoded = msgspec.json.encode(body)
    if dialect in POOLING_PATHS:
        return ROUTES[POOLING_PATHS[dialect]](encoded)
    return DIALECTS[NAMES[dialect]].parse(encoded)


def example(one: BodyField, value: Any) -> dict[str, Any]:
    holder, dot, name = one.name.partition(".")
    return {holder: {name: value}} if dot else {holder: value}


@pytest.mark.parametrize(("dialect", "one"), entries(Treatment.HONOURED))
def test_honoured_field_changes_the_request(dialect: str, one: BodyField) -> None:
    given = parse(dialect, dict(one.context), example(one, one.example))
    is_complete = problem(dialect, dict(one.context)) is None  # otherwise the field replaces one that is required
    assert not is_complete or given != parse(dialect, dict(one.context))
    assert given.ignored_fields == ()
    assert not isinstance(given, GenerateRequest) or given.dropped_tools == ()


@pytest.mark.parametrize(("dialect", "one"), entries(Treatment.TOLERATED))
def test_tolerated_field_changes_nothing_but_what_is_repeated(dialect: str, one: BodyField) -> None:
    given = parse(dialect, dict(one.context), example(one, one.example))
    if isinstance(given, GenerateRequest):
        given = msgspec.structs.replace(given, metadata={})
    assert given == parse(dialect, dict(one.context))


@pytest.mark.parametrize(("dialect", "one"), entries(Treatment.REJECTED))
def test_rejected_field_is_named_unless_it_asks_for_nothing(dialect: str, one: BodyField) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse(dialect, example(one, one.example))
    assert caught.value.param == one.name
    for harmless in (None, *one.harmless):
        assert parse(dialect, example(one, harmless)) == parse(dialect)


@pytest.mark.parametrize("dialect", BODIES)
def test_unknown_field_is_listed(dialect: str) -> None:
    assert parse(dialect, {"frobnicate": 1}).ignored_fields == ("frobnicate",)


def test_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == fields_page(), "run `make docs`"


WRONG: tuple[Any, ...] = ([], {}, "x", "", 7, -7.5, True, [1], ["a"], [{"a": 1}], {"type": "nope"}, 10**30, [[{}]])


@pytest.mark.parametrize(
    ("dialect", "one"), [*entries(Treatment.HONOURED), *entries(Treatment.TOLERATED), *entries(Treatment.REJECTED)]
)
def test_error_names_the_field_that_is_wrong(dialect: str, one: BodyField) -> None:
    named = {
        str(value): error.param
        for value in (WRONG if one.name != "model" else ())
        if (error := problem(dialect, dict(one.context), example(one, value))) is not None
    }
    assert {value: param for value, param in named.items() if not str(param).startswith(one.name.split(".")[0])} == {}


def problem(dialect: str, *parts: dict[str, Any]) -> CortexError | None:
    try:
        parse(dialect, *parts)
    except CortexError as error:
        return error
    return None
