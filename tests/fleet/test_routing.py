from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.routing import BLOCK_BYTES, MAX_BLOCKS, Affinity, Replica, choose, leading_blocks, score

LONG = bytes(range(256)) * 400


def test_blocks_of_a_longer_prompt_begin_with_those_of_the_shorter() -> None:
    assert leading_blocks(b"short") == ()
    shorter, longer = leading_blocks(LONG[: 5 * BLOCK_BYTES]), leading_blocks(LONG[: 9 * BLOCK_BYTES + 7])
    assert len(shorter) == 5
    assert longer[:5] == shorter
    assert len(leading_blocks(b"x" * BLOCK_BYTES * (MAX_BLOCKS + 9))) == MAX_BLOCKS


def test_difference_at_the_start_changes_every_block() -> None:
    assert not set(leading_blocks(LONG)) & set(leading_blocks(b"!" + LONG[1:]))


def test_routes_a_conversation_to_the_replica_with_its_prefix() -> None:
    affinity = Affinity()
    first = choose([Replica(node="a", in_flight=1), Replica(node="b")], LONG, affinity)
    assert first.node == "b"
    assert choose([Replica(node="a"), Replica(node="b")], LONG + b"more", affinity).node == "b"
    affinity.forget("b")
    assert choose([Replica(node="a"), Replica(node="b")], LONG + b"more", affinity).node == "a"


def test_cached_prefix_does_not_outweigh_a_long_queue() -> None:
    affinity = Affinity()
    affinity.record(leading_blocks(LONG), "b")
    assert choose([Replica(node="a"), Replica(node="b", running=30)], LONG, affinity).node == "a"


def test_routes_to_the_least_busy_replica_without_a_prefix() -> None:
    replicas = [Replica(node="a", running=2), Replica(node="b", running=1), Replica(node="c", in_flight=3)]
    assert choose(replicas, b"hi", Affinity()).node == "b"


def test_own_requests_count_although_the_node_reports_none() -> None:
    assert choose([Replica(node="a", in_flight=5), Replica(node="b", running=1)], b"hi", Affinity()).node == "b"


def test_affinity_is_bounded_and_keeps_recent_prefixes() -> None:
    affinity = Affinity(max_blocks=100)
    for number in range(50):
        affinity.record(leading_blocks(bytes([number]) * 10 * BLOCK_BYTES), "a")
    assert len(affinity) == 100
    assert affinity.num_cached_blocks(leading_blocks(bytes([49]) * 10 * BLOCK_BYTES), "a") == 10
    assert affinity.num_cached_blocks(leading_blocks(bytes([0]) * 10 * BLOCK_BYTES), "a") == 0


replicas = st.builds(
    Replica,
    node=st.sampled_from("abcdef"),
    running=st.integers(0, 20),
    waiting=st.integers(0, 5),
    kv_used_fraction=st.floats(0, 1),
    in_flight=st.integers(0, 20),
)


@given(st.lists(replicas, min_size=2, max_size=6, unique_by=lambda replica: replica.node), st.data())
def test_affinity_never_overrides_saturation(candidates: list[Replica], data: st.DataObject) -> None:
    affinity = Affinity()
    for replica in candidates:
        affinity.record(leading_blocks(LONG[: data.draw(st.integers(0, len(LONG)))]), replica.node)
    chosen = choose(candidates, LONG, affinity)
    assert not chosen.is_saturated or all(replica.is_saturated for replica in candidates)


@given(replicas, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10))
def test_more_work_never_scores_better(replica: Replica, prompt: int, cached: int, extra: int) -> None:
    busier = Replica(
        node=replica.node,
        running=replica.running + extra,
        waiting=replica.waiting,
        kv_used_fraction=replica.kv_used_fraction,
        in_flight=replica.in_flight,
    )
    assert score(busier, prompt, cached) >= score(replica, prompt, cached)
    assert score(replica, prompt + extra, cached) >= score(replica, prompt, cached)
    assert score(replica, prompt, cached + extra) <= score(replica, prompt, cached)
