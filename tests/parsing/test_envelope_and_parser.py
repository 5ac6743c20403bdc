"""Gateway and parser agree on every request: the envelope of a body says what the parser of its dialect takes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.parsing import envelope
from cortex.wire.dialects.openai_responses.fields import OF_GATEWAYS
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import CortexError
from cortex.wire.fields.tables.table import FieldTable
from cortex.wire.model_names import plain_name
from cortex.wire.pictures.files import take_files

from ..examples import MANY
from ..picture_files import base64_of, data_url, picture

FILE = picture(600, 300)
SAID = [{"role": "user", "content": "hello"}]
LEAST: dict[str, dict[str, Any]] = {
    name: {field: SAID if field == "messages" else "hello" for field in codec.conversation if field != "system"}
    for name, codec in DIALECTS.items()
}
"""The fields that a body must have."""
STORED = frozenset(OF_GATEWAYS)
"""What a gateway honours and takes out before a node gets the body."""
ODD: list[Any] = [None, True, False, -2, -1, 0, 1, 2, 20.0, 2.5, 2**31, 2**53 - 1, 2**53, "", "5", "0s", "5m", [], {}]
ODD += [["a", "b"], [[1], [2, 3]], [1, 2], [["a"]], [{}], {"num_predict": 20}, {"type": "enabled", "budget_tokens": 99}]


def examples(table: FieldTable) -> dict[str, list[Any]]:
    """Values of each field, those of fields of objects within objects."""
    found: dict[str, list[Any]] = {}
    for one in table:
        holder, dot, name = one.name.partition(".")
        values = found.setdefault(holder, [*ODD])
        values += [{name: value} for value in (one.example, *ODD[:12])] if dot else [one.example]
    return found


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    dialect = draw(st.sampled_from(sorted(DIALECTS)))
    table, least = DIALECTS[dialect].fields, LEAST[dialect]
    values = examples(table)
    named = st.sampled_from(sorted(values))
    names = draw(st.lists(named, max_size=4, unique=True))
    other = draw(st.sampled_from(["max_new_tokens", "Max_Tokens", "best_of", "num_predict", "x"]))
    fields = {name: draw(st.sampled_from(values[name])) for name in names}
    return dialect, {"model": "m:latest", **least, **fields, other: 7}


def check(dialect: str, body: dict[str, Any]) -> None:
    """Both read the same, or the parser rejects the body. The gateway rejects nothing that the parser takes."""
    sent = msgspec.json.encode({name: value for name, value in body.items() if name not in STORED})
    try:
        request = DIALECTS[dialect].parse(sent)
    except CortexError:
        return
    summary = envelope.read(sent, dialect).summary
    model = plain_name(summary.model) if dialect.startswith("ollama") else summary.model
    assert model == request.model
    assert summary.stream == request.stream
    assert summary.completion_limit == request.sampling.max_tokens
    assert summary.num_choices == request.num_choices
    assert summary.loads_only == request.loads_only
    assert summary.unloads == (request.keep_alive_s == 0)


@MANY
@given(requests())
def test_envelope_and_parser_agree(drawn: tuple[str, dict[str, Any]]) -> None:
    check(*drawn)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_envelope_and_parser_agree_on_every_field_alone(dialect: str) -> None:
    table, least = DIALECTS[dialect].fields, LEAST[dialect]
    num_checked = 0
    for name, values in examples(table).items():
        context = table.get(name)
        for value in values:
            check(dialect, {"model": "m", **least, **(dict(context.context) if context else {}), name: value})
            num_checked += 1
    assert num_checked > 200


def test_limits_of_a_chat_are_those_of_its_parser() -> None:
    def limit(**fields: Any) -> int | None:
        return envelope.read(msgspec.json.encode({"model": "m", **fields}), "openai_chat").summary.completion_limit

    assert limit(n_predict=20) == 20
    assert limit(n_predict=-1) is None
    assert limit(max_tokens=5, n_predict=20) == 5
    assert limit(max_tokens=9, max_completion_tokens=5) == 5


PICTURE = {"type": "image_url", "image_url": {"url": data_url(FILE)}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(FILE)}}
PARTS: list[Any] = [
    {"type": "text", "text": data_url(FILE)},
    {"type": "text", "text": "x", "image_url": PICTURE["image_url"], "source": BLOCK["source"], "content": [PICTURE]},
    PICTURE,
    {"type": "input_image", "image_url": data_url(FILE)},
    {"type": "input_text", "text": "x"},
    BLOCK,
    {"type": "tool_result", "tool_use_id": "1", "content": [BLOCK, {"type": "text", "text": "x"}]},
    {"type": "tool_result", "tool_use_id": "1", "content": base64_of(FILE)},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"type": "image", "data": base64_of(FILE)}},
    {"type": "document", "source": {"type": "content", "content": [BLOCK]}},
    {"type": "document", "source": {"type": "text", "data": base64_of(FILE)}},
    {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "x"}, BLOCK]},
]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    dialect = draw(st.sampled_from(sorted(DIALECTS)))
    some_parts = st.lists(st.sampled_from(PARTS), max_size=3)
    kinds = st.sampled_from([None, "message", "function_call_output", "reasoning"])
    turns: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        role = draw(st.sampled_from(["user", "assistant", "system", "tool", "developer"]))
        turn: dict[str, Any] = {"role": role, "content": draw(some_parts | st.just("x")), "call_id": "1"}
        if (kind := draw(kinds)) is not None:
            turn["type"] = kind
        if draw(st.booleans()):
            turn["output"] = draw(some_parts | st.just({"content": [PICTURE]}))
        turn["images"] = draw(st.lists(st.sampled_from([base64_of(FILE), data_url(FILE)]), max_size=2))
        turns.append(turn)
    name = "input" if dialect in ("openai_responses", "openai_compaction") else "messages"
    body: dict[str, Any] = {"model": "m", name: turns, "metadata": {"a": data_url(FILE)}}
    if dialect == "ollama_generate":
        body |= {"prompt": base64_of(FILE), "images": turns[0]["images"]}
    return dialect, body


@MANY
@given(conversations())
def test_pictures_are_counted_where_the_parser_finds_them(drawn: tuple[str, dict[str, Any]]) -> None:
    dialect, body = drawn
    encoded = json.dumps(body).encode()
    try:
        request, files = take_files(DIALECTS[dialect].parse(encoded))
    except CortexError:
        return
    summary = envelope.read(encoded, dialect).summary
    assert summary.has_pictures == bool(files)
    assert summary.picture_bytes == sum(len(base64_of(file)) for file in files)
    assert summary.picture_tokens == 256 * len(request.pictures)
