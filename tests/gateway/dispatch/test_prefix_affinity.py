"""Conversations stay on the node that has their prefix, whatever its last report says."""

from __future__ import annotations

import pytest

from cortex.gateway.dispatch.leases import NO_NODES, Lease
from cortex.wire.node.protocol import HostKV

from ..fake_fleet import GB, FakeFleet

TURN = b"0123456789abcdef" * 64
SYSTEM = b"You are an agent. " * 400


def two_replicas() -> FakeFleet:
    fake = FakeFleet({"n": {"a": GB}, "m": {"a": GB}})
    fake.ready["n"]["a"] = fake.ready["m"]["a"] = 900.0
    fake.poll()
    return fake


def lease(fake: FakeFleet, prompt: bytes) -> Lease:
    got = fake.dispatcher.lease_now("a", lambda: prompt, NO_NODES)
    assert got is not None
    return got


def turns(fake: FakeFleet, conversation: bytes, count: int) -> list[str]:
    """The nodes of turns without pauses. Each is reported as running, and the report outlives it."""
    nodes = []
    for number in range(1, count + 1):
        taken = lease(fake, SYSTEM + conversation * number)
        nodes.append(taken.node)
        fake.running[taken.node, "a"] = 1
        fake.now += 0.5
        fake.poll()
        fake.now += 0.5
        fake.dispatcher.release(taken)
        fake.running.clear()
    return nodes


def test_turns_stay_on_their_node_although_it_was_last_reported_busy() -> None:
    assert len(set(turns(two_replicas(), TURN, 10))) == 1


def test_two_conversations_behind_one_system_prompt_stay_on_two_nodes() -> None:
    fake = two_replicas()
    held = lease(fake, SYSTEM + b"A" * 4000)
    other = lease(fake, b"another system prompt" * 400)
    assert other.node != held.node
    fake.dispatcher.release(other)
    fake.dispatcher.release(held)
    fake.now += 5
    fake.running[held.node, "a"] = 60
    fake.poll()
    moved = lease(fake, SYSTEM + b"B" * 4000)
    assert moved.node == other.node, "60 requests of other clients cost more than the system prompt"
    fake.dispatcher.release(moved)
    fake.running.clear()
    fake.now += 5
    fake.poll()
    for _ in range(3):
        for conversation, node in ((b"A", held.node), (b"B", moved.node)):
            taken = lease(fake, SYSTEM + conversation * 5000)
            assert taken.node == node
            fake.dispatcher.release(taken)


def test_request_that_ended_while_its_node_reported_it_counts_no_more() -> None:
    fake = two_replicas()
    taken = lease(fake, b"short")
    fake.dispatcher.release(taken)
    fake.now += 0.1
    fake.running[taken.node, "a"] = 1
    fake.poll()
    assert lease(fake, b"short").node == taken.node


def test_requests_of_other_clients_count() -> None:
    fake = two_replicas()
    first = lease(fake, b"short")
    fake.dispatcher.release(first)
    fake.now += 5
    fake.running[first.node, "a"] = 1
    fake.poll()
    assert lease(fake, b"short").node != first.node


def test_prefix_is_forgotten_when_the_node_has_reloaded_the_model() -> None:
    fake = two_replicas()
    first = lease(fake, SYSTEM * 10)
    fake.dispatcher.release(first)
    busy = lease(fake, SYSTEM * 10 + b"!")
    assert busy.node == first.node
    fake.now += 60
    fake.ready[first.node]["a"] = fake.now - 1
    fake.poll()
    assert lease(fake, SYSTEM * 10 + b"?").node != first.node


def reload(fake: FakeFleet, node: str) -> None:
    fake.now += 60
    fake.ready[node]["a"] = fake.now - 1
    fake.poll()


def test_prefix_that_a_reload_left_in_host_memory_is_preferred_to_none() -> None:
    fake = two_replicas()
    first = lease(fake, SYSTEM * 10)
    fake.kept[first.node, "a"] = HostKV(num_bytes=GB, num_tokens=100_000)
    reload(fake, first.node)
    again = lease(fake, SYSTEM * 10 + b"?")
    assert again.node == first.node, "copying takes less than computing"
    assert again.reason == "least expected time of 2 replicas, with a part of the prompt in its host memory"


