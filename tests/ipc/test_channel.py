import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.ipc.channel import MAX_FRAME_BYTES, ChannelError, FrameDecoder, LoopChannel, Unsendable, encode_frame
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

requests = st.builds(
    EngineRequest,
    id=st.text(min_size=1),
    prompt=st.lists(st.integers(0, 2**31), max_size=20).map(tuple),
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


@given(st.lists(st.lists(commands, max_size=5), max_size=5), st.integers(1, 7))
def test_frames_survive_any_cut_of_the_stream(batches, piece_bytes):
    stream = b"".join(encode_frame(batch) for batch in batches)
    decoder: FrameDecoder[Command] = FrameDecoder(Command)
    received = []
    for start in range(0, len(stream), piece_bytes):
        received.extend(decoder.feed(stream[start : start + piece_bytes]))
    assert received == batches


def test_the_engines_values_cross_unchanged():
    info = EngineInfo("llama", "bfloat16", 4096, 32000, 10, 20, 16, 64, ("no vision",))
    memory = MemoryReading(100, 50, 25)
    events = [
        Loaded(1, info, memory, memory),
        Outputs(1, (StepOutput("a", (1,), (TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0)),), 3, "stop"),)),
        Report("step", 7, {1: EngineStats(running=2, steps=3)}),
    ]
    decoder: FrameDecoder[Event] = FrameDecoder(Event)
    assert list(decoder.feed(encode_frame(events))) == [events]


def test_an_absurd_length_is_refused_before_it_is_awaited():
    decoder: FrameDecoder[Event] = FrameDecoder(Event)
    with pytest.raises(ChannelError, match="limit"):
        list(decoder.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


def test_what_does_not_decode_is_an_error():
    decoder: FrameDecoder[Event] = FrameDecoder(Event)
    with pytest.raises(ChannelError, match="does not decode"):
        list(decoder.feed(b"\x02\x00\x00\x00\xc1\xc1"))


@pytest.mark.parametrize(
    "bad",
    [
        EngineRequest("a", (1,), 1, SamplingParams(top_k=2**70)),
        EngineRequest("a", (1,), 1, principal="\udcff"),
        EngineRequest("a", (1,), 1, grammar="x" * MAX_FRAME_BYTES),
    ],
    ids=["number", "text", "size"],
)
async def test_a_command_that_cannot_be_sent_spoils_no_other(bad):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        channel = LoopChannel(Event, on_event=lambda event: None, on_closed=lambda reason: None)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
        good = [Cancel(1, "before"), Cancel(1, "after")]
        channel.send(good[0])
        with pytest.raises(Unsendable):
            channel.send(Submit(1, bad))
        channel.send(good[1])
        decoder: FrameDecoder[Command] = FrameDecoder(Command)
        frames = await asyncio.to_thread(lambda: list(decoder.feed(theirs.recv(1 << 16))))
        assert frames == [good]
        channel.close()
