"""Whether somebody else needs a model that could make room for another one."""

from __future__ import annotations

import pytest

from cortex.fleet.demand import SOMEBODY, Demand

A, B = ("n", "a"), ("n", "b")


def loaded_for(*clients: str) -> Demand:
    """`a` was loaded at 10 for requests of these clients, which have ended at 12."""
    demand = Demand()
    demand.load_began(A, for_requests=True)
    demand.load_ended(A, 10.0)
    for client in clients:
        demand.runs(client, A)
        demand.ended(client, A, 12.0)
    return demand


def is_shared(demand: Demand, *, ready_since: float = 10.0, last_used: float = 12.0, now: float = 13.0) -> bool:
    return demand.is_shared(A, "b", ready_since=ready_since, last_used=last_used, now=now)


@pytest.mark.parametrize(
    ("users", "waiting", "expected"),
    [
        (["one"], ["one"], False),
        (["one"], ["two"], True),
        (["one", "two"], ["one"], True),
        (["one", "two"], ["one", "two"], False),
        ([], ["one"], False),
        ([SOMEBODY], [SOMEBODY], True),
        (["one"], [], True),
    ],
)
def test_model_is_shared_unless_all_its_clients_wait_for_the_other_one(
    users: list[str], waiting: list[str], expected: bool
) -> None:
    demand = loaded_for(*users)
    for client in waiting:
        demand.waits(client, "b", 13.0)
    assert is_shared(demand) is expected


def test_client_with_requests_for_both_models_at_once_counts_as_several_for_a_while() -> None:
    demand = loaded_for()
    demand.runs("one", A)
    demand.waits("one", "b", 11.5)
    demand.ended("one", A, 12.0)
    assert is_shared(demand)
    assert not is_shared(demand, now=100.0)
    demand.forget_old(12.0)
    assert is_shared(demand)
    demand.forget_old(100.0)
    assert not is_shared(demand)


def test_client_that_waits_for_the_model_itself_needs_it() -> None:
    demand = loaded_for("one")
    demand.waits("one", "b", 13.0)
    demand.waits("two", "a", 13.0)
    assert is_shared(demand)
    demand.waits_no_more("two", "a")
    assert not is_shared(demand)


def test_model_that_was_loaded_otherwise_is_shared() -> None:
    demand = Demand()
    demand.waits("one", "b", 13.0)
    assert is_shared(demand), "by another gateway, or at the node"
    demand.load_began(A, for_requests=False)
    demand.load_ended(A, 10.0)
    assert is_shared(demand), "by the operator"
    demand = loaded_for("one")
    demand.waits("one", "b", 13.0)
    assert is_shared(demand, ready_since=30.0, last_used=30.0), "again, by another gateway"
    assert is_shared(demand, last_used=20.0, now=21.0), "it is used through another gateway"
    assert not is_shared(demand)
    demand.gone(A)
    assert is_shared(demand)


def test_model_of_very_many_clients_is_shared() -> None:
    clients = [f"client {number}" for number in range(20)]
    demand = loaded_for(*clients)
    for client in clients:
        demand.waits(client, "b", 13.0)
    assert is_shared(demand)
