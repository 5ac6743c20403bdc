from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.parsing import envelope
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import InvalidValue, MalformedJSON, MissingModel
from cortex.wire.fields.body import MAX_PROMPTS, parse, replace_fields
from cortex.wire.request_summary import RequestSummary

from ..examples import MANY


def test_reads_the_fields_that_routing_needs() -> None:
    read = envelope.read(
        b'{"model":"a/b","stream":true,"max_tokens":5,"anything":{"else":[1,2]}}', "openai_chat"
    ).summary
    assert (read.model, read.stream, read.completion_limit) == ("a/b", True, 5)


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        (b"", MalformedJSON, None),
        (b"hello", MalformedJSON, None),
        (b'{"model": "x"', MalformedJSON, None),
        (b"[]", MalformedJSON, None),
        (b"\xff\xfe", MalformedJSON, None),
        (b'{"model": "\xff"}', MalformedJSON, None),
        (b"[" * 200_000, MalformedJSON, None),
        (b'{"a":' * 200_000, MalformedJSON, None),
        (b"{}", MissingModel, "model"),
        (b'{"model": null}', MissingModel, "model"),
        (b'{"model": ""}', MissingModel, "model"),
        (b'{"model": 5}', InvalidValue, "model"),
        (b'{"model": "' + b"x" * 201 + b'"}', InvalidValue, "model"),
        (b'{"model": "x", "stream": "yes"}', InvalidValue, "stream"),
    ],
)
def test_error_names_the_invalid_field(body: Any, error: Any, param: Any) -> None:
    with pytest.raises(error) as caught:
        envelope.read(body, "openai_chat")
    assert caught.value.param == param


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("generates", [True, False])
def test_salt_is_read_in_every_dialect(dialect: Any, generates: bool) -> None:
    for value, salt in ((b'"a"', b'"a"'), (b'["a", "b"]', b'["a", "b"]'), (b'""', b""), (b"null", b"")):
        read = envelope.read(b'{"model":"m","prompt":"x","cache_salt":%b}' % value, dialect, generates)
        assert read.summary.cache_salt == salt
    assert envelope.read(b'{"model":"m"}', dialect, generates).summary.cache_salt == b""


def test_null_counts_as_absent() -> None:
    read = envelope.read(b'{"model":"x","stream":null,"max_tokens":null,"system":null}', "openai_chat").summary
    assert not read.stream
    assert read.completion_limit is None


LIMITS: dict[str, tuple[str, ...]] = {
    "openai_chat": ("max_tokens", "max_completion_tokens"),
    "openai_completions": ("max_tokens",),
    "openai_responses": ("max_output_tokens",),
    "anthropic_messages": ("max_tokens",),
}
EVERY_LIMIT = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def read(dialect: str, **fields: Any) -> RequestSummary:
    return envelope.read(msgspec.json.encode({"model": "m", **fields}), dialect).summary


@pytest.mark.parametrize("dialect", LIMITS)
@pytest.mark.parametrize("field", EVERY_LIMIT)
def test_ignores_limits_of_other_dialects(dialect: Any, field: Any) -> None:
    limit = read(dialect, **{field: 7}).completion_limit
    assert limit == (7 if field in LIMITS[dialect] else None)


@pytest.mark.parametrize("dialect", LIMITS)
@pytest.mark.parametrize("value", [-1, 0, -(10**6), 2**53, 10**25, "5", 1.5, True, [], {}])
def test_rejects_a_limit_that_is_not_a_positive_number(dialect: Any, value: Any) -> None:
    for field in LIMITS[dialect]:
        if dialect in ("openai_completions", "anthropic_messages") and value == 0:
            continue  # it asks for the prompt alone
        if dialect in ("openai_chat", "openai_completions") and field == "max_tokens" and value == -1:
            continue  # llama.cpp's for no limit
        with pytest.raises(InvalidValue) as caught:
            read(dialect, **{field: value})
        assert caught.value.param == field
        assert field in caught.value.message
    for field in set(EVERY_LIMIT) - set(LIMITS[dialect]):
        assert read(dialect, **{field: value}).completion_limit is None, "another dialect's field is ignored"


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_completions"])
def test_counts_and_bounds_choices(dialect: Any) -> None:
    assert read(dialect).num_choices == 1
    assert read(dialect, n=32).num_choices == 32
    for value in (0, -1, 129, 10**25, "3"):
        with pytest.raises(InvalidValue) as caught:
            read(dialect, n=value)
        assert caught.value.param == "n"


