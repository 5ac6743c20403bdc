import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.wire.errors import UpstreamInterrupted
from cortex.wire.sse import Frame, Parser, frame

from ..examples import MANY

STREAM = (
    b"\xef\xbb\xbf: a comment\n\nevent: ping\ndata: {}\n\n"
    b"data: one\r\ndata: two\r\n\r\nid: 7\rretry: 5\rdata:three\r\rdata: \xc3\xa9\n\nevent: lost\n\ndata: unended"
)
FRAMES = [Frame("ping", "{}"), Frame("message", "one\ntwo"), Frame("message", "three"), Frame("message", "é")]


@MANY
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_frames_do_not_depend_on_how_the_bytes_are_split(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = Parser()
    frames = [f for start, end in itertools.pairwise(edges) for f in parser.feed(STREAM[start:end])]
    assert frames == FRAMES


def test_framed_event_parses_back() -> None:
    assert Parser().feed(frame(b"{}", "x") + frame(b"[DONE]")) == [Frame("x", "{}"), Frame("message", "[DONE]")]


def test_rejects_an_endless_line() -> None:
    parser = Parser(max_frame_bytes=1000)
    with pytest.raises(UpstreamInterrupted, match="longer than 1000 bytes"):
        list(map(parser.feed, [b"data: " + b"x" * 100] * 20))


@pytest.mark.parametrize("line", [b"data: " + b"x" * 100 + b"\n", b"data\n" * 20, b"data:\n" * 20])
def test_rejects_an_endless_frame_of_short_lines(line: bytes) -> None:
    parser = Parser(max_frame_bytes=1000)
    with pytest.raises(UpstreamInterrupted):
        list(map(parser.feed, [line] * 20))
