"""Messages survive every way in which a stream may be cut."""

import asyncio
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.gateway.ledger.limits import Estimate
from cortex.gateway.workers.messages import Admit, Rejected, Settle, ToMain
from cortex.ipc.message_channel import MessageChannel
from cortex.wire.errors import BY_CODE, InsufficientCapacity, Overloaded
from cortex.wire.events import Usage

DECODER = msgspec.msgpack.Decoder[ToMain](ToMain)
SENT: list[ToMain] = [
    Admit(1, "a", ((b"authorization", b"Bearer \xff"),), Estimate(70_000, None, 2), "answer", b"x" * 4096),
    Settle(1, Usage(prompt_tokens=3, completion_tokens=4), "a", "n"),
    Settle(2, None, "a", ""),
]


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        self.data = b""

    def write(self, data) -> None:
        self.data += data


def sent_bytes() -> bytes:
    wire = Wire()
    channel: MessageChannel[ToMain] = MessageChannel(DECODER, print, lost=print)
    channel.connection_made(wire)
    for message in SENT:
        channel.send(message)
    return wire.data


@given(st.lists(st.integers(0, 5000), max_size=12))
def test_what_arrives_does_not_depend_on_how_the_bytes_were_split(cuts):
    got: list[ToMain] = []
    channel: MessageChannel[ToMain] = MessageChannel(DECODER, got.append, lost=print)
    data = sent_bytes()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for begin, end in itertools.pairwise(edges):
        channel.data_received(data[begin:end])
    assert got == SENT


def test_nothing_is_sent_to_one_who_is_gone():
    lost: list[bool] = []
    channel: MessageChannel[ToMain] = MessageChannel(DECODER, print, lost=lambda: lost.append(True))
    wire = Wire()
    channel.connection_made(wire)
    channel.connection_lost(None)
    channel.send(SENT[0])
    assert (wire.data, lost) == (b"", [True])


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_an_error_means_the_same_on_the_other_side(kind):
    error = kind("what happened", param="model", retry_after_s=7.5)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(Rejected.of(3, error)), type=Rejected).error()
    assert type(told) is kind
    assert (told.message, told.param, told.retry_after_s) == ("what happened", "model", 7.5)


def test_facts_beside_an_error_arrive_too():
    error = InsufficientCapacity("no", details={"nodes": [{"node": "n", "need_bytes": 5}]})
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(Rejected.of(3, error)), type=Rejected).error()
    assert told.details == error.details
    assert Rejected.of(1, Overloaded("x")).retry_after_s == 1.0
