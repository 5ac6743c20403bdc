"""Host memory for sleeping models: the longest idle is unloaded first, and only for a model that fits then."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.memory.host import HostMemory
from cortex.neuron.node.memory.sleep_budget import (
    SleepBudget,
    SleepingModel,
    SleepPlan,
    can_sleep,
    make_room,
    sleep_budget_bytes,
)
from cortex.wire.node.protocol import Device


def sleeping(model_id: str, host_bytes: int, idle_s: float, can_be_unloaded: bool = True) -> SleepingModel:
    return SleepingModel(model_id, host_bytes, idle_s, can_be_unloaded)


A, B, C = sleeping("a", 40, 10.0), sleeping("b", 30, 99.0), sleeping("c", 20, 50.0)


@pytest.mark.parametrize(
    ("need", "budget", "sleeping_models", "room"),
    [
        (10, 0, [], SleepPlan(fits=False)),
        (10, 10, [], SleepPlan(fits=True)),
        (10, 100, [A, B, C], SleepPlan(fits=True)),
        (11, 100, [A, B, C], SleepPlan(fits=True, to_unload=("b",))),
        (50, 100, [A, B, C], SleepPlan(fits=True, to_unload=("b", "c"))),
        (100, 100, [A, B, C], SleepPlan(fits=True, to_unload=("b", "c", "a"))),
        (101, 100, [A, B, C], SleepPlan(fits=False)),
        (71, 100, [sleeping("waking", 30, 999.0, can_be_unloaded=False), B], SleepPlan(fits=False)),
        (70, 100, [sleeping("waking", 30, 999.0, can_be_unloaded=False), B], SleepPlan(fits=True, to_unload=("b",))),
    ],
)
def test_unloads_the_longest_idle_first_and_only_as_many_as_needed(
    need: int, budget: int, sleeping_models: list[SleepingModel], room: SleepPlan
) -> None:
    assert make_room(need, budget, sleeping_models) == room


sleeping_models = st.lists(
    st.builds(SleepingModel, st.uuids().map(str), st.integers(1, 100), st.floats(0, 100), st.booleans()), max_size=8
)


@given(st.integers(1, 200), st.integers(0, 400), sleeping_models)
def test_what_is_left_fits_and_nothing_is_unloaded_otherwise(need: int, budget: int, held: list[SleepingModel]) -> None:
    room = make_room(need, budget, held)
    left = [each for each in held if each.model_id not in room.to_unload]
    total = sum(each.host_bytes for each in left)
    if room.fits:
        assert total + need <= budget
        assert all(each.can_be_unloaded for each in held if each.model_id in room.to_unload)
    else:
        assert not room.to_unload
        assert sum(each.host_bytes for each in held if not each.can_be_unloaded) + need > budget


CPU = Device(index=0, kind="cpu", name="cpu", total_bytes=100)
GPU = Device(index=0, kind="cuda", name="gpu", total_bytes=100)


@pytest.mark.parametrize(
    ("sleep_mb", "device", "held", "budget"),
    [(None, CPU, 0, 0), (None, GPU, 0, 500), (None, GPU, 600, 800), (3, CPU, 0, 3 << 20), (0, GPU, 0, 0)],
)
def test_budget_is_the_configured_one_or_a_share_of_free_host_memory(
    sleep_mb: int | None, device: Device, held: int, budget: int
) -> None:
    assert sleep_budget_bytes(sleep_mb, [device], HostMemory(4000, 1000), held) == budget
    assert can_sleep(sleep_mb, [device]) is (budget > 0)


async def test_two_models_at_once_do_not_get_the_same_room() -> None:
    held: list[SleepingModel] = []
    rests: list[int] = []
    budget = SleepBudget(lambda _: 15, lambda: list(held), lambda _: asyncio.sleep(0), rests.append)
    admitted = []

    async def sleep(model_id: str) -> None:
        async with budget.reserve(10) as has_room:
            await asyncio.sleep(0)
            if has_room:
                admitted.append(model_id)
                held.append(sleeping(model_id, 10, 0.0, can_be_unloaded=False))

    await asyncio.gather(sleep("one"), sleep("two"))
    assert admitted == ["one"]
    assert rests == [5], "what the model leaves is for the pages of others"


async def test_others_get_back_what_a_model_took_that_has_woken_or_did_not_fall_asleep() -> None:
    held: list[SleepingModel] = []
    rests: list[int] = []
    budget = SleepBudget(lambda _: 15, lambda: list(held), lambda _: asyncio.sleep(0), rests.append)
    budget.settle()
    assert rests == [], "none has taken anything"
    async with budget.reserve(10):
        budget.settle()
        assert rests == [5], "it falls asleep now"
    budget.settle()
    assert rests == [5, 15], "it did not"
    async with budget.reserve(10):
        held.append(sleeping("one", 10, 0.0))
    budget.settle()
    assert rests == [5, 15, 5]
    held.clear()
    budget.settle()
    budget.settle()
    assert rests == [5, 15, 5, 15]
