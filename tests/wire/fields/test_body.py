from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import CortexError, InvalidValue, MalformedJSON, MissingModel
from cortex.wire.fields.body import parse, without_lone_surrogates


@pytest.mark.parametrize(
    "body", [b"", b"nope", b"[]", b"3", b"\xff", b'{"a": NaN}', b'{"a": "\\ud800', b'{"a":"\xff"}', b"[" * 200_000]
)
def test_body_that_is_not_a_json_object_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedJSON):
        parse(body)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (rb"\ud83d", "�"),
        (rb"\uDC00 x", "� x"),
        (rb"\ud83d\n", "�\n"),
        (rb"\ud83dA", "�A"),
        (rb"\ud83d\ud83d\ude00", "�😀"),
        (rb"\ude00\ud83d", "��"),
        (rb"\\ud83d \ud83d", "\\ud83d �"),
        (rb"\\ud83d\ude00", "\\ud83d�"),
        (rb"\\\ud83d", "\\�"),
    ],
)
def test_replaces_lone_surrogates(written: bytes, expected: str) -> None:
    assert parse(b'{"a": "%s"}' % written).text("a") == expected


def test_body_without_lone_surrogates_stays_as_it_is() -> None:
    body = rb'{"a": "\\ud83d \ud83d\ude00 \u00e4 \\\\", "b": '
    assert without_lone_surrogates(body) == body


@pytest.mark.parametrize("body", [b"{}", b'{"model": ""}', b'{"model": null}'])
def test_missing_model_is_an_error_of_its_own(body: bytes) -> None:
    for dialect in DIALECTS.values():
        with pytest.raises(MissingModel) as caught:
            dialect.parse(body)
        assert caught.value.param == "model"


def test_error_of_a_wrong_type_names_its_path() -> None:
    (item,) = parse(b'{"a": [{"b": 3}]}').objects("a")
    with pytest.raises(InvalidValue, match=r"'a\[0\]\.b': expected a string, got an integer") as caught:
        item.text("b")
    assert caught.value.param == "a[0].b"


def test_rejects_bool_as_number_and_accepts_whole_float_as_integer() -> None:
    fields = parse(b'{"yes": true, "three": 3.0, "half": 0.5}')
    assert fields.integer("three", low=0, high=5) == 3
    for name in ("yes", "half"):
        with pytest.raises(InvalidValue):
            fields.integer(name, low=0, high=5)
    with pytest.raises(InvalidValue):
        fields.number("yes", low=0, high=5)


@pytest.mark.parametrize("number", ["9" * 50, "-" + "9" * 50, "9" * 400, "1e300"])
@pytest.mark.parametrize("field", ["temperature", "top_k", "repetition_window", "stop_token_ids", "logit_bias"])
def test_rejects_numbers_beyond_the_range_of_the_engine(field: str, number: str) -> None:
    value = {"stop_token_ids": f"[{number}]", "logit_bias": f'{{"{number}": 1}}'}.get(field, number)
    with pytest.raises(InvalidValue, match=field):
        DIALECTS["openai_completions"].parse(f'{{"model": "m", "prompt": "x", "{field}": {value}}}'.encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = [
    "model",
    "messages",
    "input",
    "prompt",
    "system",
    "tools",
    "tool_choice",
    "functions",
    "stop",
    "stop_sequences",
    "max_tokens",
    "n",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "response_format",
    "guided_json",
    "structured_outputs",
    "reasoning",
    "reasoning_effort",
    "chat_template_kwargs",
    "stream",
    "stream_options",
    "thinking",
    "metadata",
    "output_config",
    "text",
    "include",
    "instructions",
    "parallel_tool_calls",
    "seed",
    "stop_token_ids",
    "suffix",
    "user",
]
INNER_NAMES = [
    "role",
    "content",
    "type",
    "text",
    "name",
    "function",
    "arguments",
    "tool_calls",
    "image_url",
    "source",
    "tool_use_id",
    "id",
    "call_id",
    "output",
    "summary",
    "format",
    "schema",
    "effort",
    "mode",
    "allowed_tools",
    "parameters",
    "input_schema",
    "input",
    "budget_tokens",
]
OBJECTS = st.dictionaries(
    st.sampled_from(INNER_NAMES),
    JSON | st.sampled_from(["user", "assistant", "tool", "function", "image", "tool_use", "tool_result", "thinking"]),
    max_size=5,
)
BODIES = st.dictionaries(st.sampled_from(FIELD_NAMES), JSON | OBJECTS | st.lists(OBJECTS, max_size=3), max_size=12).map(
    lambda body: {"model": "m", **body}
)


@given(BODIES)
def test_arbitrary_body_gives_a_request_or_one_of_our_errors(body: dict[str, object]) -> None:
    try:
        encoded = msgspec.json.encode(body)
    except (UnicodeEncodeError, OverflowError):
        return
    for dialect in DIALECTS.values():
        try:
            dialect.parse(encoded)
        except CortexError as error:
            assert error.status == 400  # noqa: PT017


TURN = {"role": "user", "content": "x"}
FUNCTION = {"name": "f", "input_schema": {}, "type": "function", "function": {"name": "f"}}
COLLECTIONS = [
    ("openai_chat", "messages", [TURN]),
    ("openai_chat", "tools", [FUNCTION]),
    ("openai_chat", "guided_choice", ["a"]),
    ("openai_chat", "stop", ["a"]),
    ("openai_chat", "stop_token_ids", [1]),
    ("openai_chat", "messages[0].content", [{"type": "text", "text": "x"}]),
    ("openai_chat", "messages[0].tool_calls", [{"id": "c", "function": {"name": "f"}}]),
    ("openai_completions", "prompt", ["a"]),
    ("openai_completions", "stop", ["a"]),
    ("openai_responses", "input", [TURN]),
    ("openai_responses", "tools", [FUNCTION]),
    ("anthropic_messages", "messages", [TURN]),
    ("anthropic_messages", "messages[0].content", [{"type": "text", "text": "x"}]),
    ("anthropic_messages", "system", [{"type": "text", "text": "x"}]),
    ("anthropic_messages", "stop_sequences", ["a"]),
    ("anthropic_messages", "tools", [FUNCTION]),
]


@pytest.mark.parametrize(("dialect", "field", "item"), COLLECTIONS, ids=lambda value: value if value else None)
def test_rejects_collections_beyond_their_limit_by_name(dialect: str, field: str, item: list[object]) -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": "x"}
    body: dict[str, Any] = {"model": "m", "messages": [turn], "input": "x", "max_tokens": 9}
    if dialect == "openai_completions":
        body["prompt"] = "x"
    holder = turn if "." in field else body
    holder[field.rpartition(".")[2]] = item * 20_000
    with pytest.raises(InvalidValue, match="at most") as rejected:
        DIALECTS[dialect].parse(msgspec.json.encode(body))
    assert rejected.value.param == field


def test_rejects_more_logit_biases_than_a_step_should_apply() -> None:
    body: dict[str, Any] = {"model": "m", "messages": [TURN], "logit_bias": {str(token): 1 for token in range(1025)}}
    with pytest.raises(InvalidValue, match="1025 entries, at most 1024") as rejected:
        DIALECTS["openai_chat"].parse(msgspec.json.encode(body))
    assert rejected.value.param == "logit_bias"
    del body["logit_bias"]["0"]
    assert len(DIALECTS["openai_chat"].parse(msgspec.json.encode(body)).sampling.logit_bias) == 1024
