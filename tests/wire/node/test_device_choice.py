"""The one rule that chooses devices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.wire.node.device_choice import Division, Strategy, choose_devices

rooms = st.dictionaries(st.integers(0, 15), st.integers(0, 100), max_size=8)
divisions = st.builds(
    Division, st.integers(0, 200), st.integers(1, 4), by_layers=st.booleans(), num_layers=st.integers(1, 40)
)
strategies = st.sampled_from(["pack", "spread"])


@given(rooms, divisions, strategies)
def test_chooses_as_many_devices_as_the_model_takes_each_with_room(
    have: dict[int, int], division: Division, strategy: Strategy
) -> None:
    chosen = choose_devices(division, have, strategy)
    assert bool(chosen) == division.fits(have.values())
    if chosen:
        assert len(set(chosen)) == division.num_devices
        assert list(chosen) == sorted(chosen)
        assert division.fits([have[index] for index in chosen])


@given(rooms, divisions, strategies)
def test_takes_the_fullest_or_the_emptiest_devices(
    have: dict[int, int], division: Division, strategy: Strategy
) -> None:
    chosen = choose_devices(division, have, strategy)
    others = [have[index] for index in have if index not in chosen and have[index] >= division.least_share]
    if chosen and others:
        taken = [have[index] for index in chosen]
        is_packed = strategy == "pack" and not division.by_layers
        assert max(taken) <= min(others) if is_packed else min(taken) >= max(others)


@given(rooms, divisions, strategies)
def test_devices_that_were_chosen_are_chosen_again_from_themselves(
    have: dict[int, int], division: Division, strategy: Strategy
) -> None:
    chosen = choose_devices(division, have, strategy)
    named = {index: have[index] for index in chosen}
    assert choose_devices(division, named, "pack") == choose_devices(division, named, "spread") == chosen


@given(rooms, divisions, strategies, st.randoms(use_true_random=False))
def test_does_not_depend_on_the_order_of_devices(
    have: dict[int, int], division: Division, strategy: Strategy, random: object
) -> None:
    items = list(have.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert choose_devices(division, dict(items), strategy) == choose_devices(division, have, strategy)
