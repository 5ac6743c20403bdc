"""Events stay whole, however the bytes are split."""

from __future__ import annotations

import itertools
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.http.event_boundary import EventBoundary, LineBoundary, after_keepalives

from ..examples import MANY

BLANKS = (b"\n\n", b"\r\n\r\n", b"\r\r")


PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("events", "rest"),
    [
        (b"", b""),
        (PING + PING, b""),
        (b": one\n\n: two\r\n\r\n", b""),
        (b": one\n\n" + PING + b"event: message_start\n\n" + PING, b"event: message_start\n\n" + PING),
        (b": a comment inside an event\ndata: 1\n\n", b"data: 1\n\n"),
        (b"data: 1\n\n: later\n\n", b"data: 1\n\n: later\n\n"),
    ],
)
def test_drops_only_leading_keepalives(events: bytes, rest: bytes) -> None:
    assert after_keepalives(events, PING) == rest


@MANY
@given(
    blank=st.sampled_from(BLANKS),
    events=st.lists(st.binary(min_size=1, max_size=12).filter(lambda data: not set(data) & set(b"\r\n")), max_size=8),
    rest=st.sampled_from([b"", b"data: hal", b": "]),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_passes_only_whole_events_and_loses_none(
    blank: bytes, events: list[bytes], rest: bytes, cuts: list[int]
) -> None:
    stream = b"".join(event + blank for event in events) + rest
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    boundary = EventBoundary()
    passed = b""
    for start, end in pairwise(edges):
        piece = boundary.push(stream[start:end])
        passed += piece
        assert not piece or piece.endswith(BLANKS)
        assert not boundary.inside
    assert passed == stream[: len(stream) - len(rest)]
    assert passed + boundary.flush() == stream


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_drops_comments_behind_the_last_event_that_no_blank_line_ends(piece_bytes: int) -> None:
    events = b": keepalive\n\ndata: 1\n\ndata: [DONE]\n\n"
    stream = events + b': failed overloaded\n: usage {"prompt_tokens":1}\n'
    boundary = EventBoundary()
    passed = b"".join(boundary.push(stream[at : at + piece_bytes]) for at in range(0, len(stream), piece_bytes))
    assert passed + boundary.flush() == events


@pytest.mark.parametrize("piece_bytes", [1000, 100_000])
def test_passes_an_event_too_long_to_hold_in_pieces(piece_bytes: int) -> None:
    boundary = EventBoundary()
    sent = b""
    passed = boundary.push(b"data: first\n\n")
    for piece in itertools.repeat(b"x" * piece_bytes):
        if boundary.inside:
            break
        sent += piece
        passed += boundary.push(piece)
    assert boundary.escape() == b"\n\n"
    assert boundary.push(b"more") == b"more"
    assert boundary.push(b"end\n\ndata: hal") == b"end\n\n"
    assert not boundary.inside
    assert boundary.escape() == b""
    assert passed == b"data: first\n\n" + sent
    assert boundary.flush() == b"data: hal"


@MANY
@given(
    lines=st.lists(st.binary(max_size=12).filter(lambda data: not set(data) & set(b"\r\n")), max_size=8),
    rest=st.sampled_from([b"", b'{"hal', b' {"hal']),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_passes_only_whole_lines_and_loses_none(lines: list[bytes], rest: bytes, cuts: list[int]) -> None:
    stream = b"".join(b"{" + line + b"}\n" for line in lines) + rest
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    boundary = LineBoundary()
    passed = b""
    for start, end in pairwise(edges):
        piece = boundary.push(stream[start:end])
        passed += piece
        assert not piece or piece.endswith(b"}\n")
        assert not boundary.inside
    assert passed == stream[: len(stream) - len(rest)]
    assert passed + boundary.flush() == stream[: len(stream) - len(rest)] + rest.lstrip(b" ")


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_drops_the_reports_behind_the_last_line(piece_bytes: int) -> None:
    lines = b'{"a":": x"}\n{"done":true}\n'
    stream = lines + b': failed overloaded\n: usage {"prompt_tokens":1}'
    boundary = LineBoundary()
    passed = b"".join(boundary.push(stream[at : at + piece_bytes]) for at in range(0, len(stream), piece_bytes))
    assert passed + boundary.flush() == lines


@pytest.mark.parametrize("before", [b"", b'{"done":true}\n'])
def test_reports_of_any_length_are_neither_held_nor_passed_on(before: bytes) -> None:
    boundary = LineBoundary()
    tracemalloc.start()
    try:
        assert boundary.push(before + b": " + b"x" * 300_000) == before
        for _ in range(3):
            assert boundary.push(b"\n: " + b"x" * 300_000) == b""
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
    assert (boundary.flush(), boundary.escape()) == (b"", b"")


def test_spaces_between_lines_leave_room_for_other_keepalives() -> None:
    boundary = LineBoundary()
    assert boundary.push(b" ") == b""
    assert boundary.is_between_events
    assert boundary.push(b'{"a":1}\n  ') == b'{"a":1}\n'
    assert boundary.is_between_events


def test_passes_a_line_too_long_to_hold_in_pieces() -> None:
    boundary = LineBoundary()
    long = b'{"a":"' + b"x" * 300_000
    assert boundary.push(long) == long
    assert (boundary.inside, boundary.escape()) == (True, b"\n")
    assert boundary.push(b":more") == b":more"
    assert boundary.push(b'"}\n{') == b'"}\n'
    assert (boundary.inside, boundary.escape()) == (False, b"")
