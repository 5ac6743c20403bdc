"""What an engine has counted, and how it reports it."""

from __future__ import annotations

from dataclasses import asdict, fields

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cortex.ipc.channel import FrameDecoder, encode_frame
from cortex.neuron.engine.request import Counters, EngineStats
from cortex.neuron.worker.protocol import Event, Report

COUNTS = st.integers(0, 9)
BY_KIND = st.dictionaries(st.sampled_from(["lookup", "mtp"]), COUNTS)
COUNTERS = st.builds(Counters, *[COUNTS] * 6, BY_KIND, BY_KIND)


@given(COUNTERS, COUNTERS)
def test_sum_has_every_counter_of_both(first: Counters, second: Counters) -> None:
    both = first.plus(second)
    for name in (each.name for each in fields(Counters)):
        one, other, total = (getattr(each, name) for each in (first, second, both))
        if isinstance(total, dict):
            assert total == {kind: one.get(kind, 0) + other.get(kind, 0) for kind in one | other}
        else:
            assert total == one + other


def test_stats_declare_no_counter_again() -> None:
    assert issubclass(EngineStats, Counters)
    assert not set(vars(EngineStats)["__annotations__"]) & {each.name for each in fields(Counters)}


def test_counters_are_at_the_top_of_the_reported_stats() -> None:
    counters = Counters(1, 2, 3, 4, 5, 6, {"mtp": 7}, {"mtp": 8})
    stats = EngineStats(running=9, **asdict(counters))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats)) == {
        "running": 9,
        "waiting": 0,
        "used_pages": 0,
        "cached_pages": 0,
        "num_pages": 0,
        "steps": 1,
        "prompt_tokens": 2,
        "cached_tokens": 3,
        "completion_tokens": 4,
        "preemptions": 5,
        "fetched_tokens": 6,
        "drafted_tokens": {"mtp": 7},
        "accepted_tokens": {"mtp": 8},
        "graphs": 0,
        "graph_bytes": 0,
        "graph_s": 0.0,
        "failed_kernel_passes": 0,
        "prompt_token_s": 0.0,
    }
    report = Report("step", 7, {1: stats})
    decoder: FrameDecoder[Event] = FrameDecoder(Event)
    assert list(decoder.feed(encode_frame([report]))) == [[report]]
