from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.placement.eviction import Occupant, Protection, choose, due_for_recycling, expired
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import Abilities
from cortex.wire.node.protocol import ModelState

NOW = 10_000.0
Make = Callable[..., Any]


def occupant(name: str, size: int, used: float, priority: int = 0, protection: Protection | None = None) -> Occupant:
    return Occupant(model_id=name, priority=priority, last_used=used, device_bytes={0: size}, protection=protection)


@pytest.mark.parametrize(
    ("strategy", "shortfall", "victims"),
    [
        ("lru", 5, ["cold"]),
        ("lru", 8, ["warm"]),  # cold alone is not enough; with warm it is not needed
        ("lru", 14, ["cold", "warm"]),
        ("priority", 5, ["warm"]),
        ("priority", 12, ["cold", "warm"]),
        ("lru", 30, None),
    ],
)
def test_evicts_in_order_of_strategy(strategy: Any, shortfall: int, victims: list[str] | None) -> None:
    occupants = [
        occupant("hot", 10, used=900, priority=2),
        occupant("cold", 6, used=100, priority=1),
        occupant("warm", 8, used=500, priority=0),
        occupant("stays", 50, used=0, protection=Protection.BUSY),
    ]
    chosen = choose(occupants, {0: shortfall}, EvictionRules(strategy=strategy))
    assert (None if chosen is None else sorted(victim.model_id for victim in chosen)) == victims


def test_evicts_nothing_without_shortfall() -> None:
    assert choose([occupant("a", 5, 1.0)], {}, EvictionRules()) == ()


occupants = st.lists(
    st.builds(
        Occupant,
        model_id=st.uuids().map(str),
        priority=st.integers(0, 3),
        last_used=st.floats(0, 1000),
        device_bytes=st.dictionaries(st.integers(0, 3), st.integers(1, 100), max_size=4),
        protection=st.none() | st.sampled_from(Protection),
    ),
    max_size=8,
)
shortfalls = st.dictionaries(st.integers(0, 3), st.integers(1, 200), max_size=4)


@given(occupants, shortfalls, st.sampled_from(["lru", "priority"]))
def test_victims_are_unprotected_sufficient_and_all_needed(
    held: list[Occupant], short: dict[int, int], strategy: Any
) -> None:
    victims = choose(held, short, EvictionRules(strategy=strategy))
    free = [one for one in held if one.protection is None]

    def freed(models: list[Occupant], index: int) -> int:
        return sum(one.device_bytes.get(index, 0) for one in models)

    if victims is None:
        assert any(freed(free, index) < missing for index, missing in short.items())
        return
    assert all(victim.protection is None for victim in victims)
    assert all(freed(list(victims), index) >= missing for index, missing in short.items())
    for spared in victims:
        rest = [one for one in victims if one is not spared]
        assert any(freed(rest, index) < missing for index, missing in short.items())


@given(occupants, shortfalls)
def test_lru_never_evicts_a_more_recent_model_than_needed(held: list[Occupant], short: dict[int, int]) -> None:
    victims = choose(held, short, EvictionRules(strategy="lru"))
    if not victims:
        return
    warmest = max(victim.last_used for victim in victims)
    colder = [one for one in held if one.protection is None and one.last_used < warmest]
    assert any(sum(one.device_bytes.get(index, 0) for one in colder) < missing for index, missing in short.items())


def test_only_idle_unpinned_models_with_a_ttl_expire(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(
        node(
            "n",
            [80],
            model("old", idle_s=700),
            model("recent", idle_s=500),
            model("busy", idle_s=700, running=1),
            model("just-loaded", idle_s=700, age_s=10),
            model("pinned", idle_s=700),
            model("by-hand", idle_s=700, pinned=True),
            model("asleep", idle_s=700, state=ModelState.ASLEEP),
            model("forever", idle_s=9000),
        ),
        node("foreign", [80], model("old", idle_s=700), abilities=Abilities(takes_orders=False)),
        specs=[
            *(spec(name, ttl_s=600) for name in ("old", "recent", "busy", "just-loaded", "by-hand", "asleep")),
            spec("pinned", ttl_s=600, pinned_on=("n",)),
            spec("forever"),
        ],
    )
    assert expired(snapshot, NOW) == (("n", "old"), ("n", "asleep"))


@pytest.mark.parametrize(
    ("facts", "occupant_facts", "after", "due"),
    [
        ({"num_loads": 50}, {}, 50, True),
        ({"num_loads": 49}, {}, 50, False),
        ({"num_loads": 50}, {}, 0, False),
        ({"num_loads": 50}, {"running": 1}, 50, False),
        ({"num_loads": 50, "healthy": False}, {}, 50, False),
    ],
)
def test_workers_are_recycled_after_enough_loads_when_idle(
    model: Make, node: Make, facts: Any, occupant_facts: Any, after: int, due: bool
) -> None:
    host = node("n", [24], model("m", **occupant_facts), **facts)
    assert due_for_recycling(host, EvictionRules(defrag_after_cycles=after)) is due