@pytest.mark.parametrize("dialect", ["openai_responses", "anthropic_messages"])
def test_dialects_without_choices_ignore_them(dialect: Any) -> None:
    assert read(dialect, n=-5, best_of="x").num_choices == 1


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), ([1, 2, 3], 1), (["a"], 1), (["a", "b, c", ""], 3), ([[1, 2], [3]], 2), ([], 1), (None, 1)],
)
def test_counts_choices_for_every_prompt_of_a_list(prompt: Any, count: Any) -> None:
    assert read("openai_completions", prompt=prompt, n=2).num_choices == 2 * count


def test_rejects_a_list_of_too_many_prompts() -> None:
    assert read("openai_completions", prompt=["a"] * MAX_PROMPTS).num_choices == MAX_PROMPTS
    with pytest.raises(InvalidValue) as caught:
        read("openai_completions", prompt=["a"] * 100_000)
    assert caught.value.param == "prompt"


def test_body_that_generates_nothing_has_a_limit_of_zero() -> None:
    read = envelope.read(b'{"model":"m","max_tokens":-3}', "anthropic_messages", generates=False).summary
    assert (read.completion_limit, read.num_choices) == (0, 1)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@MANY
@given(st.dictionaries(st.text(min_size=1, max_size=8), values, max_size=5), st.text(max_size=12))
def test_replacing_the_model_changes_nothing_else(fields: Any, model: Any) -> None:
    body = msgspec.json.encode(fields | {"model": "before"})
    assert msgspec.json.decode(replace_fields(body, {"model": model})) == fields | {"model": model}


def test_replacing_the_model_keeps_the_bytes_of_other_values() -> None:
    assert b"[1 ,2.50, 1e3]" in replace_fields(b'{"model":"a","x": [1 ,2.50, 1e3]}', {"model": "b"})


def test_turns_of_a_conversation_share_all_prompt_bytes_of_the_earlier_one() -> None:
    head = b'{"model":"m","system":"' + b"s" * 5000 + b'","messages":['
    first = envelope.read(head + b'{"a":1}],"stream":true}', "anthropic_messages").prompt_bytes(1 << 20)
    second = envelope.read(head + b'{"a":1},{"b":2}]}', "anthropic_messages").prompt_bytes(1 << 20)
    assert first == b'"' + b"s" * 5000 + b'"[{"a":1}]'
    assert second.startswith(first[:-1])


@pytest.mark.parametrize("dialect", ["openai_completions", "anthropic_messages"])
def test_a_request_may_ask_for_no_tokens(dialect: str) -> None:
    assert envelope.read(b'{"model":"m","max_tokens":0}', dialect).summary.completion_limit == 0


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_completions"])
def test_limit_of_llama_cpp_reserves_as_without_a_limit(dialect: str) -> None:
    assert envelope.read(b'{"model":"m","max_tokens":-1}', dialect).summary.completion_limit is None


def test_chat_has_at_least_one_token() -> None:
    with pytest.raises(InvalidValue):
        envelope.read(b'{"model":"m","max_tokens":0}', "openai_chat")


@pytest.mark.parametrize(
    "body", [b'{"model": "a", "model": "b"}', rb'{"model": "a", "messages": [{"model": "x"}], "mod\u0065l": "b"}']
)
def test_last_of_two_models_counts_as_for_nodes(body: bytes) -> None:
    assert envelope.read(body, "openai_chat").summary.model == parse(body).model() == "b"


def test_value_that_would_delay_the_loop_is_not_decoded() -> None:
    for field in ("max_tokens", "n", "stream"):
        with pytest.raises(InvalidValue, match="more than 65536 bytes") as caught:
            read("openai_chat", **{field: [[]] * 30_000})
        assert caught.value.param == field
