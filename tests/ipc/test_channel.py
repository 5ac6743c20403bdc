import asyncio
import itertools
import socket
import subprocess
import sys
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.ipc.channel import (
    MAX_FRAME_BYTES,
    BlockingChannel,
    ChannelError,
    FrameDecoder,
    Unsendable,
    encode_frame,
)
from cortex.ipc.loop_channel import LoopChannel
from cortex.neuron.engine.request import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    LoadSpec,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from cortex.neuron.worker.protocol import Cancel, Command, Event, Load, Loaded, MemoryReading, Outputs, Report, Submit

from ..waiting import WAIT_S

OVERSIZED_FRAME = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
DAMAGED_FRAME = b"\x02\x00\x00\x00\xc1\xc1"

requests = st.builds(
    EngineRequest,
    id=st.text(min_size=1),
    prompt=st.lists(st.integers(0, 2**31), max_size=20),
    max_tokens=st.integers(1, 10**6),
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        seed=st.none() | st.integers(0, 2**63),
        logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-1, 1))).map(tuple),
    ),
    grammar=st.none() | st.text(),
)
commands = st.one_of(
    st.builds(Submit, handle=st.integers(0, 99), request=requests),
    st.builds(Cancel, handle=st.integers(0, 99), request_id=st.text()),
    st.builds(Load, handle=st.integers(0, 99), spec=st.builds(LoadSpec, path=st.text())),
)


@given(st.lists(st.lists(commands, max_size=5), max_size=5), st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_decodes_the_same_batches_however_the_stream_is_split(
    batches: list[list[Command]], chunk_sizes: list[int]
) -> None:
    stream = b"".join(encode_frame(batch) for batch in batches)
    decoder: FrameDecoder[Command] = FrameDecoder(Command)
    received: list[list[Command]] = []
    start = 0
    for chunk_bytes in itertools.cycle(chunk_sizes):
        if start >= len(stream):
            break
        received.extend(decoder.feed(stream[start : start + chunk_bytes]))
        start += chunk_bytes
    assert received == batches


def test_engine_values_are_unchanged_after_encoding_and_decoding() -> None:
    info = EngineInfo("llama", "bfloat16", 4096, 32000, 10, 20, 16, 64, ("no vision",))
    memory = MemoryReading(100, 50, 25)
    events = [
        Loaded(1, info, memory, memory),
        Outputs(1, (StepOutput("a", (1,), (TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0)),), 3, "stop"),)),
        Report("step", 7, {1: EngineStats(running=2, steps=3)}),
    ]
    decoder: FrameDecoder[Event] = FrameDecoder(Event)
    assert list(decoder.feed(encode_frame(events))) == [events]


def test_decoder_rejects_a_length_over_the_limit_before_its_body_arrives() -> None:
    decoder: FrameDecoder[Event] = FrameDecoder(Event)
    with pytest.raises(ChannelError, match="limit"):
        list(decoder.feed(OVERSIZED_FRAME))


def test_decoder_rejects_a_body_that_does_not_decode() -> None:
    decoder: FrameDecoder[Event] = FrameDecoder(Event)
    with pytest.raises(ChannelError, match="does not decode"):
        list(decoder.feed(DAMAGED_FRAME))


@pytest.mark.parametrize("frame", [OVERSIZED_FRAME, DAMAGED_FRAME], ids=["oversized", "damaged"])
def test_blocking_channel_raises_on_an_invalid_frame_after_the_valid_ones(frame: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode_frame([Cancel(1, "valid")]) + frame)
        batches = BlockingChannel[Command](ours, Command).receive()
        assert next(batches) == [Cancel(1, "valid")]
        with pytest.raises(ChannelError):
            next(batches)


class LoopEnd:
    """A `LoopChannel` on one end of a socket pair, and everything it reports."""

    def __init__(self) -> None:
        self.received: list[Command] = []
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.channel = LoopChannel(Command, self.received.append, self.closed.set_result)
        ours, self.other = socket.socketpair()
        self._ours = ours

    async def __aenter__(self) -> Self:
        await self.channel.attach(self._ours)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.channel.close()
        self.other.close()


@pytest.mark.parametrize(
    ("frame", "reason"), [(OVERSIZED_FRAME, "limit"), (DAMAGED_FRAME, "does not decode")], ids=["oversized", "damaged"]
)
async def test_loop_channel_closes_on_an_invalid_frame_and_reports_why(frame: bytes, reason: str) -> None:
    async with LoopEnd() as end:
        end.other.sendall(encode_frame([Cancel(1, "valid")]) + frame)
        assert reason in await asyncio.wait_for(end.closed, WAIT_S)
        assert end.received == [Cancel(1, "valid")]
        end.other.settimeout(WAIT_S)
        assert end.other.recv(1) == b""


async def test_loop_channel_reports_once_that_the_other_side_closed_and_then_sends_nothing() -> None:
    async with LoopEnd() as end:
        end.other.close()
        assert "closed" in await asyncio.wait_for(end.closed, WAIT_S)
        end.channel.send(Cancel(1, "late"))


async def test_loop_channel_sends_all_messages_of_one_iteration_in_one_frame_before_it_closes() -> None:
    async with LoopEnd() as end:
        sent = [Cancel(1, str(number)) for number in range(3)]
        for message in sent:
            end.channel.send(message)
        end.channel.close()
        decoder: FrameDecoder[Command] = FrameDecoder(Command)
        frames = await asyncio.to_thread(lambda: list(decoder.feed(end.other.recv(1 << 16))))
        assert frames == [sent]


@pytest.mark.parametrize(
    "bad",
    [
        EngineRequest("a", (1,), 1, SamplingParams(top_k=2**70)),
        EngineRequest("a", (1,), 1, principal="\udcff"),
        EngineRequest("a", (1,), 1, grammar="x" * MAX_FRAME_BYTES),
    ],
    ids=["number", "text", "size"],
)
async def test_message_that_cannot_be_sent_does_not_affect_the_others(bad: EngineRequest) -> None:
    async with LoopEnd() as end:
        end.channel.send(Cancel(1, "before"))
        with pytest.raises(Unsendable):
            end.channel.send(Submit.of(1, bad))
        end.channel.send(Cancel(1, "after"))
        decoder: FrameDecoder[Command] = FrameDecoder(Command)
        frames = await asyncio.to_thread(lambda: list(decoder.feed(end.other.recv(1 << 16))))
        assert frames == [[Cancel(1, "before"), Cancel(1, "after")]]


_CONCURRENT = """
import sys, threading, dataclasses
from cortex.ipc import channel

sys.setswitchinterval(1e-6)
for _ in range(60):
    @dataclasses.dataclass
    class Part:
        number: "int"
        numbers: "list[int]"

    class Message(channel.ChannelMessage):
        part: Part

    frame = channel.encode_frame([Message(Part(1, [2]))])
    together = threading.Barrier(6)

    def receive(Message=Message):
        together.wait()
        [[message]] = channel.FrameDecoder(Message).feed(frame)
        assert message.part.number == 1

    threads = [threading.Thread(target=receive) for _ in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_threads_may_receive_the_first_messages_of_a_type_at_the_same_time() -> None:
    # Without a lock the interpreter crashes, so the threads run in one of their own.
    ended = subprocess.run([sys.executable, "-c", _CONCURRENT], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
