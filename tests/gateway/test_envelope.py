import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.gateway import envelope
from cortex.wire.errors import InvalidValue, MalformedJSON, MissingModel


def test_reads_only_what_routing_needs():
    read = envelope.read(b'{"model":"a/b","stream":true,"max_tokens":5,"anything":{"else":[1,2]}}')
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
        (b'{"model": "x", "stream": "yes"}', InvalidValue, "stream"),
    ],
)
def test_bad_bodies_are_named_precisely(body, error, param):
    with pytest.raises(error) as caught:
        envelope.read(body)
    assert caught.value.param == param


def test_nulls_are_absent():
    read = envelope.read(b'{"model":"x","stream":null,"max_tokens":null,"system":null}')
    assert not read.stream
    assert read.completion_limit is None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(min_size=1, max_size=8), values, max_size=5), st.text(max_size=12))
def test_replacing_the_model_changes_nothing_else(fields, model):
    body = msgspec.json.encode(fields | {"model": "before"})
    assert msgspec.json.decode(envelope.replace_model(body, model)) == fields | {"model": model}


def test_replacing_the_model_keeps_the_bytes_of_other_values():
    assert b"[1 ,2.50, 1e3]" in envelope.replace_model(b'{"model":"a","x": [1 ,2.50, 1e3]}', "b")


def test_sessions_with_the_same_start_share_their_leading_bytes():
    first = envelope.read(b'{"model":"m","system":"' + b"s" * 5000 + b'","messages":[1]}')
    second = envelope.read(b'{"model":"m","system":"' + b"s" * 5000 + b'","messages":[1,2]}')
    assert first.leading_bytes() == second.leading_bytes()
    assert len(first.leading_bytes()) == envelope.PREFIX_BYTES
