"""Headers cannot inject lines, and only end-to-end headers are passed on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.http.head import HOP_BY_HOP, NOT_FOR_CLIENTS, NOT_FOR_NODES, encode_head, end_to_end, status_line

from ..examples import MANY


@MANY
@given(name=st.binary(max_size=20), value=st.binary(max_size=40))
def test_a_header_cannot_break_out_of_its_line(name: bytes, value: bytes) -> None:
    try:
        head = encode_head(b"HTTP/1.1 200 OK", ((b"a", b"b"), (name, value)), b"content-length: 0\r\n")
    except ValueError:
        return
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"a: b",
        name + b": " + value,
        b"content-length: 0",
        b"",
        b"",
    ]


@pytest.mark.parametrize("dropped", [NOT_FOR_NODES, NOT_FOR_CLIENTS])
def test_drops_hop_by_hop_headers_and_those_that_connection_lists(dropped: frozenset[bytes]) -> None:
    headers = [(name, b"x") for name in HOP_BY_HOP if name != b"connection"]
    headers += [(b"connection", b"Close, X-Mine"), (b"x-mine", b"1"), (b"x-yours", b"2"), (b"content-length", b"3")]
    assert end_to_end(headers, dropped) == [(b"x-yours", b"2")]


def test_ordinary_connection_header_drops_no_other() -> None:
    assert end_to_end([(b"connection", b"close"), (b"authorization", b"x")], NOT_FOR_NODES) == [
        (b"authorization", b"x")
    ]


@pytest.mark.parametrize(
    ("status", "line"),
    [(200, b"HTTP/1.1 200 OK"), (529, b"HTTP/1.1 529 Overloaded"), (799, b"HTTP/1.1 799 ")],
)
def test_status_line_has_the_registered_phrase(status: int, line: bytes) -> None:
    assert status_line(status) == line
