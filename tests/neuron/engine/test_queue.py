"""The queue: first come first served within a principal, fair between principals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.queue import FairQueue
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.sequence import Sequence


def waiting(name: str, principal: str = "") -> Sequence:
    return Sequence.of(EngineRequest(name, (1,), max_tokens=1, principal=principal))


def queue_of(*sequences: Sequence) -> FairQueue:
    queue = FairQueue()
    for sequence in sequences:
        queue.push(sequence)
    return queue


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request.id for sequence in sequences]


def test_principal_is_served_in_order_of_arrival() -> None:
    first, second = waiting("1", "ada"), waiting("2", "ada")
    queue = queue_of(first, second)
    assert names(queue.heads({})) == ["1"]
    queue.remove(first)
    assert names(queue.heads({})) == ["2"]
    assert len(queue) == 1


def test_principal_with_the_fewest_running_comes_first() -> None:
    queue = queue_of(waiting("a", "ada"), waiting("b", "bob"), waiting("c", "cyd"))
    assert names(queue.heads({"ada": 2, "bob": 0, "cyd": 1})) == ["b", "c", "a"]


def test_among_equals_the_longest_waiting_principal_comes_first() -> None:
    first, second = waiting("a1", "ada"), waiting("b1", "bob")
    queue = queue_of(first, second, waiting("a2", "ada"))
    assert names(queue.heads({})) == ["a1", "b1"]
    queue.remove(first)
    queue.push(waiting("c1", "cyd"))
    assert names(queue.heads({})) == ["a2", "b1", "c1"]


def test_anonymous_principal_comes_last_among_equals() -> None:
    queue = queue_of(waiting("anonymous"), waiting("a", "ada"))
    assert names(queue.heads({})) == ["a", "anonymous"]
    assert names(queue.heads({"ada": 1})) == ["a", "anonymous"]
    assert names(queue.heads({"ada": 2})) == ["anonymous", "a"]


def test_preempted_sequence_goes_to_the_front_of_its_own_queue_only() -> None:
    queue = queue_of(waiting("a", "ada"), waiting("b", "bob"))
    queue.push_front(waiting("b0", "bob"))
    assert names(queue.heads({})) == ["a", "b0"]


def test_emptied_queue_leaves_nothing_behind() -> None:
    sequence = waiting("a", "ada")
    queue = queue_of(sequence)
    queue.remove(sequence)
    assert len(queue) == 0
    assert list(queue) == []
    assert queue.heads({"ada": 3}) == []


@given(st.lists(st.sampled_from(["", "ada", "bob", "cyd"]), max_size=30), st.integers(1, 4))
def test_rows_are_shared_evenly_while_all_principals_wait(arrivals: list[str], num_rows: int) -> None:
    """Rows are filled one by one and none ends: waiting named principals differ by at most one running sequence."""
    queue = queue_of(*(waiting(str(index), principal) for index, principal in enumerate(arrivals)))
    running: dict[str, int] = {}
    for _ in range(min(num_rows, len(arrivals))):
        head = queue.heads(running)[0]
        queue.remove(head)
        running[head.request.principal] = running.get(head.request.principal, 0) + 1
        still_waiting = {sequence.request.principal for sequence in queue}
        for principal in still_waiting - {""}:
            assert max(running.values()) <= running.get(principal, 0) + 1
            assert running.get("", 0) <= running.get(principal, 0)
