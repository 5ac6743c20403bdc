"""What a request finds about the replicas of its model was derived with reports and with measured requests."""

from __future__ import annotations

import pytest

from cortex.fleet.topology import Fleet, Node
from cortex.gateway.dispatch.leases import NO_NODES, Lease
from cortex.wire.node.bench import BenchResult, StreamRate

from ..fake_fleet import GB, FakeFleet

PROMPT = bytes(range(256)) * 32
"""2,048 tokens."""


@pytest.fixture
def fake() -> FakeFleet:
    """Two nodes with one model, ready on both, whose speed each has measured: `m` is the faster one."""
    fake = FakeFleet({"m": {"a": GB}, "n": {"a": GB}})
    fake.ready["m"]["a"] = fake.ready["n"]["a"] = 900.0
    fake.benches = {("m", "a"): measured(200.0), ("n", "a"): measured(100.0)}
    fake.poll()
    return fake


def measured(tokens_per_s: float) -> BenchResult:
    streams = (StreamRate(streams=1, tokens_per_s=tokens_per_s),)
    return BenchResult(measured_at=0.0, version="0", streams=streams, prompt_tokens_per_s=4000.0)


def lease(fake: FakeFleet, prompt: bytes = b"a prompt") -> Lease:
    got = fake.dispatcher.lease_now("a", lambda: prompt, NO_NODES)
    assert got is not None
    return got


def test_request_looks_at_no_node(fake: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fleet: Fleet, model_id: str) -> list[Node]:
        pytest.fail(f"looked for nodes with {model_id}")

    monkeypatch.setattr(Fleet, "listing", fail)
    assert lease(fake).node == "m"


def test_next_report_changes_the_speed_of_a_replica(fake: FakeFleet) -> None:
    def chosen() -> str:
        fake.poll()
        fake.dispatcher.release(got := lease(fake))
        return got.node

    assert chosen() == "m"
    fake.benches["n", "a"] = measured(900.0)
    assert chosen() == "n"
    del fake.benches["n", "a"]
    assert chosen() == "m", "speeds of responses do not count where one of them is not known"


def test_measured_requests_count_more_than_what_the_node_measured(fake: FakeFleet) -> None:
    first = lease(fake, PROMPT)
    assert (first.node, first.is_alone) == ("m", True)
    fake.dispatcher.measured(first, 2048, 60.0, 61.0)
    fake.dispatcher.release(first)
    assert lease(fake, PROMPT[::-1]).node == "n"
