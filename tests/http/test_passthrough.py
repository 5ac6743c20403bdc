"""The fast path sends whole chunks of whole events, and the tail has no framing."""

from __future__ import annotations

import pytest

from cortex.http.chunks import LAST, frame
from cortex.http.observer import TAIL_BYTES, BodyTail, ChunkPassthrough

EVENT = b"data: the usual length\n\n"


class Client:
    """Collects what is sent to it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.tail = BodyTail()
        self.passthrough = ChunkPassthrough(self.received.append, self.tail)


@pytest.mark.parametrize("event", [b"data: 1\n\n", b"data: 1\r\n\r\n", b"data: 1\r\r", b": comment\n\ndata: 2\n\n"])
def test_sends_chunk_of_whole_events_as_it_came(event: bytes) -> None:
    client = Client()
    assert client.passthrough.take(frame(event))
    assert client.received == [frame(event)]
    assert client.passthrough.is_active


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        LAST,
        frame(b"data: half"),
        frame(b"data: half\n"),
        frame(EVENT)[:-1],
        frame(EVENT) + LAST,
        frame(EVENT) * 2,
        b"0" + frame(EVENT),
        frame(bytes(5000) + b"\n\n"),
    ],
)
def test_leaves_everything_else_alone(wire: bytes) -> None:
    client = Client()
    assert not client.passthrough.take(wire)
    client.passthrough.fold()
    assert (client.received, client.tail.num_bytes, client.passthrough.is_active) == ([], 0, False)


@pytest.mark.parametrize("num_events", [1, 31, 32, 33, 34, 1000])
def test_tail_ends_with_last_events_and_counts_all_of_them(num_events: int) -> None:
    client = Client()
    events = [b"data: event number %06d\n\n" % number for number in range(num_events)]
    for event in events:
        assert client.passthrough.take(frame(event))
    client.passthrough.fold()
    client.tail.push(b"data: parsed\n\n")
    body = b"".join(events) + b"data: parsed\n\n"
    tail = bytes(client.tail)
    assert body.endswith(tail)
    assert len(tail) >= min(len(body), 8 * len(events[0]))
    assert client.tail.num_bytes == len(body)


@pytest.mark.parametrize("piece_bytes", [1, 100, 5000])
def test_tail_keeps_last_bytes_of_any_body(piece_bytes: int) -> None:
    body = bytes(range(256)) * 60
    tail = BodyTail()
    for start in range(0, len(body), piece_bytes):
        tail.push(body[start : start + piece_bytes])
    assert bytes(tail) == body[-TAIL_BYTES:]
    assert tail.num_bytes == len(body)
