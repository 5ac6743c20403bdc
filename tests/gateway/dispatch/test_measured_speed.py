"""The speeds that nodes measured weigh in the choice of a replica, until requests show more."""

from __future__ import annotations

import pytest

from cortex.gateway.dispatch.leases import NO_NODES, Lease
from cortex.wire.node.bench import BenchResult, StreamRate

from ..fake_fleet import GB, FakeFleet

PROMPT = bytes(range(256)) * 32
"""2,048 tokens."""


def measured(stream_rate: float, prompt_rate: float = 4000.0) -> BenchResult:
    streams = tuple(StreamRate(streams=count, tokens_per_s=stream_rate * count**0.5) for count in (1, 8, 64))
    return BenchResult(measured_at=0.0, version="0", streams=streams, prompt_tokens_per_s=prompt_rate)


def lease(benches: dict[str, BenchResult], running: dict[str, int] | None = None) -> Lease:
    fake = FakeFleet({"m": {"a": GB}, "n": {"a": GB}})
    fake.ready["m"]["a"] = fake.ready["n"]["a"] = 900.0
    fake.benches = {(node, "a"): bench for node, bench in benches.items()}
    fake.running = {(node, "a"): count for node, count in (running or {}).items()}
    fake.poll()
    got = fake.dispatcher.lease_now("a", lambda: PROMPT, NO_NODES)
    assert got is not None
    return got


@pytest.mark.parametrize(
    ("benches", "running", "node"),
    [
        pytest.param({}, {}, "m", id="nothing is known"),
        pytest.param({"m": measured(40), "n": measured(200)}, {}, "n", id="the faster stream"),
        pytest.param({"m": measured(200, 500), "n": measured(200, 9000)}, {}, "n", id="the faster prompt"),
        pytest.param({"m": measured(40), "n": measured(200)}, {"n": 2}, "n", id="faster although it is busy"),
        pytest.param({"m": measured(100), "n": measured(200)}, {"n": 60}, "m", id="too busy to be faster"),
        pytest.param({"m": measured(40)}, {}, "m", id="one that was not measured counts as fast"),
        pytest.param({"m": measured(40, 500)}, {}, "m", id="so does its prompt"),
    ],
)
def test_routes_to_the_replica_that_ends_first(
    benches: dict[str, BenchResult], running: dict[str, int], node: str
) -> None:
    assert lease(benches, running).node == node