@pytest.mark.parametrize(
    ("kept", "returns"),
    [
        pytest.param(HostKV(num_bytes=GB, num_tokens=100_000, tokens_per_s=200_000.0), True, id="fast"),
        pytest.param(HostKV(num_bytes=GB, num_tokens=100_000, tokens_per_s=10.0), False, id="slower than computing"),
        pytest.param(HostKV(num_bytes=GB), True, id="states without pages"),
        pytest.param(HostKV(num_bytes=1, num_tokens=16), False, id="all but a page were dropped"),
        pytest.param(None, False, id="nothing is kept of this model"),
    ],
)
def test_report_of_the_model_decides_what_is_in_host_memory(kept: HostKV | None, *, returns: bool) -> None:
    fake = two_replicas()
    first = lease(fake, SYSTEM * 10)
    fake.dispatcher.release(first)
    fake.kept[first.node, "other"] = HostKV(num_bytes=GB, num_tokens=100_000)
    if kept is not None:
        fake.kept[first.node, "a"] = kept
    reload(fake, first.node)
    fake.running[first.node, "a"] = 1  # the other node is chosen where nothing speaks for this one
    fake.poll()
    assert (lease(fake, SYSTEM * 10 + b"?").node == first.node) == returns


def test_prefix_that_the_kv_cache_has_no_room_for_is_in_host_memory_or_gone() -> None:
    for kept in (None, HostKV(num_bytes=GB, num_tokens=100_000)):
        fake = two_replicas()
        first = lease(fake, SYSTEM * 10)
        fake.dispatcher.release(first)
        fake.now += 60
        fake.running[first.node, "a"] = 1
        fake.kv_tokens = 100
        if kept is not None:
            fake.kept[first.node, "a"] = kept
        fake.poll()
        assert (lease(fake, SYSTEM * 10 + b"?").node == first.node) == (kept is not None)


def test_prompts_that_are_still_computed_are_waited_for() -> None:
    fake = two_replicas()
    first = lease(fake, SYSTEM * 10)
    second = lease(fake, b"x" * 40_000)
    third = lease(fake, b"y" * 100)
    assert first.node != second.node == third.node, "40,000 bytes are computed sooner than 72,000"
    fake.now += 60
    assert lease(fake, b"z").node == first.node, "computed by now: only the number of requests counts"


def test_measured_rate_decides_what_a_prefix_is_worth() -> None:
    fake = two_replicas()
    first = lease(fake, SYSTEM)
    fake.dispatcher.measured(first, 10_000, 100.0, 101.0)
    fake.dispatcher.release(first)
    fake.now += 5
    fake.running[first.node, "a"] = 60
    fake.poll()
    assert lease(fake, SYSTEM + b"?").node == first.node, "at 100 tokens a second the prefix is 18 s of work"


def test_conversation_is_remembered_while_its_pages_are_copied_to_host_memory() -> None:
    """A node reports what it keeps of a model when the unload ends, not while it drains and copies."""
    fake = two_replicas()
    first = lease(fake, SYSTEM * 10)
    fake.dispatcher.release(first)
    fake.leaving.add((first.node, "a"))
    fake.poll()
    fake.leaving.clear()
    fake.kept[first.node, "a"] = HostKV(num_bytes=GB, num_tokens=100_000)
    fake.ready[first.node].pop("a")
    fake.poll()
    reload(fake, first.node)
    again = lease(fake, SYSTEM * 10 + b"?")
    assert again.node == first.node
    assert "in its host memory" in again.reason


def test_nothing_is_kept_of_a_node_that_left_the_configuration() -> None:
    fake = two_replicas()
    first = lease(fake, SYSTEM * 10)
    fake.dispatcher.release(first)
    other = {"n": "m", "m": "n"}[first.node]
    fake.dispatcher.reconfigure(fake.settings(other))
    fake.dispatcher.reconfigure(fake.settings(*fake.sizes))
    fake.poll()
    fake.running[first.node, "a"] = 1
    fake.poll()
    assert lease(fake, SYSTEM * 10 + b"?").node == other
