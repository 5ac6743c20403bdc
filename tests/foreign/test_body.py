"""What servers that are not ours get of a JSON body."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.foreign.body import TABLES, ServerBody, server_body
from cortex.wire.errors import InvalidValue, MalformedJSON

from ..examples import MANY

CHAT = "/v1/chat/completions"
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@MANY
@given(st.dictionaries(st.sampled_from(["stop", "user", "x", "y\0"]), values, max_size=4), st.booleans())
def test_server_reads_what_was_read_here(fields: dict[str, object], is_spaced: bool) -> None:
    sent = json.dumps({"model": "a", **fields}, indent=1 if is_spaced else None).encode()
    written = server_body(CHAT, ("model", "user"), "any", sent).with_fields({"model": "b", "max_tokens": 5})
    fields.pop("user", None)
    assert msgspec.json.decode(written) == {"model": "b", "max_tokens": 5, **fields}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": 1, "a": 2}', b'{"a":2}'),
        (rb'{"\u0061": {"b": 1, "b": [{"c": 1, "c": 2}]}}', b'{"a":{"b":[{"c":2}]}}'),
        (b'{"model": "x", "a": 1.50}', b'{"a":1.5}'),
        (b"{}", b"{}"),
    ],
)
def test_each_name_is_written_once_without_escapes(body: bytes, expected: bytes) -> None:
    assert server_body(CHAT, ("model",), "any", body).body == expected


def test_fields_are_added_to_an_empty_object() -> None:
    assert ServerBody(b"{}").with_fields({"model": "m"}) == b'{"model":"m"}'
    assert ServerBody(b'{"a":1}').with_fields({}) == b'{"a":1}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"a": 1} {}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    ],
)
def test_body_that_is_not_one_object_in_utf_8_is_rejected(body: bytes) -> None:
    with pytest.raises(MalformedJSON):
        server_body(CHAT, (), "any", body)


@pytest.mark.parametrize("path", TABLES)
@pytest.mark.parametrize("name", ["Model", "MODEL", "mo_del", "model ", "model\0", "model[]", "mode\u006c.x"])
def test_name_that_a_server_could_read_as_a_field_is_rejected(path: str, name: str) -> None:
    with pytest.raises(InvalidValue, match="spell it 'model'") as caught:
        server_body(path, (), "any", msgspec.json.encode({"model": "a", name: "b"}))
    assert caught.value.param == name


def test_letters_that_go_folds_are_other_spellings() -> None:
    for name, meant in (("max_token\u017f", "max_tokens"), ("top_\u212a", "top_k")):
        with pytest.raises(InvalidValue, match=f"spell it '{meant}'"):
            server_body(CHAT, (), "any", msgspec.json.encode({"model": "a", name: 5}))


@pytest.mark.parametrize("path", TABLES)
@pytest.mark.parametrize("name", ["My_Mode", "myMode", "MY-MODE", "my_mode[]", "my_mode.x", "m\u0079_mode "])
def test_no_spelling_bypasses_what_an_operator_sets_or_removes(path: str, name: str) -> None:
    sent = {"model": "a", "my_mode": "b"}
    assert b"my_mode" not in server_body(path, ("my_mode",), "any", msgspec.json.encode(sent)).body
    with pytest.raises(InvalidValue, match="as 'my_mode'") as caught:
        server_body(path, ("my_mode",), "any", msgspec.json.encode({**sent, name: "evil"}))
    assert caught.value.param == name


def test_no_table_has_two_spellings_of_one_name() -> None:
    for table in {*TABLES.values()}:
        for name in table.names:
            table.check_overrides(table.names, [name])


def test_deeply_nested_body_is_rejected_and_not_an_internal_error() -> None:
    for depth in (100, 400, 900, 990):
        body = b'{"x": ' + b'{"a":[' * (depth // 2) + b"1" + b"]}" * (depth // 2) + b"}"
        try:
            server_body(CHAT, (), "any", body)
        except MalformedJSON:
            continue


def test_lone_surrogates_are_replaced() -> None:
    body = rb'{"messages": [{"role": "user", "content": "a\ud800"}]}'
    assert b"a\xef\xbf\xbd" in server_body(CHAT, (), "any", body).body
