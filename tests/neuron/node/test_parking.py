"""Room for sleepers: the coldest leaves first, and only for a newcomer that fits then."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.memory.host import HostMemory
from cortex.neuron.node.parking import Parked, Parking, Room, budget_bytes, make_room
from cortex.wire.node import Device


def parked(model_id, host_bytes, idle_s, may_leave=True):
    return Parked(model_id, host_bytes, idle_s, may_leave)


A, B, C = parked("a", 40, 10.0), parked("b", 30, 99.0), parked("c", 20, 50.0)


@pytest.mark.parametrize(
    ("need", "budget", "sleepers", "room"),
    [
        (10, 0, [], Room(fits=False)),
        (10, 10, [], Room(fits=True)),
        (10, 100, [A, B, C], Room(fits=True)),
        (11, 100, [A, B, C], Room(fits=True, leaving=("b",))),
        (50, 100, [A, B, C], Room(fits=True, leaving=("b", "c"))),
        (100, 100, [A, B, C], Room(fits=True, leaving=("b", "c", "a"))),
        (101, 100, [A, B, C], Room(fits=False)),
        (71, 100, [parked("waking", 30, 999.0, may_leave=False), B], Room(fits=False)),
        (70, 100, [parked("waking", 30, 999.0, may_leave=False), B], Room(fits=True, leaving=("b",))),
    ],
)
def test_who_leaves(need, budget, sleepers, room):
    assert make_room(need, budget, sleepers) == room


sleepers = st.lists(
    st.builds(Parked, st.uuids().map(str), st.integers(1, 100), st.floats(0, 100), st.booleans()), max_size=8
)


@given(st.integers(1, 200), st.integers(0, 400), sleepers)
def test_what_is_left_fits_and_nobody_leaves_in_vain(need, budget, held):
    room = make_room(need, budget, held)
    left = [each for each in held if each.model_id not in room.leaving]
    total = sum(each.host_bytes for each in left)
    if room.fits:
        assert total + need <= budget
        assert all(each.may_leave for each in held if each.model_id in room.leaving)
    else:
        assert not room.leaving
        assert sum(each.host_bytes for each in held if not each.may_leave) + need > budget


CPU = Device(index=0, kind="cpu", name="cpu", total_bytes=100)
GPU = Device(index=0, kind="cuda", name="gpu", total_bytes=100)


@pytest.mark.parametrize(
    ("parked_mb", "device", "held", "budget"),
    [(None, CPU, 0, 0), (None, GPU, 0, 500), (None, GPU, 600, 800), (3, CPU, 0, 3 << 20), (0, GPU, 0, 0)],
)
def test_how_much_there_is(parked_mb, device, held, budget):
    assert budget_bytes(parked_mb, [device], HostMemory(4000, 1000), held) == budget


async def test_two_that_come_at_once_do_not_share_the_same_room():
    held = []
    parking = Parking(lambda _: 10, lambda: list(held), lambda _: asyncio.sleep(0))
    admitted = []

    async def park(model_id):
        async with parking.room(10) as has_room:
            await asyncio.sleep(0)
            if has_room:
                admitted.append(model_id)
                held.append(parked(model_id, 10, 0.0, may_leave=False))

    await asyncio.gather(park("one"), park("two"))
    assert admitted == ["one"]
