from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.ipc.fair_queue import Entry, FairQueue, NoPlace

from ..examples import MANY


class Places:
    """A queue, and who was started in which order."""

    def __init__(self, num_places: int = 3, max_waiting: int = 8, per_client: int = 4) -> None:
        self.queue = FairQueue(num_places, max_waiting, per_client)
        self.started: list[str] = []

    def enter(self, client: str, name: str = "") -> Entry:
        return self.queue.enter(client, lambda: self.started.append(name or client))


def test_no_client_holds_all_places() -> None:
    places = Places()
    entries = [places.enter("a", f"a{number}") for number in range(4)]
    assert places.started == ["a0", "a1"]
    places.enter("b")
    assert places.started == ["a0", "a1", "b"]
    places.queue.leave(entries[0])
    assert places.started == ["a0", "a1", "b", "a2"]


def test_single_place_is_given_to_everybody() -> None:
    places = Places(num_places=1)
    first = places.enter("a")
    places.queue.leave(first)
    places.enter("a")
    assert places.started == ["a", "a"]


def test_place_goes_to_the_client_that_holds_the_fewest_then_in_turns() -> None:
    places = Places(num_places=2, per_client=8)
    running = [places.enter("x"), places.enter("y")]
    for number in range(3):
        places.enter("a", f"a{number}")
    places.enter("b", "b0")
    places.enter("c", "c0")
    for entry in running:
        places.queue.leave(entry)
    assert places.started == ["x", "y", "a0", "b0"]


def test_waiting_requests_are_bounded_in_all_and_for_each_client() -> None:
    places = Places(num_places=1, max_waiting=3, per_client=2)
    places.enter("a")
    waiting = [places.enter("a"), places.enter("a")]
    with pytest.raises(NoPlace) as own:
        places.enter("a")
    assert own.value.is_own
    places.enter("b")
    with pytest.raises(NoPlace) as full:
        places.enter("c")
    assert not full.value.is_own
    places.queue.leave(waiting[0])
    places.enter("c")
    assert places.queue.num_waiting == 3


@MANY
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 20)), max_size=60))
def test_every_request_gets_a_place_once_and_places_are_never_exceeded(
    steps: list[tuple[str, bool, int]],
) -> None:
    places = Places(num_places=3, max_waiting=5, per_client=3)
    entries: list[Entry] = []
    num_rejected = 0
    for client, enters, which in steps:
        if enters or not entries:
            try:
                entries.append(places.enter(client))
            except NoPlace:
                num_rejected += 1
        else:
            places.queue.leave(entries.pop(which % len(entries)))
        held = [entry.client for entry in entries if entry.has_place]
        assert len(held) <= 3
        assert all(held.count(name) <= 2 for name in held)
        assert places.queue.num_waiting == sum(not entry.has_place for entry in entries) <= 5
        if places.queue.num_waiting and len(held) < 3:
            assert all(held.count(entry.client) == 2 for entry in entries if not entry.has_place), "no place is idle"
    for entry in entries:
        places.queue.leave(entry)
    assert places.queue.num_waiting == 0
